"""Thousands of requests, a fifth of which end otherwise than well: nothing grows, nothing is kept, each has one end.

All processes of a cluster, with their ranks. The small one is part of `make test`; `make soak` runs the large one, whose
report says what a request leaves behind in every process.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.parity.conftest import MakeCheckpoint
from tests.processes import Processes, running
from tests.soak.crowd import CHAT, COMPLETIONS, End, asks, counted, serve
from tests.soak.watching import Held, Series, everybody, families, log_bytes, look, series, total
from tests.topology import Topology, cluster_file

QUIET_S = 7.0  # after it, servers have closed the connections that were kept for a next request
IDLE_S = 10.0  # of a machine that does other things too
GOOD_FINISHES = ("stop", "length", "tool_calls")
LATE_S = 1.0  # after a deadline: stated for each, and asked here of most, as the machine does other things too


@dataclass(frozen=True, kw_only=True)
class Size:
    """``parts`` are served one after the other, with nothing under way in between.

    ``memory_kib``: by which a service may grow from the third fifth to the last, ``rank_memory_kib``: a rank.
    ``threads``: of which a service may have more: a pool that is not full starts one whenever none is idle.
    ``log_growth``: of the bytes of a request. ``new_families``: of metrics by labels. A rare end (a status, an outcome) may
    come late, and has seven; what grows with the requests has hundreds.
    """

    requests: int
    parts: int
    at_once: int
    memory_kib: int
    rank_memory_kib: int
    threads: int
    log_growth: float
    new_families: int


# A service is warm before half of the large one: its heap has its size, and D has the 4096 ended transfers that it keeps.
# Then 256 KiB in 4000 requests are 66 bytes a request. Without a leak the balancer and P grow by 0-5 bytes a request there,
# D by up to 50, in steps of an arena of Python's.
SMALL = Size(
    requests=600, parts=10, at_once=6,
    memory_kib=4096, rank_memory_kib=4096, threads=2, log_growth=1.5, new_families=35,
)  # fmt: skip
FULL = Size(
    requests=10_000, parts=50, at_once=8,
    memory_kib=256, rank_memory_kib=1024, threads=0, log_growth=1.1, new_families=21,
)  # fmt: skip
LAYOUT: dict[str, Any] = {
    "prefill": {"cp_size": 2},
    "decode": {"kvp_size": 2, "attn_tp_size": 2},
    "prefill_engine": {"num_draft_tokens": 1},
    "decode_engine": {"num_draft_tokens": 1},
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is there after some of the requests. By process: what it holds, and how long its log is."""

    ends: list[End]
    held: dict[str, Held]
    log_bytes: dict[str, int]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Quiet:
    """When nothing has been under way for a while."""

    pids: dict[str, int]
    held: dict[str, Held]
    series: dict[str, Series]


def file_for(folder: Path, tiny: MakeCheckpoint, **layout: Any) -> Path:
    model = tiny("2.0", with_tokenizer=True)
    return cluster_file(folder, model, model={"path": str(model), "dtype": "float32"}, **layout)


