"""``longcat-pd infer``: request bodies from a file, one a line; their answers on standard output, one a line, in order.
Or, with ``--yaml``, a run of the offline dialect (``offline_run.py``).

Owns the command's arguments. A line that fails is answered with its error object.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from longcat_pd import log
from longcat_pd.config import resolve
from longcat_pd.errors import ConfigError, LongcatError
from longcat_pd.server.run import STATUS_FAULT, STATUS_REFUSED
from longcat_pd.standalone.default_model import HELP, with_default
from longcat_pd.standalone.lines import answer_file, read_lines
from longcat_pd.standalone.offline_run import run
from longcat_pd.standalone.unattended import unattended

_PORT = 8081  # stands in the configuration until it is known whether ports are needed, and which are free


def main(arguments: Sequence[str]) -> int:
    """Answer a file; the exit status. Refused lines do not count."""
    parser = _parser()
    options = parser.parse_args(arguments)
    foreign = {"--dtype": options.dtype and options.yaml, "--check": options.check and options.input}
    for name, is_there in foreign.items():
        if is_there:
            parser.error(f"{name} does not go with {'--yaml' if options.yaml else '--input'}")
    if options.yaml and options.model is None:
        parser.error("--yaml needs --model: the model_name that it is for")
    log.set_up(level="warning")
    settings = [*options.overrides, *([f"model.dtype={options.dtype}"] if options.dtype else [])]
    try:
        if options.yaml is not None:
            return run(options.model, options.yaml, options.overrides, only_check=options.check, out=sys.stdout)
        model, overrides = with_default(options.model, settings)
        spec = resolve.standalone(model, overrides, host="127.0.0.1", port=_PORT)
        lines = read_lines(options.input)
        return asyncio.run(answer_file(unattended(spec), lines, sys.stdout, progress=sys.stderr))
    except ConfigError as error:  # whoever runs this reads no log
        sys.stderr.write("".join(f"error: {line}\n" for line in error.message.splitlines()))
        return STATUS_REFUSED
    except LongcatError as error:
        log.logger().error("infer_failed", code=error.code, reason=error.message)
        return STATUS_FAULT


def _parser() -> argparse.ArgumentParser:
    text = "Answer the request bodies of a file, in order; or the prompts of an offline YAML, with a table of times."
    parser = argparse.ArgumentParser(prog="longcat-pd infer", description=text)
    parser.add_argument("--model", metavar="DIR", help=f"{HELP}; with --yaml the model_name that it is for")
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
