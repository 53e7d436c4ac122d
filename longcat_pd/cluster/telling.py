"""What an operator is told, the exit statuses of the verbs, and what a time may be."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from longcat_pd.errors import ConfigError

EXIT_OK, EXIT_FAILED, EXIT_REFUSED, EXIT_NOT_RUNNING = 0, 1, 2, 3
_LONGEST_S = 1e6  # eleven days: what waits counts milliseconds in 31 bits


def seconds(text: str) -> float:
    """What ``--timeout-s`` takes, for argparse."""
    value = float(text)
    if not 0 <= value <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text}: must be from 0 to {_LONGEST_S:g} seconds")
    return value


def say(text: str) -> None:
    """One or more lines, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    """Lines on standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def grouped(findings: Iterable[tuple[str, str]], *, is_alone: bool) -> list[str]:
    """Findings of machines, as (machine, text), a line each; the same text of several machines is one line.

    ``is_alone``: there is but one machine, which need not be named.
    """
    machines: dict[str, list[str]] = {}
    for machine, text in findings:
        machines.setdefault(text, []).append(machine)
    return [text if is_alone else f"{', '.join(names)}: {text}" for text, names in machines.items()]


def refuse_if_any(lines: list[str]) -> None:
    """Raise one ConfigError with a line for each finding."""
    if lines:
        raise ConfigError("\n".join(lines))


def not_running(name: str, others: Iterable[str]) -> str:
    """Says so, and which other clusters do run."""
    return f"{name} is not running" + "".join(f"\n{other} is; name that file to mean it" for other in others)
