"""Leaving in order: SIGTERM and ``/admin/drain`` at each role with open streams. Failures of the kind 22; real processes.

While an instance leaves, requests go on coming, one behind the other: none of them may fall between.
"""

from __future__ import annotations

import asyncio
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fault.switched import until
from tests.fault.test_killed import BODY, call
from tests.parity.conftest import MakeCheckpoint
from tests.processes import Processes, instance_answer, ready, running
from tests.topology import Topology, cluster_file

LONG = {**BODY, "max_tokens": 150, "stream": True}
PATIENCE_S = 120.0
KEY = "of-the-cluster-and-of-its-operator"


class Passing:
    """Requests that come one behind the other until it is told to stop."""

    def __init__(self, topology: Topology, good: list[int]) -> None:
        self.outcomes: list[Any] = []
        self._good = good
        self._topology = topology
        self._is_over = asyncio.Event()
        self._task = asyncio.ensure_future(self._run())

    async def all_good(self) -> None:
        self._is_over.set()
        await self._task
        assert self.outcomes and all(outcome == self._good for outcome in self.outcomes), self.outcomes

    async def _run(self) -> None:
        while not self._is_over.is_set():
            self.outcomes.append(await call(self._topology, is_streamed=len(self.outcomes) % 2 == 0))


async def stream(topology: Topology, begun: asyncio.Event) -> str:
    """The last event of a long stream; "[DONE]" if it is whole."""
    last = ""
    async with topology.client.stream("POST", "/v1/completions", json=LONG, timeout=PATIENCE_S) as answer:
        async for line in answer.aiter_lines():
            last = line.removeprefix("data: ") or last
            begun.set()
    return last


async def open_streams(topology: Topology, count: int) -> list[asyncio.Future[str]]:
    begun = [asyncio.Event() for _ in range(count)]
    streams = [asyncio.ensure_future(stream(topology, one)) for one in begun]
    await asyncio.gather(*(asyncio.wait_for(one.wait(), PATIENCE_S) for one in begun))
    return streams


async def running_at(processes: Processes, topology: Topology, name: str) -> int:
    account = await instance_answer(processes, topology, name, "/debug/accounting")
    return int(account["driver"]["requests_running"])


async def drained_and_back(processes: Processes, topology: Topology, good: list[int], name: str) -> None:
    """``/admin/drain`` at a worker, at the balancer for it, and both undone."""
    for url, body in ((processes.http_urls[name], {}), (topology.url, {"instance": name})):
        streams = await open_streams(topology, 4)
        passing = Passing(topology, good)
        answer = await topology.client.post(f"{url}/admin/drain", json=body)
        assert answer.status_code == 202 and answer.json()["draining"] is True and answer.json()["open"] >= 0
        assert (await topology.client.post(f"{url}/admin/drain", json=body)).status_code == 202, "twice is once"
        assert set(await asyncio.gather(*streams)) == {"[DONE]"}
        await asyncio.sleep(2.0)
        assert await running_at(processes, topology, name) == 0, "it gets nothing new"
        if not body:
            said = await instance_answer(processes, topology, name, "/ready")
            assert not said["ready"] and said["reasons"][0]["code"] == "draining"
        assert (await topology.client.post(f"{url}/admin/undrain", json=body)).status_code == 202
        await ready(processes.http_urls[name], topology.client)
        await passing.all_good()


async def signalled(processes: Processes, topology: Topology, good: list[int], name: str) -> None:
    """One signal: what is open finishes, new requests go elsewhere, status 0, nothing left."""
    streams = await open_streams(topology, 4)
    passing = Passing(topology, good)
    processes.signal(name, signal.SIGTERM)
    assert set(await asyncio.gather(*streams)) == {"[DONE]"}
    assert await asyncio.to_thread(processes.wait, name, PATIENCE_S) == 0
    await passing.all_good()
    assert processes.left_of(name, grace_s=20.0) == []
    processes.start(name)
    await ready(processes.http_urls[name], topology.client, PATIENCE_S)


async def signalled_twice(processes: Processes, topology: Topology, good: list[int], name: str) -> None:
    """The second signal cuts what is open, and the status says so."""
    streams = await open_streams(topology, 4)
    processes.signal(name, signal.SIGTERM)
    await until(partial(is_leaving, processes, topology, name), PATIENCE_S, "of two signals that come together one is seen")
    processes.signal(name, signal.SIGTERM)
    status = await asyncio.to_thread(processes.wait, name, PATIENCE_S)
    ends = await asyncio.gather(*streams)
    print(f"{name}: status {status}, streams end with {sorted(end[:60] for end in ends)}")
    assert status == 3
    assert all(end == "[DONE]" or '"draining"' in end for end in ends), ends
    assert processes.left_of(name, grace_s=20.0) == []
    processes.start(name)
    await ready(processes.http_urls[name], topology.client, PATIENCE_S)
    assert await call(topology, is_streamed=True) == good


async def is_leaving(processes: Processes, topology: Topology, name: str) -> bool:
    return not (await instance_answer(processes, topology, name, "/ready"))["ready"]


async def balancer_leaves(processes: Processes, topology: Topology) -> None:
    """Drained: refuses what is new, finishes what is open, comes back; then by signal."""
    (one,) = await open_streams(topology, 1)
    assert (await topology.client.post("/admin/drain", json={})).json() == {"draining": True, "open": 1}
    assert await call(topology, is_streamed=False) == "draining"
    assert not (await topology.client.get("/ready")).json()["ready"]
    assert await one == "[DONE]"
    await topology.client.post("/admin/undrain", json={})
    await ready(topology.url, topology.client)
    (one,) = await open_streams(topology, 1)
    processes.signal("balancer", signal.SIGTERM)
    assert await one == "[DONE]"
    assert await asyncio.to_thread(processes.wait, "balancer", PATIENCE_S) == 0


@pytest.mark.slow
async def test_each_role_leaves_in_order(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY + "\n")
    key.chmod(0o600)
    path = cluster_file(
        tmp_path,
        tiny("2.0"),
        num_prefill=2,
        num_decode=2,
        model={"path": str(tiny("2.0")), "dtype": "float32"},
        cluster_key_file=str(key),
        load_balancer_settings={"admin_key_file": str(key)},
    )
    async with running(path) as (processes, topology):
        topology.client.headers["Authorization"] = f"Bearer {KEY}"
        for url in processes.http_urls.values():
            await ready(url, topology.client, PATIENCE_S)
        good = await call(topology, is_streamed=False)
        assert isinstance(good, list)
        for name in ("d0", "p0"):
            await drained_and_back(processes, topology, good, name)
            await signalled(processes, topology, good, name)
        await signalled_twice(processes, topology, good, "d1")
        await topology.idle_within(8.0)
        await balancer_leaves(processes, topology)


async def test_a_decode_instance_leaves_and_the_other_takes_what_comes(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    path = cluster_file(tmp_path, tiny("2.0"), num_decode=2, model={"path": str(tiny("2.0")), "dtype": "float32"})
    async with running(path) as (processes, topology):
        await ready(processes.http_urls["d1"], topology.client, PATIENCE_S)
        good = await call(topology, is_streamed=False)
        assert isinstance(good, list)
        await signalled(processes, topology, good, "d1")
        await topology.idle_within(8.0)
