"""ForkedRanks with real processes: what they inherit, how their end is told, how they are ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from longcat_pd.clock import MonotonicClock
from longcat_pd.server.launch import ForkedRanks

LIMIT_S = 30.0


def ranks(
    tmp_path: Path, entry: str, num_ranks: int, *, first: int = 0, environment: dict[str, str] | None = None, **told: object
) -> tuple[ForkedRanks, list[Path]]:
    files = [tmp_path / str(rank) for rank in range(num_ranks)]
    configs = [json.dumps({"out": str(file), **told}) for file in files]
    entry = f"tests.integration.rank_entries:{entry}"
    return ForkedRanks(entry, configs, clock=MonotonicClock(), first=first, environment=environment), files


class Exits:
    def __init__(self, count: int) -> None:
        self.seen: list[tuple[int, int]] = []
        self._count = count
        self._complete = asyncio.Event()

    def __call__(self, rank: int, status: int) -> None:
        self.seen.append((rank, status))
        if len(self.seen) == self._count:
            self._complete.set()

    async def complete(self) -> list[tuple[int, int]]:
        await asyncio.wait_for(self._complete.wait(), LIMIT_S)
        return sorted(self.seen)


async def test_children_get_one_thread_and_no_terminal_signals_and_the_driver_keeps_its_own(tmp_path: Path) -> None:
    before, mask = dict(os.environ), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    processes, files = ranks(tmp_path, "report", 2, status=3)
    exits = Exits(2)
    await processes.start(exits)
    assert await exits.complete() == [(0, 3), (1, 3)]
    assert dict(os.environ) == before and signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    for file in files:
        inherited = json.loads(file.read_text())
        assert inherited["threads"] == "1" and inherited["has_torch"] and inherited["autoload"] == "0"
        assert {int(signal.SIGTERM), int(signal.SIGINT)} <= set(inherited["blocked"])
    await processes.stop(0.0)


async def test_ranks_of_a_further_node_have_their_numbers_and_are_told_of_its_network(tmp_path: Path) -> None:
    told = {"GLOO_SOCKET_IFNAME": "bond1", "HCCL_IF_IP": "10.1.0.7"}
    processes, files = ranks(tmp_path, "report", 2, first=16, environment=told, status=3)
    exits = Exits(2)
    await processes.prepare()
    await processes.start(exits)
    assert await exits.complete() == [(16, 3), (17, 3)]
    assert [json.loads(file.read_text())["network"] for file in files] == [told, told]
    others, (file,) = ranks(tmp_path, "report", 1, status=0)
    exits = Exits(1)
    await others.start(exits)
    await exits.complete()
    assert json.loads(file.read_text())["network"] == {}, "the forkserver keeps nothing of it"


async def test_a_rank_that_does_not_end_by_itself_is_ended(tmp_path: Path) -> None:
    processes, files = ranks(tmp_path, "wait_for_ever", 2)
    exits = Exits(2)
    await processes.start(exits)
    await _until_up(files)
    os.kill(processes.pids[0], signal.SIGTERM)
    await asyncio.sleep(0.1)
    assert exits.seen == [], "only the driver ends a rank"
    processes.dump_stacks()
    await _until(
        lambda: all("wait_for_ever" in file.with_suffix(".err").read_text() for file in files)
    )  # the stack of each
    began = time.monotonic()
    await processes.stop(0.3)
    assert 0.3 <= time.monotonic() - began < 10.0
    assert await exits.complete() == [(0, -9), (1, -9)]


async def test_a_killed_rank_is_told_at_once(tmp_path: Path) -> None:
    processes, files = ranks(tmp_path, "wait_for_ever", 2)
    exits = Exits(1)
    await processes.start(exits)
    await _until_up(files)
    os.kill(processes.pids[1], signal.SIGKILL)
    began = time.monotonic()
    assert await exits.complete() == [(1, -9)]
    assert time.monotonic() - began < 10.0
    await processes.stop(0.0)


async def _until_up(files: list[Path]) -> None:
    await _until(lambda: all(file.exists() for file in files))


async def _until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit
        await asyncio.sleep(0.02)
