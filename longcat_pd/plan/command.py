"""``longcat-pd plan FILE``: what a cluster YAML asks of every card, machine and link, before anything is started.

Asks no machine and loads no weights: of the checkpoint it reads config.json. Only ``--meta`` needs torch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from longcat_pd.config.resolve import load
from longcat_pd.errors import ConfigError
from longcat_pd.plan import advise, estimate
from longcat_pd.plan.advise import advice_lines
from longcat_pd.plan.estimate import estimate_lines
from longcat_pd.plan.picture import page
from longcat_pd.plan.record import record
from longcat_pd.plan.survey import Survey, survey
from longcat_pd.plan.table import lines

EXIT_OK, EXIT_REFUSED = 0, 2


def main(arguments: Sequence[str]) -> int:
    """Print the plan, and what stands against it on stderr. Exit status 0, or 2 if anything does."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.roofline or options.advise:
        idle = [f"--{name}" for name in ("json", "ranks", "html", "meta") if vars(options)[name]]
        if idle or (options.roofline and options.advise):
            parser.error(f"--roofline or --advise stands alone, not with {', '.join(idle) or 'the other'}")
        return _times(options)
    plan = survey(options.config, options.set)
    if not options.json:
        _say(lines(plan, is_long=options.ranks))
    plan, report = _built(plan) if options.meta else (plan, None)
    if options.json:
        built = {} if report is None else {"built": [vars(instance) for instance in report.instances]}
        sys.stdout.write(json.dumps({**record(plan), **built}, indent=1) + "\n")
    elif report is not None:
        _say(["", *report.lines()])
    findings = list(plan.findings)
    if options.html is not None:
        try:
            Path(options.html).write_text(page(plan, Path(options.config).name), encoding="utf-8")
        except OSError as error:
            findings.append(f"--html {options.html}: cannot be written: {error.strerror}")
    sys.stdout.flush()
    for line in findings:
        sys.stderr.write(f"error: {line}\n")
    return EXIT_REFUSED if findings else EXIT_OK


def _say(told: Iterable[str]) -> None:
    """At once: what comes next may take minutes."""
    sys.stdout.write("".join(f"{line}\n" for line in told))
    sys.stdout.flush()


class _Report(Protocol):
    """What ``sizing/meta_build.py`` saw."""

    @property
    def instances(self) -> Sequence[object]:
        """One of each pool."""

    @property
    def findings(self) -> Sequence[str]:
        """One line each."""

    def lines(self) -> Iterator[str]:
        """For people."""


def _built(plan: Survey) -> tuple[Survey, _Report | None]:
    """The plan with what disagrees with it, and what was seen of every rank, built at full size without memory.

    By name, for that takes torch, which a plan is made without. Nothing is built where the plan has no ranks.
    """
    if plan.config is None or not plan.instances:
        return plan, None
    try:
        report: _Report = importlib.import_module("longcat_pd.sizing.meta_build").check_ranks(plan.config)
    except ConfigError as error:
        return replace(plan, findings=(*plan.findings, *error.message.splitlines())), None
    return replace(plan, findings=(*plan.findings, *report.findings)), report


def _times(options: argparse.Namespace) -> int:
    """Print estimates, or layouts that are estimated best. The file has to be one that would start."""
    told = advice_lines if options.advise else estimate_lines
    try:
        for line in told(load(options.config, options.set), options):
            sys.stdout.write(f"{line}\n")
    except ConfigError as error:
        sys.stdout.flush()
        sys.stderr.write("".join(f"error: {line}\n" for line in error.message.splitlines()))
        return EXIT_REFUSED
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="longcat-pd plan", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", metavar="FILE", help="a cluster YAML")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="laid over the file; repeatable")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.add_argument("--ranks", action="store_true", help="a line for every rank, too")
    parser.add_argument(
        "--meta", action="store_true", help="build every rank too, without memory; half a minute, needs torch"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with a picture of the cluster")
    estimate.add_arguments(parser)
    advise.add_arguments(parser)
    return parser
