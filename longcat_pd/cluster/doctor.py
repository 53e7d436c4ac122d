"""``run_pd.sh doctor``: whether the machines of a cluster are ready for it, and alike. Changes nothing.

Owns what is asked of whom and the table; what the answers mean is ``findings.py``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from longcat_pd import wire
from longcat_pd.cluster import packages
from longcat_pd.cluster.conversation import Conversation
from longcat_pd.cluster.everywhere import StepFailed, everywhere
from longcat_pd.cluster.facts import Facts
from longcat_pd.cluster.findings import Row, clock, rows_of, unequal
from longcat_pd.cluster.patients import Patient, patients_of
from longcat_pd.cluster.shell import Unreachable
from longcat_pd.cluster.telling import EXIT_FAILED, EXIT_OK, say

_SCRIPTS = Path(__file__).parent / "node"
_ASK_S, _FACTS_S = 60.0, 300.0
_CLOCK_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What was found on one machine. ``versions``: of its packages; none where its interpreter does not run."""

    facts: Facts
    rows: tuple[Row, ...]
    versions: Mapping[str, str]


def main(options: argparse.Namespace) -> int:
    """The verb. Exit status 0: nothing is bad, 1: something is. Raises ConfigError."""
    outcome = everywhere(patients_of(options.root.resolve(), options.config, options.overrides), examine)
    rows = [Row(level="bad", node=fault.node, what="reached", text=fault.reason) for fault in outcome.faults]
    rows += [row for examined in outcome.results.values() for row in examined.rows]
    rows += _alike(outcome.results)
    say("\n".join(table(rows)))
    return EXIT_FAILED if any(row.level == "bad" for row in rows) else EXIT_OK


def examine(patient: Patient) -> Examined:
    """Look at one machine. Raises StepFailed and Unreachable."""
    hosts, expected, node = patient.config.hosts, patient.expected, patient.shell.node
    script, looking = (_SCRIPTS / "doctor.sh").read_text("utf-8"), (_SCRIPTS / "doctor.py").read_text("utf-8")
    arguments = [hosts.path.rstrip("/"), patient.python, looking, *hosts.setup_files]
    talk = Conversation(patient.shell, ["sh", "-c", script, "doctor.sh", *arguments])
    try:
        talk.hear(_ASK_S)
        time_row = _clock(node, talk)
        request = wire.to_json(patient.request).encode()
        told = talk.ask(f"facts {len(request)}", payload=request, timeout_s=_FACTS_S)
    finally:
        talk.close()
    try:
        facts = wire.from_json(Facts, told.get("facts", [""])[0])
    except wire.MalformedRecord as error:
        raise StepFailed(node, f"its answer is not understood: {error}") from error
    python, versions = _python(patient)
    reached = Row(
        level="ok", node=node, what="reached", text="here" if patient.shell.is_here else "by ssh, its host key is known"
    )
    return Examined(facts=facts, rows=(reached, python, *rows_of(facts, expected), time_row), versions=versions)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The rows in columns."""
    widths = [max((len(row.node) for row in rows), default=0), max((len(row.what) for row in rows), default=0)]
    for row in rows:
        yield f"{row.level:<4}  {row.node:<{widths[0]}}  {row.what:<{widths[1]}}  {row.text}"


def _python(patient: Patient) -> tuple[Row, Mapping[str, str]]:
    node = patient.shell.node
    try:
        found = packages.ask(patient.shell, patient.python, patient.packages)
    except (StepFailed, Unreachable) as error:
        return Row(level="bad", node=node, what="python", text=error.reason), {}
    text = f"{patient.python} {found.complaint}" if found.complaint else f"{found.python}, all packages"
    row = Row(level="bad" if found.complaint else "ok", node=node, what="python", text=text)
    return row, {"python": found.python, **found.versions}


def _clock(node: str, talk: Conversation) -> Row:
    """Of some tries the one with the shortest way there and back."""
    tries = []
    for _ in range(_CLOCK_TRIES):
        asked = time.time()
        told = talk.ask("clock", timeout_s=_ASK_S)["time"][0]
        tries.append((time.time() - asked, asked, told))
    trip, asked, told = min(tries)
    try:
        return clock(node, asked=asked, heard=asked + trip, told=float(told))
    except ValueError:
        return Row(level="warn", node=node, what="clock", text=f"date says {told!r}")


def _alike(examined: Mapping[str, Examined]) -> Iterator[Row]:
    """What must not differ between machines."""
    with_python = {node: each.versions for node, each in examined.items() if each.versions}
    shown = ("python", "torch", "torch_npu")
    for name in sorted({name for versions in with_python.values() for name in versions}):
        row = unequal(name, {node: versions.get(name, "") for node, versions in with_python.items()})
        if name in shown or row.level != "ok":
            yield row
    readings: list[tuple[str, Callable[[Facts], str | None]]] = [
        ("weights", lambda facts: facts.weights.digest if facts.weights is not None else None),
        ("key", lambda facts: facts.key.digest if facts.key is not None and facts.key.digest else None),
        ("MTU", lambda facts: str(facts.mtu) if facts.mtu else None),
        ("memory", lambda facts: f"{facts.memory_bytes / (1 << 30):.0f} GiB"),
        ("toolkit", lambda facts: facts.toolkit or None),
    ]
    for what, reading in readings:
        values = {node: value for node, each in examined.items() if (value := reading(each.facts)) is not None}
        if values:
            yield unequal(what, values, level="warn" if what in ("MTU", "memory") else "bad")
