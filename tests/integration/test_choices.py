"""Many choices over narrow pools: lists of prompts, who goes first, and what is left when they end early.

The decode instance has one slot, so who is granted room is who has an answer next. Neither line holds more than three.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from longcat_pd.config import resolve
from longcat_pd.tiny.make import write_tiny
from tests.topology import BLOCK, Topology, cluster_file, pools, standalone

DRAFTS = {"num_draft_tokens": 3}
PROMPTS: list[Any] = ["a long river", [*range(300, 340)], [*range(600, 633)]]
LIST = {"prompt": PROMPTS, "n": 4, "max_tokens": 4, "temperature": 0.8, "seed": 3, "return_token_ids": True, "logprobs": 1}
NUM_CHOICES, PREFILL_SLOTS, IN_LINE = 12, 3, 3
LONG = 24
IDLE_S, PATIENCE_S = 8.0, 300.0  # on a machine that does many things at once


@contextlib.asynccontextmanager
async def narrow(model: Path, folder: Path, **engine: float) -> AsyncIterator[Topology]:
    path = cluster_file(
        folder,
        model,
        prefill_engine={**DRAFTS, "max_num_seqs": PREFILL_SLOTS, "max_queued_requests": IN_LINE, **engine},
        decode_engine={**DRAFTS, "max_num_seqs": 1, "max_queued_requests": IN_LINE, **engine},
    )
    async with pools(resolve.load(path, ["model.dtype=float32"])) as topology:
        yield topology


async def post(topology: Topology, **fields: Any) -> dict[str, Any]:
    answer = await topology.client.post("/v1/completions", json=fields, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def until_busy(topology: Topology, **wanted: int) -> None:
    """Until so many wait at p0, wait at d0 and run there."""
    until = asyncio.get_running_loop().time() + PATIENCE_S
    while True:
        instances = (await topology.account())["instances"]
        p, d = (instances[name]["driver"] for name in ("p0", "d0"))
        found = {"prefill": p["requests_waiting"], "decode": d["requests_waiting"], "running": d["requests_running"]}
        if found.items() >= wanted.items():
            return
        assert asyncio.get_running_loop().time() < until, (found, wanted)
        await asyncio.sleep(0.01)


async def check_lists(topology: Topology, expected: dict[str, Any]) -> None:
    """As one engine says it, each prompt as it is answered alone; what was computed before is counted as such."""
    found = await post(topology, **LIST)
    assert [one["token_ids"] for one in found["choices"]] == [one["token_ids"] for one in expected["choices"]]
    assert [one["text"] for one in found["choices"]] == [one["text"] for one in expected["choices"]]
    again = await post(topology, **LIST)
    prompts = [len(choice["prompt_token_ids"]) for choice in again["choices"][:: LIST["n"]]]
    assert again["usage"]["prompt_tokens"] == sum(prompts)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == sum((n - 1) // BLOCK * BLOCK for n in prompts)
    for index, prompt in enumerate(PROMPTS):
        alone = await post(topology, **{**LIST, "prompt": prompt, "n": 1})
        assert alone["choices"][0]["token_ids"] == found["choices"][LIST["n"] * index]["token_ids"]


async def check_turns(topology: Topology) -> None:
    """Who comes later is served while a body with many choices is."""
    many = asyncio.ensure_future(post(topology, **{**LIST, "max_tokens": LONG}))  # so that its turns can be seen
    await until_busy(topology, prefill=0, decode=1)
    await post(topology, prompt=[7], max_tokens=2)
    assert not many.done()
    assert len((await many)["choices"]) == NUM_CHOICES


async def check_priority(topology: Topology) -> None:
    """The lines of both instances: lower first, equals in the order in which they came, what runs goes on."""
    served: list[tuple[str, int]] = []

    async def one(name: str, priority: int) -> None:
        await post(topology, prompt=[30, 40, 50], max_tokens=20, ignore_eos=True, priority=priority, temperature=0)
        served.append((name, priority))

    async def come(*priorities: int) -> None:
        for name, priority in zip("abc", priorities, strict=True):
            tasks.append(asyncio.ensure_future(one(name, priority)))
            in_line = len(tasks) - 1
            at_decode = min(in_line, PREFILL_SLOTS)
            await until_busy(topology, prefill=in_line - at_decode, decode=at_decode, running=1)

    tasks = [asyncio.ensure_future(post(topology, prompt=[1, 2, 3], max_tokens=450, ignore_eos=True))]
    await until_busy(topology, prefill=0, decode=0, running=1)
    await come(50, 50, 50)
    await come(20, -20, 20)
    await asyncio.gather(*tasks)
    assert served == [("a", 50), ("b", -20), ("a", 20), ("c", 20), ("b", 50), ("c", 50)]


async def check_ends(topology: Topology) -> None:
    """Leaving, and a time that is over: all hand-overs of the body end."""
    for lines in (0, 3):
        async with topology.client.stream(
            "POST", "/v1/completions", json={**LIST, "max_tokens": 30, "stream": True}
        ) as answer:
            heard = answer.aiter_lines()
            for _ in range(lines):
                await anext(heard)
        await topology.idle_within(IDLE_S)
    late = await topology.client.post(
        "/v1/completions", json={**LIST, "max_tokens": 99}, headers={"X-Request-Timeout": "0.7"}
    )
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    await topology.idle_within(IDLE_S)


async def test_many_choices_over_narrow_pools(tmp_path: Path) -> None:
    model = tmp_path / "m"
    write_tiny(model, "2.0+predictable", dtype="float32")
    async with standalone(model, "model.dtype=float32") as topology:
        expected = await post(topology, **LIST)
    async with narrow(model, tmp_path) as topology:
        await check_lists(topology, expected)
        await topology.idle_within(IDLE_S)
        await check_turns(topology)
        await check_priority(topology)
        await check_ends(topology)
        account = await topology.idle_within(IDLE_S)
        assert all(worker["mismatch"] == [] for worker in account["instances"].values())


async def test_choices_wait_for_their_own_body_as_long_as_it_takes(tmp_path: Path) -> None:
    """Longer than others wait for room, which they have none of meanwhile."""
    write_tiny(tmp_path / "m", "2.0", dtype="float32")
    body = {"prompt": [7, 8], "n": 5, "max_tokens": 250, "ignore_eos": True}
    async with narrow(tmp_path / "m", tmp_path, queue_timeout_s=0.4) as topology:
        many = asyncio.ensure_future(post(topology, **body))
        await until_busy(topology, running=1)
        began = asyncio.get_running_loop().time()
        other = await topology.client.post("/v1/completions", json={"prompt": [9], "max_tokens": 1})
        assert (other.status_code, other.json()["error"]["code"]) == (503, "overloaded")
        assert [len(choice["text"]) > 0 for choice in (await many)["choices"]] == [True] * 5
        assert asyncio.get_running_loop().time() - began > 0.4
        await topology.idle_within(IDLE_S)


@pytest.mark.slow
async def test_as_many_choices_as_there_may_be(tmp_path: Path) -> None:
    """Through one slot, and lines that are shorter than that."""
    model = tmp_path / "m"
    write_tiny(model, "2.0+predictable", dtype="float32")
    async with narrow(model, tmp_path) as topology:
        lists = [{**LIST, "prompt": [[number, 5, 6 + place] for place in range(8)], "n": 8} for number in (100, 200)]
        both = await asyncio.gather(*(post(topology, **asked) for asked in lists))
        assert [len(answer["choices"]) for answer in both] == [64, 64]
        await topology.idle_within(IDLE_S)
