"""Drafts through the face: whoever drafts, and however many, says what an engine without drafts says, and ends alike.

The checkpoint is predictable, so runs of every length are accepted. Hand-overs carry the draft layer's cache and state, so
a pair accepts what one engine accepts.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from longcat_pd.config import resolve
from longcat_pd.tiny.make import write_tiny
from tests.parity.conftest import MakeCheckpoint
from tests.topology import BLOCK, Topology, cluster_file, pools, standalone

NUM_DRAFTS, NUM_NEW = 3, 12
LENGTHS = (1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 1, 47, 48, 49, 65, 100)


def cases() -> list[dict[str, Any]]:
    draw = random.Random(11)
    found: list[dict[str, Any]] = []
    for number, length in enumerate(LENGTHS):
        prompt = [draw.randrange(32, 1000) for _ in range(length)]
        found.append({"prompt": prompt, "max_tokens": NUM_NEW - number % 6, "logprobs": 2})
        found.append({"prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0.7, "seed": number})
    return found


def with_stops(some: list[dict[str, Any]], answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same requests, each stopped by a token in the middle of what it says: at every place of a run for some."""
    stopped = []
    for number, (case, answer) in enumerate(zip(some, answers, strict=True)):
        ids = answer["token_ids"]
        stopped.append({**case, "stop_token_ids": [ids[min(1 + number % 7, len(ids) - 1)]]})
    return stopped


async def ask(topology: Topology, some: list[dict[str, Any]], *, at_once: bool = False) -> list[dict[str, Any]]:
    async def one(number: int, case: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0.01 * number if at_once else 0)
        return await topology.complete(**case)

    if at_once:
        return list(await asyncio.gather(*(one(n, c) for n, c in enumerate(some))))
    return [await one(n, c) for n, c in enumerate(some)]


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one["token_ids"], one["finish_reason"]) == (other["token_ids"], other["finish_reason"])
        if other["logprobs"]:
            wanted = pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-4)
            assert one["logprobs"]["token_logprobs"] == wanted


@contextlib.asynccontextmanager
async def pair(model: Path, folder: Path, **sizes: int) -> AsyncIterator[Topology]:
    engine = {"num_draft_tokens": NUM_DRAFTS}
    prefill = {"pp_size": sizes["pp"], "cp_size": sizes["cp"]}
    decode = {"kvp_size": sizes["kvp"], "attn_tp_size": sizes["kvp"]}
    path = cluster_file(
        folder,
        model,
        prefill=prefill,
        decode=decode,
        prefill_engine=engine,
        decode_engine=engine,
        transfer={"digest": "all"},
    )
    async with pools(resolve.load(path, ["model.dtype=float32"])) as topology:
        yield topology


async def acceptance(topology: Topology, name: str) -> tuple[float, dict[str, float]]:
    """Of the instance that decodes: tokens for each row and step as the face tells them, and what its metrics count."""
    (state,) = (await topology.client.get("/server_info")).json()["internal_states"]
    mean = topology.parts[name].engine.acceptance.mean()
    assert mean is not None and state["avg_spec_accept_length"] == mean
    wanted = ("longcat_pd_draft_tokens_total", "longcat_pd_accepted_tokens_total", "longcat_pd_output_tokens_total")
    families = text_string_to_metric_families(topology.parts[name].metrics.render().decode())
    counts = {s.name: s.value for family in families for s in family.samples if s.name in wanted}
    assert len(counts) == len(wanted)
    steps = counts["longcat_pd_draft_tokens_total"] / NUM_DRAFTS
    assert 1 + counts["longcat_pd_accepted_tokens_total"] / steps == pytest.approx(mean)
    return mean, counts


async def test_nobody_can_tell_that_there_are_drafts(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    model, plain = tiny("2.0+predictable"), cases()
    async with standalone(model, "model.dtype=float32") as topology:
        expected = await ask(topology, plain)
        stopped = with_stops(plain, expected)
        expected_stopped = await ask(topology, stopped)
    assert {a["finish_reason"] for a in expected_stopped} == {"stop"}
    async with standalone(model, "model.dtype=float32", f"engine.num_draft_tokens={NUM_DRAFTS}") as topology:
        assert_same(await ask(topology, plain), expected)
        alone = await acceptance(topology, "standalone")
        assert_same(await ask(topology, stopped, at_once=True), expected_stopped)
        await topology.idle_within()
    assert 2.0 < alone[0] < 3.9
    async with pair(model, tmp_path, pp=2, cp=2, kvp=2) as topology:
        assert_same(await ask(topology, plain), expected)
        assert await acceptance(topology, "d0") == alone
        assert_same(await ask(topology, stopped, at_once=True), expected_stopped)
        assert_same(await ask(topology, plain, at_once=True), expected)
        await topology.idle_within()


async def test_stop_strings_end_inside_and_across_runs(tmp_path: Path) -> None:
    model = tmp_path / "m"
    write_tiny(model, "2.0+predictable", dtype="float32")
    prompts = [[100 + n, 200 + n, 300 + n] for n in range(4)]
    async with standalone(model) as topology:
        plain = await ask(topology, [{"prompt": prompt, "max_tokens": 16} for prompt in prompts])
        some = []
        for prompt, answer in zip(prompts, plain, strict=True):
            for place in range(2, len(answer["text"]) - 2, 3):  # every two characters, within tokens and over their borders
                some.append({"prompt": prompt, "max_tokens": 16, "stop": [answer["text"][place : place + 2]]})
        expected = await ask(topology, some, at_once=True)
    assert {answer["finish_reason"] for answer in expected} == {"stop"}
    async with standalone(model, f"engine.num_draft_tokens={NUM_DRAFTS}") as topology:
        found = await ask(topology, some, at_once=True)
        await topology.idle_within()
    for one, other in zip(found, expected, strict=True):
        assert one == other


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["2.0", "lite-sparse+predictable", "chat+predictable"])
async def test_pairs_of_other_variants(tiny: MakeCheckpoint, tmp_path: Path, variant: str) -> None:
    model, plain = tiny(variant), cases()
    async with standalone(model, "model.dtype=float32") as topology:
        expected = await ask(topology, plain)
    async with pair(model, tmp_path, pp=1, cp=3, kvp=2) as topology:
        assert_same(await ask(topology, plain, at_once=True), expected)
        await topology.idle_within()
