"""``run_pd.sh doctor``: whether the machines of a cluster are ready for it, and alike. Changes nothing.

Owns what is asked of whom and the table; what the answers mean is ``findings.py``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from longcat_pd import wire
from longcat_pd.cluster import packages
from longcat_pd.cluster.conversation import Conversation
from longcat_pd.cluster.everywhere import EXIT_FAILED, StepFailed, everywhere
from longcat_pd.cluster.facts import Facts, Request
from longcat_pd.cluster.findings import Expected, Row, clock, rows_of, unequal
from longcat_pd.cluster.shell import LocalShell, SshShell, Unreachable, shell_of
from longcat_pd.cluster.tree import Tree, tree_of
from longcat_pd.config.checks import pools
from longcat_pd.config.resolve import unresolved
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.config.services import nodes_of, ports_of_node, services

_SCRIPTS = Path(__file__).parent / "node"
_ASK_S, _FACTS_S = 60.0, 300.0
_CLOCK_TRIES = 3
_INTERFACES = ("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")


@dataclass(frozen=True, kw_only=True)
class Patient:
    """One machine, what is needed of it, and what it is asked."""

    shell: LocalShell | SshShell
    config: ClusterConfig
    expected: Expected
    request: Request
    packages: Sequence[str]

    @property
    def python(self) -> str:
        """The interpreter that services run with."""
        hosts = self.config.hosts
        return hosts.python or (f"{hosts.path.rstrip('/')}/current/.venv/bin/python" if hosts.path else sys.executable)


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What was found on one machine. ``versions``: of its packages; none where its interpreter does not run."""

    facts: Facts
    rows: tuple[Row, ...]
    versions: Mapping[str, str]


def main(options: argparse.Namespace) -> int:
    """The verb. Exit status 0: nothing is bad, 1: something is. Raises ConfigError."""
    config = unresolved(options.config, options.overrides)
    tree = tree_of(options.root.resolve())
    patients = [(node, _patient(node, config, tree=tree)) for node in nodes_of(config)]
    outcome = everywhere(patients, examine)
    rows = [Row(level="bad", node=fault.node, what="reached", text=fault.reason) for fault in outcome.faults]
    rows += [row for examined in outcome.results.values() for row in examined.rows]
    rows += _alike(outcome.results, config)
    sys.stdout.write("".join(f"{line}\n" for line in table(rows)))
    return EXIT_FAILED if any(row.level == "bad" for row in rows) else 0


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


def _patient(node: str, config: ClusterConfig, *, tree: Tree) -> Patient:
    path = config.hosts.path.rstrip("/")
    mine = [service for service in services(config) if service.node == node]
    counts = (
        pool.parallel.world_size // len(instance.nodes)
        for _, pool in pools(config)
        for instance in pool.instances
        if node in instance.nodes
    )
    num_ranks = sum(counts)
    num_devices = config.devices_per_node if config.device == "npu" and num_ranks else 0
    folders = tuple(dict.fromkeys(folder for folder in (path or str(tree.root), config.log_dir or "") if folder))
    expected = Expected(
        node=node,
        release=tree.digest if path else "",
        disk_bytes=tree.disk_bytes if path else 0,
        num_ranks=num_ranks,
        cores_per_device=config.hosts.cores_per_device,
        num_devices=num_devices,
        interfaces={name: service.env[name] for service in mine for name in _INTERFACES if name in service.env},
    )
    request = Request(
        node=node,
        path=path,
        runs=f"{path}/run" if path else str(tree.root / ".run"),
        ports=tuple((use.host, use.port, use.purpose) for use in ports_of_node(config, node)),
        folders=folders,
        model=config.model.path if num_ranks else "",
        only_config=config.model.weights == "random",
        num_devices=num_devices,
    )
    names = packages.needed((tree.root / "pyproject.toml").read_text(encoding="utf-8"), config.device)
    return Patient(shell=shell_of(node, config.hosts), config=config, expected=expected, request=request, packages=names)


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


def _alike(examined: Mapping[str, Examined], config: ClusterConfig) -> Iterator[Row]:
    """What must not differ between machines."""
    with_python = {node: each.versions for node, each in examined.items() if each.versions}
    shown = ("python", "torch", "torch_npu") if config.device == "npu" else ("python", "torch")
    for name in sorted({name for versions in with_python.values() for name in versions}):
        row = unequal(name, {node: versions.get(name, "") for node, versions in with_python.items()})
        if name in shown or row.level != "ok":
            yield row
    readings: list[tuple[str, Callable[[Facts], str | None]]] = [
        ("weights", lambda facts: facts.weights.digest if facts.weights is not None else None),
        ("MTU", lambda facts: str(facts.mtu) if facts.mtu else None),
        ("memory", lambda facts: f"{facts.memory_bytes / (1 << 30):.0f} GiB"),
        ("toolkit", lambda facts: facts.toolkit or None),
    ]
    for what, reading in readings:
        values = {node: value for node, each in examined.items() if (value := reading(each.facts)) is not None}
        if values:
            yield unequal(what, values, level="warn" if what in ("MTU", "memory") else "bad")
