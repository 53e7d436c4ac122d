"""A driver or a rank dies in the middle of requests: a typed error or a good answer, never a hang; then all goes on.

Failures of the kinds 2, 5, 11 and 12. Real processes, killed by signal and started again on the same ports.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.parity.conftest import MakeCheckpoint
from tests.processes import Processes, instance_answer, ready, running
from tests.topology import CHUNK, Topology, cluster_file

PROMPT = list(range(100, 100 + 4 * CHUNK + 20))
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
MOMENTS_S = (0.08, 0.25, 0.8)
MORE_MOMENTS_S = (0.02, 0.15, 0.4, 1.2)
GONE_WITHIN_S = 20.0  # the ranks of a driver that is gone; of a machine that does many things at once
ENDS_WITHIN_S = 12.0  # a lost connection is seen at once, a silent link after five seconds
TYPED = {"worker_unavailable", "transfer_failed", "rank_lost", "draining", "starting", "engine_fault"}


def make_file(tiny: MakeCheckpoint, folder: Path) -> Path:
    return cluster_file(
        folder,
        tiny("2.0"),
        prefill={"pp_size": 2, "cp_size": 2},
        decode={"kvp_size": 2, "attn_tp_size": 2},
        prefill_engine={"rank_lost_s": 2},
        decode_engine={"rank_lost_s": 2},
        model={"path": str(tiny("2.0")), "dtype": "float32"},
    )


async def call(topology: Topology, *, is_streamed: bool, first: int = PROMPT[0], **fields: Any) -> list[int] | str:
    """Token ids of a good answer, or the code of a typed error. Anything else fails. ``first``: id of the prompt."""
    body = {**BODY, "prompt": [first, *PROMPT[1:]], "stream": is_streamed, **fields}
    ids: list[int] = []
    async with topology.client.stream("POST", "/v1/completions", json=body) as answer:
        text = (await answer.aread()).decode()
        if not is_streamed or answer.status_code != 200:
            content = json.loads(text)
            return str(content["error"]["code"]) if "error" in content else list(content["choices"][0]["token_ids"])
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    for event in events:
        if event == "[DONE]":
            return ids
        content = json.loads(event)
        if "error" in content:
            assert event == events[-1], "an error is the last event"
            return str(content["error"]["code"])
        for choice in content["choices"]:
            ids += choice.get("token_ids") or []
    raise AssertionError(f"a stream without an end: {text[-300:]}")


async def one_life(processes: Processes, topology: Topology, victim: str, moment_s: float, good: list[int]) -> None:
    """Calls under way, ``victim`` killed, every call ended; the survivor the same; then served again."""
    survivor = "d0" if victim == "p0" else "p0"
    before = (await instance_answer(processes, topology, survivor, "/ready"))["incarnation"]
    calls = [asyncio.ensure_future(call(topology, is_streamed=bool(i % 2))) for i in range(4)]
    await asyncio.sleep(moment_s)
    processes.signal(victim)
    for outcome in await asyncio.wait_for(asyncio.gather(*calls), ENDS_WITHIN_S):
        assert outcome == good or outcome in TYPED, outcome
    processes.wait(victim)
    assert processes.left_of(victim, grace_s=GONE_WITHIN_S) == [], "the ranks of a killed driver end by themselves"
    processes.start(victim)
    await ready(processes.http_urls[victim], topology.client)
    await ready(topology.url, topology.client)
    assert await call(topology, is_streamed=False) == good
    await topology.idle_within(8.0)
    assert (await instance_answer(processes, topology, survivor, "/ready"))["incarnation"] == before


@pytest.mark.slow
@pytest.mark.parametrize("moments_s", [MOMENTS_S, MORE_MOMENTS_S])
@pytest.mark.parametrize("victim", ["p0", "d0"])
async def test_a_driver_is_killed_and_comes_back(
    tiny: MakeCheckpoint, tmp_path: Path, victim: str, moments_s: tuple[float, ...]
) -> None:
    async with running(make_file(tiny, tmp_path)) as (processes, topology):
        good = await call(topology, is_streamed=True)
        assert isinstance(good, list) and len(good) == BODY["max_tokens"]
        for moment_s in moments_s:
            await one_life(processes, topology, victim, moment_s, good)


async def test_the_balancer_is_killed_and_comes_back(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    async with running(make_file(tiny, tmp_path)) as (processes, topology):
        good = await call(topology, is_streamed=False)
        calls = [asyncio.ensure_future(call(topology, is_streamed=bool(i % 2), max_tokens=150)) for i in range(4)]
        await asyncio.sleep(0.3)
        processes.signal("balancer")
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, httpx.TransportError)
        processes.start("balancer")
        await ready(topology.url, topology.client)  # three seconds are stated, and measured by ``test_balancer_process.py``
        assert await call(topology, is_streamed=True) == good
        await topology.idle_within()
