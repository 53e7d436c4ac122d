"""Instances over several machines, which are addresses of the loopback network here, with real processes on each.

What the two sides of an instance make of each other in every case is in ``tests/unit/test_several_nodes.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from tests.fault.test_killed import call
from tests.parity.conftest import MakeCheckpoint
from tests.processes import Processes, instance_answer, ranks_of, ready, running
from tests.topology import Topology, cluster_file, standalone

PROMPT = list(range(20, 120))
SOON_S = 30.0  # a failed start is over on all nodes
LOST = {"rank_lost_s": 1.0}
WORKERS = ("d0", "d0.1", "p0", "p0.1")

FAILING_RANK = """
import sys
from longcat_pd.prefill_worker.__main__ import build
from longcat_pd.server.peered import WorkerRole
from longcat_pd.server.worker import run_worker

sys.exit(run_worker(WorkerRole(name="prefill", rank_entry="tests.integration.rank_entries:raise_at_start", build=build)))
"""


def split_file(tiny: MakeCheckpoint, folder: Path) -> Path:
    """P is a pipeline over two nodes, of which one has a name; D has its cache on two others."""
    return cluster_file(
        folder,
        tiny("2.0"),
        prefill={"pp_size": 2},
        decode={"kvp_size": 2, "attn_tp_size": 2},
        prefill_nodes=["localhost", "127.0.0.2"],
        decode_nodes=["127.0.0.3", "127.0.0.4"],
        model={"path": str(tiny("2.0")), "dtype": "float32"},
        prefill_engine=LOST,
        decode_engine=LOST,
    )


async def until_running(processes: Processes, topology: Topology, count: int) -> None:
    """Until so many requests are computed at d0."""
    until = time.monotonic() + SOON_S
    while True:
        driver = (await instance_answer(processes, topology, "d0", "/debug/accounting"))["driver"]
        if driver["requests_running"] == count:
            return
        assert time.monotonic() < until, driver
        await asyncio.sleep(0.01)


def left_of(processes: Processes, *names: str) -> list[int]:
    """Orphans."""
    return [left for name in names for left in processes.left_of(name, grace_s=8.0)]


async def test_four_nodes_answer_as_one_engine_and_drain_when_all_are_told_to_end(
    tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    async with standalone(tiny("2.0"), "model.dtype=float32") as alone:
        expected = (await alone.complete(PROMPT, max_tokens=60))["token_ids"]
    async with running(split_file(tiny, tmp_path)) as (processes, topology):
        assert sorted(processes.names) == ["balancer", *WORKERS]
        assert (await topology.complete(PROMPT, max_tokens=60))["token_ids"] == expected
        for name, nodes in (("p0", ["localhost", "127.0.0.2"]), ("d0", ["127.0.0.3", "127.0.0.4"])):
            info = await instance_answer(processes, topology, name, "/server_info")
            assert [(rank["rank"], rank["node"]) for rank in info["memory"]] == list(enumerate(nodes))
            assert len(ranks_of(processes.running[name])) == len(ranks_of(processes.running[f"{name}.1"])) == 1
        under_way = asyncio.ensure_future(topology.complete(PROMPT, max_tokens=60))
        await until_running(processes, topology, 1)
        for name in WORKERS:
            processes.signal(name, signal.SIGTERM)
        assert (await under_way)["token_ids"] == expected
        assert [await asyncio.to_thread(processes.wait, name) for name in WORKERS] == [0, 0, 0, 0]
        assert left_of(processes, *WORKERS) == []


async def test_a_node_and_a_driver_are_killed(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    async with running(split_file(tiny, tmp_path)) as (processes, topology):
        under_way = [
            asyncio.ensure_future(call(topology, is_streamed=streamed, max_tokens=200)) for streamed in (True, False)
        ]
        await until_running(processes, topology, 2)
        processes.signal("d0.1")
        assert await asyncio.to_thread(processes.wait, "d0") == 1
        assert "node 1 (127.0.0.4) of d0 is gone" in processes.log("d0")
        assert all(outcome in ("rank_lost", "draining") for outcome in await asyncio.gather(*under_way))
        assert left_of(processes, "d0", "d0.1") == []
        for name in ("d0", "d0.1"):
            processes.start(name)
        await ready(processes.http_urls["d0"], topology.client)
        await ready(topology.url, topology.client)
        assert isinstance(await call(topology, is_streamed=False), list), "both come back on the same ports"
        last = asyncio.ensure_future(call(topology, is_streamed=False))
        await until_running(processes, topology, 1)
        processes.signal("d0.1", signal.SIGTERM)
        assert isinstance(await last, list), "a node that is told to end has its instance drain"
        assert [await asyncio.to_thread(processes.wait, name) for name in ("d0", "d0.1")] == [1, 0]
        assert left_of(processes, "d0", "d0.1") == []
        processes.signal("p0")
        assert await asyncio.to_thread(processes.wait, "p0.1") == 1
        assert "the driver of p0 at localhost:" in processes.log("p0.1") and "has been silent" in processes.log("p0.1")
        assert left_of(processes, "p0", "p0.1") == []


@contextlib.contextmanager
def starting(tiny: MakeCheckpoint, folder: Path) -> Iterator[Processes]:
    """The first node of P; the rest is the test's."""
    processes = Processes(split_file(tiny, folder))
    try:
        processes.start("p0")
        yield processes
    finally:
        processes.end()


def test_a_node_with_another_configuration_is_sent_away_and_one_whose_rank_fails_ends_the_start(
    tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    with starting(tiny, tmp_path) as processes:
        processes.start("p0.1", "prefill.engine.num_blocks=130")
        assert processes.wait("p0.1") == 2
        assert "node 1 (127.0.0.2) of p0 reads another configuration" in processes.log("p0.1")
        config = next(tmp_path.glob("cluster-*.yaml"))
        began = time.monotonic()
        processes.launch("p0.1", ["-c", FAILING_RANK, "--instance", "p0", "--node-rank", "1", "--config", str(config)])
        assert processes.wait("p0", SOON_S) == 1 and processes.wait("p0.1", SOON_S) == 1
        assert time.monotonic() - began < SOON_S
        assert "ValueError: a defect of the start" in processes.log("p0")
        traces = [processes.log(name).count("Traceback (most recent call last)") for name in ("p0", "p0.1")]
        assert traces == [1, 0]
        assert left_of(processes, "p0", "p0.1") == []


def test_a_node_that_cannot_take_part_refuses_the_start_of_its_instance(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    with starting(tiny, tmp_path) as processes:
        processes.start("p0.1", "hosts.cores_per_device=100000")
        assert processes.wait("p0.1") == 2 and processes.wait("p0") == 2
        finding = "hosts.cores_per_device=100000: 1 ranks a node need 100000 cores"
        assert f"error: {finding}" in processes.log("p0.1")
        assert f"error: node 1 (127.0.0.2) of p0: {finding}" in processes.log("p0")
        processes.start("p0")
        processes.start("p0.1", "model.path=/nowhere")
        assert processes.wait("p0.1") == 2 and processes.wait("p0") == 2
        assert "error: node 1 (127.0.0.2) of p0: model.path=/nowhere" in processes.log("p0")
