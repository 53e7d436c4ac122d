"""A rank dies, stops, or comes back; one of several instances dies. Failures of the kinds 12, 13, 14 and 16.

Real processes, with drivers and their exit statuses.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fault.test_killed import BODY, GONE_WITHIN_S, call
from tests.parity.conftest import MakeCheckpoint
from tests.processes import Processes, instance_answer, ranks_of, ready, running
from tests.topology import Topology, cluster_file

RANK_LOST_S = 2.0
SILENT_S = 5.0
BACK_WITHIN_S = 15.0  # of what was only stopped
OVER = {"rank_lost", "draining"}  # the second for those that came when it was over already


def make_file(tiny: MakeCheckpoint, folder: Path, **sections: Any) -> Path:
    checkpoint = tiny("2.0")
    return cluster_file(
        folder,
        checkpoint,
        decode={"kvp_size": 2, "attn_tp_size": 2},
        prefill_engine={"rank_lost_s": RANK_LOST_S},
        decode_engine={"rank_lost_s": RANK_LOST_S},
        model={"path": str(checkpoint), "dtype": "float32"},
        **sections,
    )


async def lost_with_all_its_requests(
    processes: Processes, name: str, calls: list[Any], new: list[Any], good: list[int]
) -> None:
    """Every call is answered or ends with rank_lost; the instance ends with status 1 and leaves nothing.

    ``new``: calls with prompts that nobody has seen, so that prefill was at work too.
    """
    ends_s = SILENT_S + RANK_LOST_S + 8.0
    outcomes, others = await asyncio.wait_for(asyncio.gather(asyncio.gather(*calls), asyncio.gather(*new)), ends_s)
    assert all(outcome == good or outcome in OVER for outcome in outcomes), outcomes
    assert all(isinstance(outcome, list) or outcome in OVER for outcome in others), others
    assert "rank_lost" in [*outcomes, *others]
    assert processes.wait(name) == 1
    assert processes.left_of(name, grace_s=GONE_WITHIN_S) == []
    assert "rank_stack" in processes.log(name), "the stacks of the others are in the log"


async def back_again(processes: Processes, topology: Topology, name: str, good: list[int]) -> None:
    processes.start(name)
    await ready(processes.http_urls[name], topology.client)
    await ready(topology.url, topology.client)
    assert await call(topology, is_streamed=False) == good
    await topology.idle_within(8.0)


def calls(topology: Topology, count: int) -> list[Any]:
    return [asyncio.ensure_future(call(topology, is_streamed=bool(i % 2))) for i in range(count)]


def new_calls(topology: Topology, first: int = 400) -> list[Any]:
    """With prompts that begin with ``first`` and the ids behind it."""
    return [asyncio.ensure_future(call(topology, is_streamed=bool(i % 2), first=first + i)) for i in range(6)]


@pytest.mark.parametrize("victim, survivor", [("d0", "p0"), pytest.param("p0", "d0", marks=pytest.mark.slow)])
async def test_a_rank_is_killed_under_load(tiny: MakeCheckpoint, tmp_path: Path, victim: str, survivor: str) -> None:
    async with running(make_file(tiny, tmp_path, prefill={"cp_size": 2})) as (processes, topology):
        good = await call(topology, is_streamed=True)
        assert isinstance(good, list) and len(good) == BODY["max_tokens"]
        before = (await instance_answer(processes, topology, survivor, "/ready"))["incarnation"]
        under_way, new = calls(topology, 4), new_calls(topology)
        await asyncio.sleep(0.15)
        os.kill(ranks_of(processes.running[victim])[1], signal.SIGKILL)
        await lost_with_all_its_requests(processes, victim, under_way, new, good)
        await back_again(processes, topology, victim, good)
        assert (await instance_answer(processes, topology, survivor, "/ready"))["incarnation"] == before


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["p0", "d0"])
async def test_a_rank_is_stopped_and_goes_on_or_does_not(tiny: MakeCheckpoint, tmp_path: Path, victim: str) -> None:
    async with running(make_file(tiny, tmp_path, prefill={"cp_size": 2})) as (processes, topology):
        good = await call(topology, is_streamed=False)
        assert isinstance(good, list)
        rank = ranks_of(processes.running[victim])[0]
        under_way = calls(topology, 2)
        await asyncio.sleep(0.15)
        os.kill(rank, signal.SIGSTOP)
        began = time.monotonic()
        while (said := await instance_answer(processes, topology, victim, "/ready"))["ready"]:
            assert time.monotonic() - began < 10.0
            await asyncio.sleep(0.1)
        assert [(r["code"], r["rank"]) for r in said["reasons"]] == [("rank_silent", 0)]
        os.kill(rank, signal.SIGCONT)
        assert await asyncio.gather(*under_way) == [good, good]
        await ready(processes.http_urls[victim], topology.client, BACK_WITHIN_S)
        await ready(topology.url, topology.client, BACK_WITHIN_S)
        under_way, new = calls(topology, 2), new_calls(topology)
        await asyncio.sleep(0.15)
        os.kill(rank, signal.SIGSTOP)
        await lost_with_all_its_requests(processes, victim, under_way, new, good)
        await back_again(processes, topology, victim, good)


@pytest.mark.slow
@pytest.mark.parametrize("victim, survivor", [("p0", "d0"), ("d0", "p0")])
async def test_a_driver_is_stopped(tiny: MakeCheckpoint, tmp_path: Path, victim: str, survivor: str) -> None:
    async with running(make_file(tiny, tmp_path)) as (processes, topology):
        good = await call(topology, is_streamed=False)
        assert isinstance(good, list)
        for pause_s, outcomes in ((2.0, [good]), (SILENT_S + 4.0, [good, "transfer_failed", "worker_unavailable"])):
            under_way = calls(topology, 3)
            await asyncio.sleep(0.1)
            processes.signal(victim, signal.SIGSTOP)
            await asyncio.sleep(pause_s)
            if pause_s > SILENT_S:
                account = await instance_answer(processes, topology, survivor, "/debug/accounting")
                assert account["driver"]["transfers"] == 0
                assert await call(topology, is_streamed=False) == "worker_unavailable"
            processes.signal(victim, signal.SIGCONT)
            assert all(outcome in outcomes for outcome in await asyncio.gather(*under_way))
            await ready(topology.url, topology.client, BACK_WITHIN_S)
            assert await call(topology, is_streamed=True) == good
            await topology.idle_within(8.0)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["p1", "d1"])
async def test_one_of_two_dies_and_the_other_takes_its_requests(tiny: MakeCheckpoint, tmp_path: Path, victim: str) -> None:
    path = make_file(tiny, tmp_path, num_prefill=1 + (victim == "p1"), num_decode=1 + (victim == "d1"))
    async with running(path) as (processes, topology):
        for url in processes.http_urls.values():
            await ready(url, topology.client)
        good = await call(topology, is_streamed=False)
        assert isinstance(good, list)
        for moment_s in (0.05, 0.3, 0.8):
            under_way = calls(topology, 6)
            await asyncio.sleep(moment_s)
            processes.signal(victim)
            outcomes = await asyncio.wait_for(asyncio.gather(*under_way), 15.0)
            assert outcomes.count(good) == len(outcomes), outcomes  # also those of which tokens had left
            assert set(await asyncio.gather(*map(_whole, [topology] * 4))) == {tuple(good)}
            assert processes.left_of(victim, grace_s=GONE_WITHIN_S) == []
            await back_again(processes, topology, victim, good)


async def _whole(topology: Topology) -> tuple[int, ...] | str:
    outcome = await call(topology, is_streamed=False)
    return outcome if isinstance(outcome, str) else tuple(outcome)


@pytest.mark.slow
async def test_a_rank_dies_while_its_instance_starts(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    processes = Processes(make_file(tiny, tmp_path, prefill={"pp_size": 2, "cp_size": 2}))
    try:
        processes.start("p0")
        limit = time.monotonic() + 30.0
        while len(ranks := ranks_of(processes.running["p0"])) < 4:
            assert time.monotonic() < limit
            await asyncio.sleep(0.02)
        os.kill(ranks[-1], signal.SIGKILL)
        assert processes.wait("p0", 30.0) == 1
        assert processes.left_of("p0", grace_s=GONE_WITHIN_S) == []
        assert processes.log("p0").count("start_failed") == 1
        processes.start("p0")
        async with httpx.AsyncClient(trust_env=False) as client:
            await ready(processes.http_urls["p0"], client)
    finally:
        processes.end()
