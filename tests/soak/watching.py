"""What the processes of a cluster hold: memory, files, threads, sockets, series of metrics, bytes of log.

Reads /proc, /metrics and log files. Judges nothing.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.processes import Processes, ranks_of

Line = tuple[str, tuple[tuple[str, str], ...]]  # name and labels
Series = dict[Line, float]


@dataclass(frozen=True, kw_only=True)
class Held:
    """Of one process. ``memory_kib``: its own pages, without files and what it shares by name."""

    memory_kib: int
    files: int
    sockets: int
    threads: int


def look(pid: int) -> Held:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    opened = list[str]()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            opened.append(str(entry.readlink()))
    return Held(
        memory_kib=int(fields["RssAnon"].split()[0]),
        files=len(opened),
        sockets=sum(name.startswith("socket:") for name in opened),
        threads=int(fields["Threads"]),
    )


def log_bytes(processes: Processes) -> dict[str, int]:
    """Of each service's log so far."""
    return {name: Path(process.log).stat().st_size for name, process in processes.running.items()}


def everybody(processes: Processes) -> dict[str, int]:
    """Process ids by name: ``balancer``, ``p0``, ``p0 rank 0`` ..., ``p0 forkserver``."""
    found = dict[str, int]()
    for name, process in processes.running.items():
        found[name] = process.pid
        ranks = ranks_of(process)
        found |= {f"{name} rank {number}": pid for number, pid in enumerate(ranks)}
        found |= {f"{name} forkserver": parent for parent in map(parent_of, ranks)}
    return found


def parent_of(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return int(text[text.rindex(")") + 2 :].split()[1])


async def series(client: httpx.AsyncClient, url: str) -> Series:
    """Every line of /metrics."""
    text = (await client.get(f"{url}/metrics")).text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}


def families(found: Series) -> set[Line]:
    """Names with their labels, a histogram once."""
    return {(name, labels) for name, labels in found if not any(key == "le" for key, _ in labels)}


def total(found: Series, name: str, label: str, **where: str) -> Counter[str]:
    """Of a counter, by the value of one of its labels. ``where``: of those series only."""
    counts = Counter[str]()
    for (its_name, pairs), value in found.items():
        labels = dict(pairs)
        if its_name == f"longcat_pd_{name}" and where.items() <= labels.items():
            counts[labels[label]] += int(value)
    return counts
