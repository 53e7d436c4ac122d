"""A rank stops, dies, spins, never enters a collective, or parts from the others: failures of the kind 13, as a table.

Each on the first, a middle and the last rank of each pool, under load and idle. Real processes; the ranks are those of
``bad_ranks.py``. Times that the specification states are printed; what is asserted leaves a busy machine some slack.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fault.bad_ranks import BadRanks, tell
from tests.fault.test_killed import PROMPT, call
from tests.fault.test_ranks import OVER
from tests.parity.conftest import MakeCheckpoint
from tests.processes import instance_answer, ranks_of, ready, running
from tests.topology import Topology, cluster_file

STEP_TIMEOUT_S, RANK_LOST_S, SILENT_S = 4.0, 1.5, 5.0
SLACK_S = 8.0  # of a machine that does many things at once
NUM_RANKS = 4
NUM_KNOWN, NUM_NEW, NEW_FIRST = 3, 6, 400  # calls under load; the last: the first id of a prompt that nobody has seen

KINDS = ("stop", "die", "spin", "skip")
FIRST, MIDDLE, LAST = 0, 1, 3
CODES = {"stop": {"rank_silent", "step_overdue", "rank_lost"}}
HUNG = {"step_overdue", "rank_lost"}


@dataclass
class Watched:
    """What a driver said of itself, several times a second, from a moment on until it was gone."""

    began: float = field(default_factory=time.monotonic)
    not_ready: list[tuple[float, str, int | None]] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)
    health_codes: set[int] = field(default_factory=set)

    async def until_gone(self, url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=10.0, trust_env=False) as client:
            with contextlib.suppress(httpx.TransportError):
                while True:
                    asked = time.monotonic()
                    self.health_codes.add((await client.get("/health")).status_code)
                    self.health_ms.append((time.monotonic() - asked) * 1000.0)
                    answer = (await client.get("/ready")).json()
                    for reason in (r for r in answer["reasons"] if r["code"] != "draining"):  # its end, at last
                        self.not_ready.append((time.monotonic() - self.began, reason["code"], reason["rank"]))
                    await asyncio.sleep(0.05)


@dataclass(frozen=True)
class Row:
    kind: str
    rank: int
    is_busy: bool

    def __str__(self) -> str:
        return f"{self.kind} rank {self.rank} {'under load' if self.is_busy else 'idle'}"


@contextlib.asynccontextmanager
async def site(tiny: MakeCheckpoint, folder: Path, **more: Any) -> AsyncIterator[tuple[BadRanks, Topology]]:
    limits = {"step_timeout_s": STEP_TIMEOUT_S, "rank_lost_s": RANK_LOST_S, "compile_cache": str(folder)}
    path = cluster_file(
        folder,
        tiny("2.0"),
        prefill={"pp_size": 2, "cp_size": 2},
        decode={"dp_size": 2, "kvp_size": 2, "attn_tp_size": 2},
        prefill_engine=limits,
        decode_engine=limits,
        model={"path": str(tiny("2.0")), "dtype": "float32"},
        **more,
    )
    async with running(path, BadRanks) as (processes, topology):
        assert isinstance(processes, BadRanks)
        yield processes, topology


async def harm(processes: BadRanks, topology: Topology, victim: str, row: Row) -> list[asyncio.Future[Any]]:
    """Do it; calls that are under way, or that will meet it.

    Under load some have prompts that nobody has seen, so that prefill has something to do; the others are known by heart.
    """
    firsts = [PROMPT[0]] * NUM_KNOWN + [NEW_FIRST + i for i in range(NUM_NEW)]
    under_way = [
        asyncio.ensure_future(call(topology, is_streamed=bool(i % 2), first=first))
        for i, first in enumerate(firsts if row.is_busy else [])
    ]
    if row.is_busy:
        await asyncio.sleep(0.15)
    if row.kind in ("stop", "die"):
        pid = ranks_of(processes.running[victim])[row.rank]
        os.kill(pid, {"stop": signal.SIGSTOP, "die": signal.SIGKILL}[row.kind])
        return under_way
    tell(processes.config.parent, victim, row.rank, row.kind)
    if not row.is_busy and row.kind == "spin":  # a plan that computes nothing is executed by all ranks too
        under_way.append(asyncio.ensure_future(instance_answer(processes, topology, victim, "/debug/accounting")))
    elif not row.is_busy:
        under_way.append(asyncio.ensure_future(call(topology, is_streamed=True)))
    else:
        under_way.append(asyncio.ensure_future(call(topology, is_streamed=False)))
    return under_way


async def lost(processes: BadRanks, topology: Topology, victim: str, row: Row, good: list[int]) -> None:
    """One row: told in time and with its rank, every call ended, stacks logged, status 1, nothing left."""
    watched = Watched()
    watching = asyncio.ensure_future(watched.until_gone(processes.http_urls[victim]))
    calls = await harm(processes, topology, victim, row)
    status = await asyncio.to_thread(processes.wait, victim, 60.0)
    gone_s = time.monotonic() - watched.began
    outcomes = [o for o in await asyncio.wait_for(asyncio.gather(*calls), 30.0) if not isinstance(o, dict)]
    await watching
    told_s, code, rank = watched.not_ready[0] if watched.not_ready else (gone_s, "rank_lost", None)
    slowest = max(watched.health_ms)
    print(f"{victim} {row}: {code} of {rank} after {told_s:.1f} s, gone after {gone_s:.1f} s, /health {slowest:.0f} ms")
    assert status == 1
    is_new = [NUM_KNOWN <= place < NUM_KNOWN + NUM_NEW and row.is_busy for place in range(len(outcomes))]
    assert all(
        (outcome in OVER | {"worker_unavailable"}) if isinstance(outcome, str) else new or outcome == good
        for outcome, new in zip(outcomes, is_new, strict=True)
    ), outcomes
    if row.is_busy or row.kind == "skip":
        assert "rank_lost" in outcomes, outcomes
    assert watched.health_codes <= {200, 503}
    assert min(watched.health_ms) < 100.0, "a machine may be busy, but not all the time"
    if row.kind != "die":  # which is over in a second
        assert {found for _, found, _ in watched.not_ready} <= CODES.get(row.kind, HUNG), watched.not_ready
        assert {number for _, _, number in watched.not_ready} == {row.rank}, watched.not_ready
        limit_s = SILENT_S + 5.0 if row.kind == "stop" else STEP_TIMEOUT_S + 1.0
        assert told_s < limit_s + SLACK_S
    check_log(processes.log(victim), row)
    assert processes.left_of(victim, grace_s=20.0) == []


def check_log(log: str, row: Row) -> None:
    stacks = {number for number in range(NUM_RANKS) if f"rank_stack rank={number} " in log}
    assert stacks >= set(range(NUM_RANKS)) - {row.rank}, "the stacks of all that are left"
    assert log.count("rank_lost reason=") == 1, "the cause is said once"
    if row.kind in ("spin", "skip"):
        assert "step_overdue" in log and log.index("step_overdue") < log.index("rank_stack") < log.index("rank_lost")
    if row.kind == "skip":
        assert f"which ranks [{row.rank}] have not entered" in log
    if row.kind == "spin":
        assert 'bad_ranks.py", line' in log, "the stack says where it spins"


async def come_back(processes: BadRanks, topology: Topology, victim: str, row: Row, good: list[int]) -> None:
    (processes.config.parent / f"{victim}.{row.rank}.{row.kind}").unlink(missing_ok=True)
    processes.start(victim)
    await ready(processes.http_urls[victim], topology.client)
    await ready(topology.url, topology.client)
    assert await call(topology, is_streamed=False) == good
    await topology.idle_within(8.0)


async def rows(tiny: MakeCheckpoint, folder: Path, victim: str, table: list[Row]) -> None:
    survivor = {"p0": "d0", "d0": "p0"}[victim]
    async with site(tiny, folder) as (processes, topology):
        good = await call(topology, is_streamed=True)
        assert isinstance(good, list)
        before = (await instance_answer(processes, topology, survivor, "/ready"))["incarnation"]
        for row in table:
            await lost(processes, topology, victim, row, good)
            await come_back(processes, topology, victim, row, good)
            assert (await instance_answer(processes, topology, survivor, "/ready"))["incarnation"] == before


async def test_a_rank_spins_and_one_never_enters_a_collective(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    await rows(tiny, tmp_path, "d0", [Row("skip", MIDDLE, True), Row("spin", LAST, False)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("victim", ["p0", "d0"])
async def test_every_rank_every_way(tiny: MakeCheckpoint, tmp_path: Path, victim: str, kind: str) -> None:
    await rows(tiny, tmp_path, victim, [Row(kind, rank, busy) for rank in (FIRST, MIDDLE, LAST) for busy in (True, False)])