async def test_some_hundred(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    async with running(file_for(tmp_path, tiny)) as (processes, topology):
        await soak(processes, topology, SMALL)


@pytest.mark.parametrize("leak", [0, 100], ids=["flat", "a hundred bytes a request"])
def test_what_the_large_one_calls_growth(leak: int) -> None:
    """On the course of a service that is warm after a third and then only moves up and down."""
    each, draw = FULL.requests // FULL.parts, random.Random(1)
    warming = [min(1200, 70 * number) + draw.randrange(90) for number in range(FULL.parts)]
    sizes = [45_000 + base + leak * each * number // 1024 for number, base in enumerate(warming)]
    assert (growth_kib(sizes) > FULL.memory_kib) == (leak > 0)


@pytest.mark.slow
async def test_ten_thousand(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    async with running(file_for(tmp_path, tiny, **LAYOUT)) as (processes, topology):
        parts = await soak(processes, topology, FULL)
    tenth = FULL.parts // 10
    second, last = latency(parts[tenth : 2 * tenth]), latency(parts[-tenth:])
    assert last <= 1.1 * second, f"{second * 1000:.1f} ms, then {last * 1000:.1f} ms"


async def soak(processes: Processes, topology: Topology, size: Size) -> list[Part]:
    """Serve them, print the report, and check all but the times."""
    wanted, parts = asks(size.requests, seed=9), list[Part]()
    async with httpx.AsyncClient(trust_env=False, timeout=30.0) as looker:
        before = await quiet(processes, looker, after_s=0.0)
        for number in range(size.parts):
            some = itertools.islice(wanted, size.requests // size.parts)
            parts.append(await one_part(processes, topology, serve(topology.url, some, at_once=size.at_once)))
            if number == size.parts // 5:
                early = await quiet(processes, looker)
        late = await quiet(processes, looker)
    ends = [end for part in parts for end in part.ends]
    report(parts, ends, early=early, late=late)
    assert len(ends) == size.requests
    check_ends(ends)
    check_counters(ends, before.series["balancer"], late.series["balancer"])
    check_growth(parts, size, early=early, late=late)
    return parts


async def one_part(processes: Processes, topology: Topology, work: Any) -> Part:
    began = time.monotonic()
    ends = await work
    seconds = time.monotonic() - began
    await topology.idle_within(IDLE_S)
    held = {name: look(pid) for name, pid in everybody(processes).items()}
    return Part(ends=ends, held=held, log_bytes=log_bytes(processes), seconds=seconds)


async def quiet(processes: Processes, looker: httpx.AsyncClient, after_s: float = QUIET_S) -> Quiet:
    await asyncio.sleep(after_s)
    pids = everybody(processes)
    held = {name: look(pid) for name, pid in pids.items()}
    urls = {**processes.http_urls, "balancer": processes.url}
    return Quiet(pids=pids, held=held, series={name: await series(looker, url) for name, url in urls.items()})


def check_ends(ends: list[End]) -> None:
    """Each as it was meant."""
    meant = {
        "good": {(200, None)},
        "left": {(0, "left"), (200, "left")},
        "late": {(504, "deadline_exceeded"), (200, "deadline_exceeded")},
        "invalid": {(400, code) for code in ("invalid_value", "invalid_type", "context_length_exceeded")},
    }
    strange = [end for end in ends if (end.status, end.code) not in meant[end.ask.intent]]
    assert not strange, strange[:5]
    assert all(len(end.finishes) == end.ask.body.get("n", 1) for end in ends if end.ask.intent == "good")
    assert statistics.median(overdue(ends)) < LATE_S


def overdue(ends: list[End]) -> list[float]:
    """Seconds from its deadline to the end of each that had one."""
    return sorted(end.seconds - end.ask.time_limit_s for end in ends if end.ask.time_limit_s is not None)


def check_counters(ends: list[End], before: Series, after: Series) -> None:
    """The balancer counted what its clients saw, each request once."""
    intents = Counter(end.ask.intent for end in ends)
    late_by_status = Counter(end.status for end in ends if end.ask.intent == "late")
    statuses = Counter[str]()
    for route in (CHAT, COMPLETIONS):
        statuses += total(after, "http_requests_total", "status", route=route)
        statuses -= total(before, "http_requests_total", "status", route=route)
    expected = {"200": intents["good"] + late_by_status[200], "400": intents["invalid"], "499": intents["left"]}
    assert statuses == Counter({**expected, "504": late_by_status[504]})
    outcomes = total(after, "requests_total", "outcome") - total(before, "requests_total", "outcome")
    cancels = total(after, "cancels_total", "from") - total(before, "cancels_total", "from")
    assert sum(outcomes[finish] for finish in GOOD_FINISHES) == intents["good"]
    # who leaves at once may be gone before the body is read, and a deadline may pass then: no request came of those
    left_late = sum(end.status == 200 for end in ends if end.ask.intent == "left")
    assert left_late <= outcomes["cancelled"] == cancels["client"] <= intents["left"]
    assert late_by_status[200] <= outcomes["deadline_exceeded"] == cancels["deadline"] <= intents["late"]
    found_late = Counter(end.code for end in ends if end.ask.reaches_workers and end.ask.intent == "invalid")
    known = {*GOOD_FINISHES, "cancelled", "deadline_exceeded"}
    assert Counter({code: count for code, count in outcomes.items() if code not in known}) == found_late


def check_growth(parts: list[Part], size: Size, *, early: Quiet, late: Quiet) -> None:
    """Behind the first fifth nothing grows."""
    assert late.pids == early.pids, "somebody was started again"
    for name, now in late.held.items():
        then, is_service = early.held[name], name in parts[0].log_bytes
        held = {
            "files": (then.files, now.files),
            "sockets": (then.sockets, now.sockets),
            "threads": (then.threads + is_service * size.threads, now.threads),
        }
        grown = {what: pair for what, pair in held.items() if pair[1] > pair[0]}
        assert not grown, f"{name}: {grown}"
        growth = growth_kib([part.held[name].memory_kib for part in parts])
        limit = size.memory_kib if is_service else size.rank_memory_kib
        assert growth <= limit, f"{name}: {growth:.0f} KiB"
    for name, now_shown in late.series.items():
        new = families(now_shown) - families(early.series[name])
        assert len(new) <= size.new_families, f"{name}: {sorted(new)}"
    for name in parts[0].log_bytes:
        second, last = log_rates(parts, name)
        assert last <= size.log_growth * second, f"log of {name}: {second:.0f} bytes a request, then {last:.0f}"


def growth_kib(sizes: list[int]) -> float:
    """From the third fifth of the parts to the last, between whose middles are two fifths of the requests."""
    fifth = len(sizes) // 5
    return statistics.median(sizes[-fifth:]) - statistics.median(sizes[2 * fifth : 3 * fifth])


def log_rates(parts: list[Part], name: str) -> tuple[float, float]:
    """Bytes a request in the second fifth, and in the last."""
    fifth = len(parts) // 5

    def rate(first: int, last: int) -> float:
        count = sum(len(part.ends) for part in parts[first + 1 : last + 1])
        return (parts[last].log_bytes[name] - parts[first].log_bytes[name]) / count

    return rate(fifth - 1, 2 * fifth - 1), rate(len(parts) - fifth - 1, len(parts) - 1)


def latency(parts: list[Part]) -> float:
    """Median seconds of the good ones."""
    return statistics.median(end.seconds for part in parts for end in part.ends if end.ask.intent == "good")


def report(parts: list[Part], ends: list[End], *, early: Quiet, late: Quiet) -> None:
    seconds = sum(part.seconds for part in parts)
    print(f"\n{len(ends)} requests in {seconds:.0f} s, {len(ends) / seconds:.1f}/s")
    for kind, count in sorted(counted(ends).items()):
        print(f"  {count:6} {kind}")
    behind = overdue(ends)
    print(f"deadlines: ended {1000 * statistics.median(behind):.0f} ms after, at most {1000 * behind[-1]:.0f} ms")
    tenth = max(len(parts) // 10, 1)
    times = [latency(parts[first : first + tenth]) * 1000 for first in range(0, len(parts), tenth)]
    print("median ms of good ones, by tenth: " + " ".join(f"{ms:.1f}" for ms in times))
    print(f"  last to second: {times[-1] / times[1]:.3f}")
    between = len(ends) * 2 / 5  # the middles of the third fifth and of the last
    print("process: memory KiB, growth, bytes a request | files, threads, sockets: early-late | most files at work")
    print("  | series: early-late | log bytes a request: early-late")
    for name, then in early.held.items():
        now, growth = late.held[name], growth_kib([part.held[name].memory_kib for part in parts])
        held = f"{then.files}-{now.files}, {then.threads}-{now.threads}, {then.sockets}-{now.sockets}"
        most = max(part.held[name].files for part in parts)
        line = f"  {name}: {now.memory_kib}, {growth:+.0f}, {growth * 1024 / between:+.0f} | {held} | {most}"
        if name in early.series:
            old, new = log_rates(parts, name)
            line += f" | {len(early.series[name])}-{len(late.series[name])} | {old:.0f}-{new:.0f}"
        print(line)
    print("memory by tenth, KiB more than in the first:")
    for name in early.held:
        sizes = [part.held[name].memory_kib for part in parts]
        medians = [statistics.median(sizes[first : first + tenth]) for first in range(0, len(sizes), tenth)]
        print(f"  {name}: " + " ".join(f"{median - medians[0]:+.0f}" for median in medians))
