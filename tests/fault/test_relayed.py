"""A relay between two drivers that stands still or resets their connection. Failures of kind 14, between real processes.

The prefill driver and the balancer find the decode driver where relays listen; the decode driver itself listens elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from longcat_pd.fault import command
from longcat_pd.fault.relay import Relay, relaying
from longcat_pd.kv_transfer.hello import CONTROL_PORT_OFFSET
from tests.fault.switched import until
from tests.fault.test_killed import call
from tests.parity.conftest import MakeCheckpoint
from tests.ports import free_base
from tests.processes import Processes, instance_answer, ready
from tests.topology import Topology, cluster_file

SILENT_S = 5.0


@contextlib.asynccontextmanager
async def relayed(file: Path) -> AsyncIterator[tuple[Processes, Topology, Relay]]:
    """All processes of the file, ready, with a relay for the records of the drivers."""
    real, processes = free_base(20), Processes(file)
    seen = httpx.URL(processes.http_urls["d0"]).port
    assert seen is not None
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(processes.end)
        await stack.enter_async_context(relaying(("127.0.0.1", real), port=seen))
        offset = CONTROL_PORT_OFFSET
        control = await stack.enter_async_context(relaying(("127.0.0.1", real + offset), port=seen + offset))
        for name in processes.names:
            processes.start(name, *([f"decode.instances.0.http_port={real}"] if name == "d0" else []))
        client = httpx.AsyncClient(base_url=processes.url, timeout=60.0, trust_env=False)
        await stack.enter_async_context(client)
        await ready(processes.url, client)
        yield processes, Topology(processes.url, client, {}), control


async def is_down(processes: Processes, topology: Topology) -> bool:
    return bool((await instance_answer(processes, topology, "p0", "/ready"))["peers"]["d0"] == "down")


@pytest.mark.slow
async def test_silence_and_resets_between_two_drivers(
    tiny: MakeCheckpoint, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tiny("2.0")
    file = cluster_file(tmp_path, checkpoint, faults=True, model={"path": str(checkpoint), "dtype": "float32"})
    async with relayed(file) as (processes, topology, control):
        good = await call(topology, is_streamed=False)
        assert isinstance(good, list)
        control.stall()
        under_way = asyncio.ensure_future(call(topology, is_streamed=False))
        await until(lambda: is_down(processes, topology), SILENT_S + 10.0, "nothing passes between the drivers")
        assert await under_way in ("transfer_failed", "worker_unavailable")
        assert await call(topology, is_streamed=False) in ("transfer_failed", "worker_unavailable")
        for name in ("p0", "d0"):
            assert (await instance_answer(processes, topology, name, "/debug/accounting"))["driver"]["transfers"] == 0
        control.flow()
        await ready(topology.url, topology.client, 15.0)
        assert await call(topology, is_streamed=True) == good
        control.cut(resets=True)
        await ready(topology.url, topology.client, 15.0)
        assert await call(topology, is_streamed=True) == good
        await topology.idle_within(8.0)

        config = ["--config", str(file)]
        assert await asyncio.to_thread(command.main, [*config, "--instance", "d0", "slow_step", "--seconds", "1"]) == 0
        assert await call(topology, is_streamed=False) == good
        assert await asyncio.to_thread(command.main, ["stop", *config, "--instance", "p0", "--rank", "0"]) == 0
        under_way = asyncio.ensure_future(call(topology, is_streamed=False))
        await asyncio.sleep(1.0)
        assert not under_way.done()
        assert await asyncio.to_thread(command.main, ["cont", *config, "--instance", "p0", "--rank", "0"]) == 0
        assert await under_way == good
        await topology.idle_within(8.0)
        assert "d0       slow_step seconds=1" in capfd.readouterr().out
