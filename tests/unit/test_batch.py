"""Offline lines: as many in work as allowed, answers in the order of the lines, an error where one failed."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any, cast

import pytest

from longcat_pd.errors import InvalidRequest
from longcat_pd.server.face import Face
from longcat_pd.standalone.batch import answer_in_order
from tests.manual_clock import settle


class ScriptedFace:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.open: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.most = 0

    def read(self, route: str, values: dict[str, Any]) -> dict[str, Any]:
        return {"route": route, **values}

    def call(self, request_id: str, time_left_s: float) -> str:
        return request_id

    async def answer(self, body: dict[str, Any], call: str) -> dict[str, Any]:
        self.open[call] = asyncio.get_running_loop().create_future()
        self.most = max(self.most, len(self.open))
        try:
            return {"line": call, "route": body["route"], **await self.open[call]}
        finally:
            del self.open[call]


def rows(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


async def test_answers_keep_the_order_of_the_lines() -> None:
    face, out = ScriptedFace(), io.StringIO()
    lines = [b'{"prompt": [1]}', b'{"messages": []}', b"{", b'{"prompt": [2]}']
    running = asyncio.create_task(answer_in_order(cast(Face, face), enumerate(lines, start=1), out, width=2))
    await settle()
    assert set(face.open) == {"line-1", "line-2"}
    face.open["line-2"].set_result({})
    await settle()
    assert rows(out) == [] and set(face.open) == {"line-1"}, "the third waits for the first to be written"
    face.open["line-1"].set_result({})
    await settle()
    face.open["line-4"].set_exception(InvalidRequest("too long", param="prompt"))
    await running
    written = rows(out)
    assert [w.get("route") for w in written] == ["/v1/completions", "/v1/chat/completions", None, None]
    assert [w["error"]["code"] for w in written[2:]] == ["invalid_json", "invalid_value"]
    assert face.most == 2


async def test_a_line_that_breaks_us_is_told_without_our_inside() -> None:
    face, out = ScriptedFace(), io.StringIO()
    running = asyncio.create_task(answer_in_order(cast(Face, face), [(1, b'{"prompt": [1]}')], out, width=2))
    await settle()
    face.open["line-1"].set_exception(ZeroDivisionError("secret"))
    await running
    (written,) = rows(out)
    assert written["error"]["code"] == "engine_fault" and "secret" not in written["error"]["message"]


async def test_an_interrupted_batch_leaves_nothing_running() -> None:
    face = ScriptedFace()
    running = asyncio.create_task(
        answer_in_order(cast(Face, face), [(n, b'{"prompt": [1]}') for n in (1, 4, 5)], io.StringIO(), width=4)
    )
    await settle()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert face.open == {}
