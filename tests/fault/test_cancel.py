"""The client leaves, at every moment of a request's life: everything goes back on both sides, in two seconds.

Failures of the kinds 19, 20 and 23: cancel anywhere; nothing leaks; the next request is served with unchanged tokens.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from longcat_pd.config import resolve
from tests.parity.conftest import MakeCheckpoint
from tests.topology import CHUNK, Topology, cluster_file, pools

PROMPT = list(range(100, 100 + 4 * CHUNK + 20))
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture
async def topology(tiny: MakeCheckpoint, tmp_path: Path) -> AsyncIterator[Topology]:
    path = cluster_file(
        tmp_path,
        tiny("2.0"),
        prefill={"pp_size": 2, "cp_size": 2},
        decode={"kvp_size": 2, "attn_tp_size": 2},
        prefill_engine={"max_model_len": 1024},
        decode_engine={"max_model_len": 1024},
    )
    async with pools(resolve.load(path, ["model.dtype=float32"])) as topology:
        yield topology


NUM_LONG = 300  # tokens of an answer that lasts while others come and go, however busy the machine is
NUM_ENDLESS = 700  # of one that nobody waits for: several seconds


async def leave_after(topology: Topology, seconds: float, **fields: Any) -> bool:
    """Start a call and hang up after so long. Whether it had ended by then."""
    async with httpx.AsyncClient(base_url=topology.url, timeout=60.0, trust_env=False) as client:
        call = asyncio.ensure_future(client.post("/v1/completions", json={**BODY, **fields}))
        done, _ = await asyncio.wait({call}, timeout=seconds)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return bool(done)


async def inside(topology: Topology, **wanted: tuple[int, int]) -> None:
    """Until so many requests are running and waiting at these instances."""
    until = time.monotonic() + 10.0
    while True:
        drivers = {name: one["driver"] for name, one in (await topology.account())["instances"].items()}
        found = {name: (drivers[name]["requests_running"], drivers[name]["requests_waiting"]) for name in wanted}
        if found == wanted:
            return
        assert time.monotonic() < until, found
        await asyncio.sleep(0.01)


def steps(topology: Topology, name: str, phase: str) -> float:
    """How many an instance has done."""
    lines = topology.parts[name].metrics.render().decode().splitlines()
    mark = f'phase="{phase}"'
    (count,) = (line for line in lines if line.startswith("longcat_pd_step_seconds_count{") and mark in line)
    return float(count.rpartition(" ")[2])


def prefill_steps(topology: Topology) -> float:
    """How many p0 has done."""
    return steps(topology, "p0", "prefill")


async def incarnations(topology: Topology) -> list[str]:
    return [worker["incarnation"] for worker in (await topology.account())["instances"].values()]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_leaving_at_every_twentieth_of_a_life(topology: Topology, is_streamed: bool) -> None:
    before = await incarnations(topology)
    first = await topology.complete(PROMPT, max_tokens=24)
    lives = []
    for _ in range(3):
        began = time.monotonic()
        assert (await topology.complete(PROMPT, max_tokens=24))["token_ids"] == first["token_ids"]
        lives.append(time.monotonic() - began)
    life = min(lives)  # one may have been disturbed
    ended = 0
    for part in range(20):
        began = time.monotonic()
        if await leave_after(topology, life * part / 20, stream=is_streamed):
            ended += 1
            life = min(life, time.monotonic() - began)  # the machine has less to do than it had
        await topology.idle_within()
    assert ended < 10, "most calls were meant to be left in the middle"
    assert (await topology.complete(PROMPT, max_tokens=24))["token_ids"] == first["token_ids"]
    assert await incarnations(topology) == before


async def test_many_leave_at_once_while_others_stay(topology: Topology) -> None:
    alone = await topology.complete(PROMPT, max_tokens=24)
    staying = [asyncio.ensure_future(topology.complete(PROMPT, max_tokens=24)) for _ in range(3)]
    leaving = [leave_after(topology, 0.06 * i, stream=bool(i % 2)) for i in range(12)]
    await asyncio.gather(*leaving)
    for answer in await asyncio.gather(*staying):
        assert answer["token_ids"] == alone["token_ids"]
    await topology.idle_within()


async def test_a_deadline_ends_a_request_in_any_phase(topology: Topology) -> None:
    late, limits = [], (0.05, 0.15, 0.3, 0.6)
    before = steps(topology, "d0", "decode")
    for limit in limits:
        began = time.monotonic()
        answer = await topology.client.post(
            "/v1/completions", json={**BODY, "max_tokens": NUM_ENDLESS}, headers={"X-Request-Timeout": str(limit)}
        )
        late.append(time.monotonic() - began - limit)
        assert answer.status_code == 504, answer.text
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        await topology.idle_within()
    print(f"told {', '.join(f'{1000 * seconds:.0f} ms' for seconds in late)} after the deadline")
    assert statistics.median(late) < 1.0 and max(late) < 3.0, "before the answer would have ended"
    assert steps(topology, "d0", "decode") - before < NUM_ENDLESS * len(limits) / 2, (
        "what is late is not decoded to its end"
    )


async def test_leaving_while_queued_for_the_decode_pool(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """One slot at the decode side: the second waits without a grant, and no prefill work is done for it."""
    path = cluster_file(
        tmp_path,
        tiny("2.0"),
        prefill={"cp_size": 2},
        decode={"kvp_size": 2, "attn_tp_size": 2},
        prefill_engine={"max_model_len": 1024},
        decode_engine={"max_num_seqs": 1, "max_model_len": 1024},
    )
    async with pools(resolve.load(path, ["model.dtype=float32"])) as topology:
        alone = await topology.complete(PROMPT, max_tokens=NUM_LONG)
        first = prefill_steps(topology)
        await topology.complete(PROMPT, max_tokens=1)  # as the next ones it finds a part of its prompt in the cache
        await topology.idle_within()
        before = 2 * prefill_steps(topology) - first
        running = asyncio.ensure_future(topology.complete(PROMPT, max_tokens=NUM_LONG))
        await inside(topology, p0=(0, 0), d0=(1, 0))
        waiting = asyncio.ensure_future(topology.complete(PROMPT, max_tokens=NUM_LONG))
        await inside(topology, p0=(1, 0), d0=(1, 1))
        assert prefill_steps(topology) == before
        waiting.cancel()
        await inside(topology, p0=(0, 0), d0=(1, 0))
        assert (await running)["token_ids"] == alone["token_ids"]
        await topology.idle_within()
        many = [topology.complete(PROMPT, max_tokens=4) for _ in range(6)]
        assert len({tuple(answer["token_ids"]) for answer in await asyncio.gather(*many)}) == 1
        await topology.idle_within()
