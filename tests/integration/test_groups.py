"""An instance of several groups through the face: one text wherever a request lands, and everything back in every group."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from longcat_pd.config import resolve
from tests.integration.test_prefixes import total
from tests.parity.conftest import MakeCheckpoint
from tests.topology import BLOCK, CHUNK, Topology, cluster_file, pools, standalone

TOPK, SLOTS = 48, 4  # two of a group
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, TOPK - 1, TOPK + 1, CHUNK, CHUNK + 1, 150)
RANKS = 4

Answers = list[dict[str, Any]]


def cases() -> list[dict[str, Any]]:
    """Greedy and drawn, of many lengths; some begin alike."""
    draw, found = random.Random(29), []
    stem = [draw.randrange(32, 1000) for _ in range(max(LENGTHS))]
    for number, length in enumerate(LENGTHS):
        fork = [*stem[: length // 2], *(draw.randrange(32, 1000) for _ in range(length - length // 2))]
        found.append({"prompt": stem[:length], "max_tokens": 4 + number % 7})
        found.append({"prompt": fork, "max_tokens": 12 - number % 7, "temperature": 0.8, "top_p": 0.9, "seed": number})
    return found


async def ask(topology: Topology, at_once: int) -> list[list[int]]:
    """The next one begins as soon as one has ended."""
    free = asyncio.Semaphore(at_once)

    async def one(case: dict[str, Any]) -> list[int]:
        async with free:
            return list((await topology.complete(**case))["token_ids"])

    return list(await asyncio.gather(*map(one, cases())))


_expected: dict[Path, list[list[int]]] = {}


async def expected_of(model: Path) -> list[list[int]]:
    """What one engine says, one after the other."""
    if model not in _expected:
        async with standalone(model, "model.dtype=float32") as topology:
            _expected[model] = await ask(topology, 1)
    return _expected[model]


@contextlib.asynccontextmanager
async def pair(model: Path, folder: Path, num_drafts: int) -> AsyncIterator[Topology]:
    engine = {"num_draft_tokens": num_drafts}
    path = cluster_file(
        folder,
        model,
        prefill={"cp_size": 2},
        decode={"dp_size": 2, "kvp_size": 2, "attn_tp_size": 2},
        prefill_engine=engine,
        decode_engine={**engine, "max_num_seqs": SLOTS},
        transfer={"digest": "all"},
    )
    async with pools(resolve.load(path, ["model.dtype=float32"])) as topology:
        yield topology


def used(account: dict[str, Any]) -> list[bool]:
    """By rank, whether prompts have been there."""
    return [rank["blocks"]["cached"] > 0 for rank in account["ranks"]]


async def leave(topology: Topology, case: dict[str, Any], seconds: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(topology.complete(**case), seconds)


async def watch(topology: Topology) -> None:
    """Drivers and ranks agree at all times."""
    while True:
        account = await topology.account()
        assert all(worker["mismatch"] == [] for worker in account["instances"].values()), account


@pytest.mark.parametrize("num_drafts", [3, pytest.param(0, marks=pytest.mark.slow)])
async def test_a_prompt_may_land_in_any_group(tiny: MakeCheckpoint, tmp_path: Path, num_drafts: int) -> None:
    model = tiny("2.0+predictable")
    expected = await expected_of(model)
    async with pair(model, tmp_path, num_drafts) as topology:
        for at_once in (1, 3, 2 * SLOTS):
            assert await ask(topology, at_once) == expected
        account = await topology.idle_within()
        decode = account["instances"]["d0"]
        assert len(decode["ranks"]) == RANKS and used(decode) == [True] * RANKS
        assert [rank["slots"]["total"] for rank in decode["ranks"]] == [SLOTS // 2] * RANKS

        # whoever begins like another goes to its group, where all but the last block is there already
        sent = [total(topology, "d0", "transfer_bytes_total")]
        for prompt in (range(500, 500 + 10 * BLOCK), range(700, 700 + BLOCK), range(500, 500 + 10 * BLOCK)):
            await topology.complete(list(prompt), max_tokens=2)
            sent.append(total(topology, "d0", "transfer_bytes_total"))
        assert 0 < sent[3] - sent[2] < 0.2 * (sent[1] - sent[0])
        await topology.idle_within()


async def test_leaving_gives_back_what_a_group_held(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    model, draw = tiny("2.0"), random.Random(31)
    expected = await expected_of(model)
    async with pair(model, tmp_path, 0) as topology:
        watching = asyncio.ensure_future(watch(topology))
        for _ in range(3):
            crowd = draw.sample(cases(), 10)
            await asyncio.gather(*(leave(topology, case, draw.choice((0.01, 0.04, 0.1, 0.2))) for case in crowd))
        assert not watching.done()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await topology.idle_within()
        assert await ask(topology, 2 * SLOTS) == expected
        await topology.idle_within()


async def test_one_engine_with_the_whole_cache_on_every_rank_of_a_group(tiny: MakeCheckpoint) -> None:
    model = tiny("lite-sparse")
    expected = await expected_of(model)
    layout = ("parallel.dp_size=2", "parallel.attn_tp_size=2", f"engine.max_num_seqs={SLOTS}")
    async with standalone(model, "model.dtype=float32", *layout) as topology:
        for at_once in (1, 2 * SLOTS):
            assert await ask(topology, at_once) == expected
        account = await topology.idle_within()
        assert used(account) == [True] * RANKS
        info = (await topology.client.get("/server_info")).json()
        sizes = {"dp_size": 2, "kvp_size": 1, "attn_tp_size": 2}
        assert {name: info["parallel"][name] for name in sizes} == sizes
        assert info["internal_states"][0]["effective_max_running_requests_per_dp"] == SLOTS // 2
