"""``python -m tools.eval_tiny``: the score card of the tiny checkpoints, printed by one command.

Owns the command line. Exit status 0: every floor is reached and all runs of a checkpoint agree; 1: not so; 2: refused.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from longcat_pd import log
from longcat_pd.bench.servers import BenchFailed
from longcat_pd.errors import ConfigError
from longcat_pd.parallel.platform import platform_of
from tools.tiny.card import Case, chosen
from tools.tiny.card_cases import SKILLS, all_cases
from tools.tiny.card_page import as_json, is_passed, markdown, wrong_answers
from tools.tiny.card_runs import AS_SERVED, DRAFTS, ENGINE, POOLS, Run, checkpoint, runs

SHIPPED = tuple(Path(__file__).parents[1] / "longcat_pd/tiny/trained" / name for name in ("bf16", "int8"))
OF_SHIPPED = (
    "Trained by `python -m tools.train_tiny OUT` from nothing with seed 0: 7,200 steps, 16 million tokens, 76 minutes on "
    "2 cores that had other work beside it. An earlier run of the same recipe, whose sums were not repeatable to the bit, "
    "reached every floor as well.",
    "Computed in bfloat16 (`--set model.dtype=bfloat16`) they miss one line, for `bf16`: P(2,2) → D(2) says the same as "
    "one engine in 933 of 934 cases, as two words that are nearly as likely may change places.",
)
HOWS = {"standalone": (ENGINE, DRAFTS), "pd": (POOLS,), "all": (ENGINE, DRAFTS, POOLS)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask everything; the exit status."""
    options = _parser().parse_args(arguments)
    log.set_up(level="warning")
    cases = chosen(all_cases(), options.skills, at_most=options.at_most)
    settings = [*AS_SERVED, *options.overrides]
    models = [model.absolute() for model in options.model or SHIPPED]
    try:
        _check_places([file for file in (options.write, options.wrong) if file is not None])
        checkpoints = [checkpoint(model) for model in models]
        platform_of("cpu").prepare_rank()  # the engine of this process is one
        found = asyncio.run(_all_runs(models, cases, HOWS[options.how], settings))
    except (ConfigError, BenchFailed) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    in_force = {setting.partition("=")[0]: setting for setting in settings}
    own = () if options.model else OF_SHIPPED
    notes = [*own, *options.note, *(f"with `{setting}`" for setting in in_force.values())]
    page = markdown(checkpoints, found, notes)
    sys.stdout.write(as_json(checkpoints, found, notes) if options.json else page)
    if options.write is not None:
        options.write.write_text(page, encoding="utf-8")
    if options.wrong is not None:
        options.wrong.write_text("".join(wrong_answers(cases, run) for run in found), encoding="utf-8")
    return 0 if is_passed(found) else 1


def _check_places(files: Sequence[Path]) -> None:
    """Before anything is asked, which takes long. Raises ConfigError."""
    for file in files:
        if file.is_dir() or not os.access(file.absolute().parent, os.W_OK | os.X_OK):
            raise ConfigError(f"{file}: cannot be written there")


async def _all_runs(
    models: Sequence[Path], cases: Sequence[Case], hows: Sequence[str], settings: Sequence[str]
) -> list[Run]:
    began, found = time.monotonic(), list[Run]()
    for model in models:
        async for run in runs(model, cases, hows, settings=settings):
            found.append(run)
            sys.stderr.write(f"{time.monotonic() - began:6.1f} s: {run.checkpoint}, {run.how} done\n")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.eval_tiny", description="The score card of tiny checkpoints.")
    parser.add_argument(
        "--model",
        type=Path,
        action="append",
        metavar="DIR",
        help="a checkpoint; repeatable; default: both that are shipped",
    )
    parser.add_argument("--how", choices=HOWS, default="all", help="in this process, through a cluster, or both")
    parser.add_argument("--skills", nargs="+", choices=SKILLS, default=(), metavar="SKILL", help=f"of {', '.join(SKILLS)}")
    parser.add_argument("--at-most", type=int, metavar="N", help="the first N cases of each skill: a glance, not a card")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the page")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page there too")
    parser.add_argument("--wrong", type=Path, metavar="FILE", help="write wrong answers there, as JSON lines")
    parser.add_argument("--note", action="append", default=[], metavar="TEXT", help="a line of the page, such as the seed")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="key=value",
        help="of all runs: model.dtype=bfloat16",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
