"""What the facts of machines mean: a row for each thing that was looked at, good or not. Pure.

Text of the vendor's tools is read carefully: what is not understood is a warning with that text, never a guess.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from longcat_pd.cluster.facts import Devices, Facts, KeyFile, TakenPort

Level = Literal["ok", "warn", "bad"]
ALL = "all nodes"
_GIB = 1 << 30
_LEAST_FREE_BYTES = _GIB  # of a disk
_LEAST_FREE_MEMORY = 0.1  # of all of it
_LEAST_FILES = 4096
_MOST_CLOCK_S = 1.0
_MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    level: Level
    node: str
    what: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the configuration needs of a machine. ``release``: "" where machines have no tree of their own.

    ``disk_bytes``: of the code, in the first folder that is asked for; ``interfaces``: by variable, what the environment of
    its services names.
    """

    node: str
    release: str
    disk_bytes: int
    num_ranks: int
    cores_per_device: int
    num_devices: int
    interfaces: Mapping[str, str]


def rows_of(facts: Facts, expected: Expected) -> Iterator[Row]:
    """What one machine says against what is needed of it."""
    checks: list[tuple[str, tuple[Level, str]]] = [
        ("code", _code(facts, expected)),
        ("ports", _ports(facts.ports)),
        ("interface", _interface(facts, expected)),
        *((f"disk {path}", _disk(free, expected)) for path, free in facts.free_bytes.items()),
        ("memory", _memory(facts)),
        ("cores", _cores(facts, expected)),
        ("limits", _limits(facts, expected)),
        ("logout", _logout(facts)),
    ]
    if facts.weights is not None:
        checks.append(("weights", _weights(facts)))
    if facts.key is not None:
        checks.append(("key", _key(facts.key)))
    if expected.num_devices:
        checks.append(("cards", cards(facts.devices, expected.num_devices)))
        checks.append(("device links", states(facts.devices.links, "link status", "UP")))
        checks.append(("device network", states(facts.devices.health, "net health status", "Success")))
        checks.append(("toolkit", ("ok", facts.toolkit) if facts.toolkit else ("warn", "its version was not found")))
    yield from (Row(level=level, node=expected.node, what=what, text=text) for what, (level, text) in checks)


def cards(devices: Devices, count: int) -> tuple[Level, str]:
    """Cards of a node, and what they say of their health."""
    if devices.mapping == "missing":
        return "bad", "npu-smi is missing"
    lines = [line.split() for line in devices.mapping.splitlines()]
    found = [line for line in lines if len(line) > 3 and all(word.isdigit() for word in line[:3])]  # a controller has "-"
    if not found and "Chip Logic ID" not in devices.mapping:
        return "warn", f"npu-smi info -m says {_short(devices.mapping)}"
    health = re.findall(r"^\|\s*\d+\s+[\w-]+\s*\|\s*([A-Za-z]+)\s*\|", devices.table, re.MULTILINE)
    ill = [word for word in health if word != "OK"]
    if len(found) < count:
        return "bad", f"{len(found)} of {count}"
    if ill:
        return "bad", f"{len(ill)} of {len(health)} are not OK: {', '.join(sorted(set(ill)))}"
    more = f", {len(found)} there" if len(found) > count else ""
    return ("ok", f"{count} of {count}{more}") if health else ("warn", f"npu-smi info says {_short(devices.table)}")


def states(said: tuple[str, ...], name: str, good: str) -> tuple[Level, str]:
    """What ``hccn_tool`` says of each device, as ``name: state``."""
    if all(text == "missing" for text in said):
        return "warn", "hccn_tool is missing"
    found = [re.search(rf"{name}\s*:\s*(.*\S)", text, re.IGNORECASE) for text in said]
    odd = [(number, _short(said[number])) for number, state in enumerate(found) if state is None]
    wrong = [(n, state.group(1)) for n, state in enumerate(found) if state is not None and state.group(1) != good]
    if wrong:
        return "bad", f"{len(said) - len(wrong) - len(odd)} of {len(said)} {good}: {_named(wrong)}"
    return ("warn", f"not understood: {_named(odd)}") if odd else ("ok", f"{len(said)} of {len(said)} {good}")


def clock(node: str, *, asked: float, heard: float, told: float) -> Row:
    """Difference to the clock of this machine. ``asked``, ``heard``: when, by that one; half of it is error."""
    error, ahead = (heard - asked) / 2, told - (asked + heard) / 2
    level: Level = "warn" if abs(ahead) - error > _MOST_CLOCK_S else "ok"
    where = "ahead of" if ahead > 0 else "behind"
    return Row(
        level=level, node=node, what="clock", text=f"{abs(ahead):.3f} s {where} this machine's, give or take {error:.3f}"
    )


def unequal(what: str, values: Mapping[str, str], *, level: Level = "bad") -> Row:
    """Whether all machines say the same; those that do not are named. Values by machine; at least one."""
    (usual, count), *_ = Counter(values.values()).most_common(1)
    others = [f"{node}: {value or 'none'}" for node, value in values.items() if value != usual]
    if not others:
        return Row(level="ok", node=ALL, what=what, text=usual or "none")
    return Row(level=level, node=ALL, what=what, text=f"{usual or 'none'} on {count}, but {', '.join(others)}")


