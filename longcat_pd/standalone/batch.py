"""Many bodies through a face at once, their answers written in the order of the bodies. Knows no model and no files."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any, TextIO

from longcat_pd.server.errors import error_object, known, to_json
from longcat_pd.server.face import OFFLINE_LIMIT_S, Face
from longcat_pd.server.openai import CHAT_ROUTE, COMPLETIONS_ROUTE, decode_body

Answers = deque[tuple[str, asyncio.Task[dict[str, Any]]]]


async def answer_in_order(face: Face, lines: Iterable[tuple[int, bytes]], out: TextIO, *, width: int) -> None:
    """Keep up to ``width`` lines in work; write each answer, or its error object, when all before it are written.

    ``lines``: (number, body); the number becomes part of the answer's id, and stands beside the error.
    """
    in_work: Answers = deque()
    try:
        for number, line in lines:
            name = f"line-{number}"
            in_work.append((name, asyncio.ensure_future(_answer(face, name, line))))
            if len(in_work) >= width:
                await _write_next(in_work, out)
        while in_work:
            await _write_next(in_work, out)
    finally:
        for _, task in in_work:
            task.cancel()
        await asyncio.gather(*(task for _, task in in_work), return_exceptions=True)


async def _write_next(in_work: Answers, out: TextIO) -> None:
    name, task = in_work[0]
    await asyncio.wait({task})
    in_work.popleft()
    error = task.exception()
    answer = task.result() if error is None else {**error_object(known(error), name), "line": name}
    out.write(to_json(answer).decode() + "\n")
    out.flush()


async def _answer(face: Face, name: str, line: bytes) -> dict[str, Any]:
    values = decode_body(line)
    route = CHAT_ROUTE if "messages" in values else COMPLETIONS_ROUTE
    return await face.answer(face.read(route, values), face.call(name, OFFLINE_LIMIT_S))
