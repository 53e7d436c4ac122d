"""``longcat-pd infer``: request bodies from a file, one a line; their answers on standard output, one a line, in order.

Owns the command's arguments and the order of its lines. The answers are the common face's, the rank is in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from longcat_pd import log
from longcat_pd.clock import MonotonicClock
from longcat_pd.config import resolve
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.engine.driver import Engine
from longcat_pd.engine.executor import rank_specs
from longcat_pd.engine.inline import InlineExecutor
from longcat_pd.errors import ConfigError, LongcatError
from longcat_pd.metrics import Metrics
from longcat_pd.server.errors import error_object, known, to_json
from longcat_pd.server.face import OFFLINE_LIMIT_S, Face
from longcat_pd.server.openai import CHAT_ROUTE, COMPLETIONS_ROUTE, decode_body
from longcat_pd.server.run import STATUS_FAULT, STATUS_OK, refuse
from longcat_pd.server.text import TextProcessor
from longcat_pd.standalone.service import StandaloneService

_PORT = 8081  # names the instance's ports in its configuration; none is opened


def main(arguments: Sequence[str]) -> int:
    """Answer a file; the exit status. A line that fails is answered with its error object and does not count."""
    options = _parser().parse_args(arguments)
    log.set_up(level="warning")
    overrides = [*options.overrides, *([f"model.dtype={options.dtype}"] if options.dtype else [])]
    try:
        spec = _patient(resolve.standalone(options.model, overrides, host="127.0.0.1", port=_PORT))
        lines = _lines(options.input)
        return asyncio.run(_infer(spec, lines, sys.stdout))
    except ConfigError as error:
        return refuse(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="longcat-pd infer", description="Answer request bodies of a file, in order.")
    parser.add_argument("--model", required=True, metavar="DIR", help="checkpoint")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of weights and cache; else the checkpoint's")
    parser.add_argument("--input", required=True, metavar="FILE", help="JSON lines: bodies of chat or of completions")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="key=value",
        help="a setting, such as engine.max_num_seqs=16",
    )  # fmt: skip
    return parser


def _patient(spec: InstanceSpec) -> InstanceSpec:
    """Nobody waits at the other end, so nothing is refused for waiting."""
    return replace(spec, engine=replace(spec.engine, queue_timeout_s=OFFLINE_LIMIT_S, max_queued_requests=2**31))


def _lines(path: str) -> list[bytes]:
    """The lines that are not empty. Raises ConfigError."""
    try:
        return [line for line in Path(path).read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--input {path}: {error.strerror}") from error


async def _infer(spec: InstanceSpec, lines: Sequence[bytes], out: TextIO) -> int:
    clock, metrics = MonotonicClock(), Metrics(role=spec.role, instance=spec.name)
    incarnation = secrets.token_hex(8)
    engine = Engine(
        spec.engine,
        spec.parallel,
        executor=InlineExecutor(rank_specs(spec, incarnation)[0]),
        eos_token_ids=frozenset(ModelConfig.load(spec.model.path).eos_token_id),
        clock=clock,
        metrics=metrics,
    )
    service = StandaloneService(spec, engine, incarnation=incarnation, clock=clock, metrics=metrics)
    face = Face(service, TextProcessor.load(spec.model.path))
    await service.start()
    try:
        await _answer_in_order(face, lines, out, width=2 * spec.engine.max_num_seqs)
    except LongcatError as error:
        log.logger().error("infer_failed", code=error.code, reason=error.message)
        return STATUS_FAULT
    finally:
        await service.close()
    return STATUS_OK


async def _answer_in_order(face: Face, lines: Sequence[bytes], out: TextIO, *, width: int) -> None:
    """Keep ``width`` lines in work; write each answer when all before it are written."""
    waiting: Iterator[tuple[int, bytes]] = enumerate(lines, start=1)
    in_work: deque[tuple[int, asyncio.Task[dict[str, Any]]]] = deque()
    for number, line in waiting:
        in_work.append((number, asyncio.ensure_future(_answer(face, number, line))))
        if len(in_work) >= width:
            await _write_next(in_work, out)
    while in_work:
        await _write_next(in_work, out)


async def _write_next(in_work: deque[tuple[int, asyncio.Task[dict[str, Any]]]], out: TextIO) -> None:
    number, task = in_work.popleft()
    await asyncio.wait({task})
    error = task.exception()
    answer = task.result() if error is None else error_object(known(error), f"line-{number}")
    out.write(to_json(answer).decode() + "\n")
    out.flush()


async def _answer(face: Face, number: int, line: bytes) -> dict[str, Any]:
    values = decode_body(line)
    route = CHAT_ROUTE if "messages" in values else COMPLETIONS_ROUTE
    return await face.answer(face.read(route, values), face.call(f"line-{number}", OFFLINE_LIMIT_S))