def _code(facts: Facts, expected: Expected) -> tuple[Level, str]:
    if not expected.release:
        return "ok", "the tree of this machine"
    if facts.release == expected.release:
        return "ok", f"release {facts.release}, as here"
    have = f"release {facts.release}" if facts.release else "no release"
    return "bad", f"{have}, but the tree here is {expected.release}: run_pd.sh code"


def _ports(taken: tuple[TakenPort, ...]) -> tuple[Level, str]:
    foreign = [use for use in taken if not use.is_ours]
    if not foreign:
        return "ok", f"{len(taken)} in use by this cluster, the others free" if taken else "free"
    shown = [
        f"{use.port} ({use.purpose}) is taken by pid {use.pid} ({use.by})"
        if use.pid
        else f"{use.port} ({use.purpose}): {use.by}"
        for use in foreign[:_MOST_NAMED]
    ]
    return "bad", "; ".join(shown) + _and_more(len(foreign))


def _interface(facts: Facts, expected: Expected) -> tuple[Level, str]:
    if not facts.interface:
        return "warn", f"none was found that carries {expected.node}"
    wrong = [f"{name}={value}" for name, value in expected.interfaces.items() if not _names(value, facts.interface)]
    if wrong:
        return "warn", f"{facts.interface} carries {expected.node}, but its environment has {', '.join(wrong)}"
    return "ok", f"{facts.interface}, MTU {facts.mtu}"


def _names(value: str, interface: str) -> bool:
    """Whether a setting of HCCL or gloo means an interface: a list; "=" before one is exact, "^" all others."""
    if value.startswith("^"):
        return not any(interface.startswith(name.lstrip("=")) for name in value[1:].split(","))
    return any(interface == name[1:] if name.startswith("=") else interface.startswith(name) for name in value.split(","))


def _disk(free: int, expected: Expected) -> tuple[Level, str]:
    text = f"{free / _GIB:.1f} GiB free"
    if free < expected.disk_bytes:
        return "bad", f"{text}; the code alone needs {expected.disk_bytes / _GIB:.3f}"
    return "warn" if free < _LEAST_FREE_BYTES else "ok", text


def _memory(facts: Facts) -> tuple[Level, str]:
    text = f"{facts.free_memory_bytes / _GIB:.1f} of {facts.memory_bytes / _GIB:.1f} GiB free"
    return "warn" if facts.free_memory_bytes < _LEAST_FREE_MEMORY * facts.memory_bytes else "ok", text


def _cores(facts: Facts, expected: Expected) -> tuple[Level, str]:
    needed = expected.num_ranks * expected.cores_per_device
    if facts.cores < needed:
        shares = f"{expected.num_ranks} ranks x hosts.cores_per_device={expected.cores_per_device}"
        return "bad", f"{facts.cores}, but {shares} are {needed}"
    return "ok", f"{facts.cores} for {expected.num_ranks} ranks"


def _limits(facts: Facts, expected: Expected) -> tuple[Level, str]:
    text = ", ".join(f"{name} {value if value >= 0 else 'unlimited'}" for name, value in facts.limits.items())
    few = 0 <= facts.limits["open files"] < _LEAST_FILES
    locked = expected.num_devices > 0 and facts.limits["locked memory"] >= 0
    advice = [f"at least {_LEAST_FILES} open files are wanted"] * few + [
        "locked memory should be unlimited for RDMA"
    ] * locked
    return ("warn", f"{text}; {'; '.join(advice)}") if advice else ("ok", text)


def _logout(facts: Facts) -> tuple[Level, str]:
    if facts.is_killed_at_logout:
        return "bad", "logind ends services with the session that began them: KillUserProcesses=no, or KillExcludeUsers"
    return "ok", "services outlive the session that began them"


def _weights(facts: Facts) -> tuple[Level, str]:
    assert facts.weights is not None
    problems = facts.weights.problems
    if problems:
        return "bad", "; ".join(problems[:_MOST_NAMED]) + _and_more(len(problems))
    return "ok", f"{facts.weights.num_shards} shards, {facts.weights.size / _GIB:.1f} GiB, as their headers say"


def _key(key: KeyFile) -> tuple[Level, str]:
    if key.problem:
        return "bad", key.problem
    if key.mode & 0o077:
        return "bad", f"others on that machine can use it, mode {key.mode:04o}: chmod 0400"
    return "ok", f"mode {key.mode:04o}"


def _named(places: list[tuple[int, str]]) -> str:
    return "; ".join(f"device {number} {text}" for number, text in places[:_MOST_NAMED]) + _and_more(len(places))


def _and_more(count: int) -> str:
    return f"; and {count - _MOST_NAMED} more" if count > _MOST_NAMED else ""


def _short(text: str) -> str:
    return repr(" ".join(text.split())[:120])
