"""``longcat-pd plan FILE``: what a cluster YAML asks of every card, machine and link, before anything is started.

Asks no machine and loads no weights: of the checkpoint it reads config.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from longcat_pd.config.resolve import load
from longcat_pd.errors import ConfigError
from longcat_pd.plan import advise, estimate
from longcat_pd.plan.advise import advice_lines
from longcat_pd.plan.estimate import estimate_lines
from longcat_pd.plan.picture import page
from longcat_pd.plan.record import record
from longcat_pd.plan.survey import survey
from longcat_pd.plan.table import lines

EXIT_OK, EXIT_REFUSED = 0, 2


def main(arguments: Sequence[str]) -> int:
    """Print the plan, and what stands against it on stderr. Exit status 0, or 2 if anything does."""
    options = _parser().parse_args(arguments)
    if options.roofline or options.advise:
        return _times(options)
    plan = survey(options.config, options.set)
    if options.json:
        sys.stdout.write(json.dumps(record(plan), indent=1) + "\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in lines(plan, is_long=options.ranks)))
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
    parser.add_argument("--html", metavar="FILE", help="write a page with a picture of the cluster")
    estimate.add_arguments(parser)
    advise.add_arguments(parser)
    return parser
