"""``longcat-pd infer``: request bodies from a file, one a line; their answers on standard output, one a line, in order.
Or, with ``--yaml``, a run of the offline dialect (``offline_run.py``).

Owns the command's arguments. A line that fails is answered with its error object.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from longcat_pd import log
from longcat_pd.config import resolve
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.errors import ConfigError, LongcatError
from longcat_pd.server.face import OFFLINE_LIMIT_S, Face
from longcat_pd.server.run import STATUS_FAULT, STATUS_OK, refuse
from longcat_pd.server.text import TextProcessor
from longcat_pd.standalone.batch import answer_in_order
from longcat_pd.standalone.offline import offline
from longcat_pd.standalone.offline_run import on_free_ports, run

_PORT = 8081  # names the instance's ports in its configuration; none is opened


def main(arguments: Sequence[str]) -> int:
    """Answer a file; the exit status. Refused lines do not count."""
    options = _parser().parse_args(arguments)
    log.set_up(level="warning")
    overrides = [*options.overrides, *([f"model.dtype={options.dtype}"] if options.dtype else [])]
    try:
        if options.yaml is not None:
            return run(options.model, options.yaml, options.overrides, only_check=options.check, out=sys.stdout)
        spec = _patient(resolve.standalone(options.model, overrides, host="127.0.0.1", port=_PORT))
        return asyncio.run(_infer(spec, _lines(options.input), sys.stdout))
    except ConfigError as error:
        return refuse(error)
    except LongcatError as error:
        log.logger().error("infer_failed", code=error.code, reason=error.message)
        return STATUS_FAULT


def _parser() -> argparse.ArgumentParser:
    text = "Answer the request bodies of a file, in order; or the prompts of an offline YAML, with a table of times."
    parser = argparse.ArgumentParser(prog="longcat-pd infer", description=text)
    parser.add_argument("--model", required=True, help="checkpoint's folder; with --yaml the model_name that it is for")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", metavar="FILE", help="JSON lines: bodies of chat or of completions")
    source.add_argument("--yaml", metavar="FILE", help="model_config, data_config, parallel_config, scheduler_config")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="with --input; else the checkpoint's")
    parser.add_argument("--check", action="store_true", help="with --yaml: print the plan, look at everything, then end")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="key=value",
        help="a setting, such as engine.max_num_seqs=16 or, of a YAML, scheduler_config.batch_size=2",
    )  # fmt: skip
    return parser


def _patient(spec: InstanceSpec) -> InstanceSpec:
    """Nobody waits at the other end, so nothing is refused for waiting."""
    return replace(spec, engine=replace(spec.engine, queue_timeout_s=OFFLINE_LIMIT_S, max_queued_requests=sys.maxsize))


def _lines(path: str) -> list[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers in the file. Raises ConfigError."""
    try:
        numbered = enumerate(Path(path).read_bytes().splitlines(), start=1)
        return [(number, line) for number, line in numbered if line.strip()]
    except OSError as error:
        raise ConfigError(f"--input {path}: {error.strerror}") from error


async def _infer(spec: InstanceSpec, lines: Sequence[tuple[int, bytes]], out: TextIO) -> int:
    service = offline(on_free_ports(spec) if spec.parallel.world_size > 1 else spec)
    face = Face(service, TextProcessor.load(spec.model.path))
    await service.start()
    try:
        await answer_in_order(face, lines, out, width=2 * spec.engine.max_num_seqs)
    finally:
        await service.close()
    return STATUS_FAULT if service.readiness().is_lost else STATUS_OK
