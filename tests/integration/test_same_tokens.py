"""The product's promise: whatever the layouts, P(pp, cp) -> D(kvp) says what one engine says, token for token.

Through HTTP, ids in and out, temperature 0, fp32; each prompt alone, and eight at a time that arrive one after the other.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from longcat_pd.config import resolve
from tests.parity.conftest import MakeCheckpoint
from tests.topology import BLOCK, CHUNK, Topology, cluster_file, pools, standalone

TOPK, EOS = 48, 2
LENGTHS = (1, 2, 3, 4, 5, 6, BLOCK - 1, BLOCK, BLOCK + 1, TOPK - 1, TOPK, TOPK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 150, 230)

# pp, layers per stage, cp, kvp: every size of each, neither divides the other in many, uneven stages both ways
LAYOUTS = (
    (1, (), 1, 1),
    (1, (), 2, 3),
    (1, (), 3, 4),
    (2, (1, 2), 1, 2),
    (2, (2, 1), 2, 2),
    (2, (), 3, 1),
    (3, (), 1, 4),
    (3, (), 2, 1),
    (3, (), 3, 3),
    (2, (1, 2), 2, 4),
)
# The rest is slow. What is left: a share that is one's of three and half another's, many to one, uneven stages to the most
# ranks, equal sides of three; and the other attention and embeddings with uneven stages the other way round.
OFTEN = {("2.0", layout) for layout in ((1, (), 2, 3), (2, (), 3, 1), (2, (1, 2), 2, 4), (3, (), 3, 3))} | {
    (variant, (2, (2, 1), 2, 2)) for variant in ("lite-sparse", "lite", "chat")
}

CASES = [
    pytest.param(variant, layout, marks=() if (variant, layout) in OFTEN else pytest.mark.slow)
    for variant in ("2.0", "lite-sparse", "lite", "chat")
    for layout in LAYOUTS
]

Answers = list[dict[str, Any]]
_expected: dict[Path, Answers] = {}


def prompts() -> list[list[int]]:
    draw = random.Random(7)
    found = [[draw.randrange(20, 1000) for _ in range(n)] for n in LENGTHS]
    with_eos = [draw.randrange(20, 1000) for _ in range(70)]
    with_eos[0] = with_eos[BLOCK] = with_eos[CHUNK - 1] = with_eos[CHUNK] = with_eos[-1] = EOS
    return [*found, with_eos, [EOS], [5, EOS, 7]]


async def ask(topology: Topology, prompt: list[int]) -> dict[str, Any]:
    return await topology.complete(prompt, logprobs=3)


async def ask_one_by_one(topology: Topology, some: list[list[int]]) -> Answers:
    return [await ask(topology, prompt) for prompt in some]


async def ask_staggered(topology: Topology, some: list[list[int]]) -> Answers:
    """Eight at a time; each starts a moment after the one before."""
    free = asyncio.Semaphore(8)

    async def one(number: int, prompt: list[int]) -> dict[str, Any]:
        await asyncio.sleep(0.015 * number)
        async with free:
            return await ask(topology, prompt)

    return await asyncio.gather(*(one(i, p) for i, p in enumerate(some)))


def assert_same(found: Answers, expected: Answers) -> None:
    for prompt, one, other in zip(prompts(), found, expected, strict=True):
        assert one["token_ids"] == other["token_ids"], f"prompt of {len(prompt)}"
        for name in ("prompt_tokens", "completion_tokens"):
            assert one["usage"][name] == other["usage"][name]
        mine, theirs = one["logprobs"], other["logprobs"]
        assert mine["token_logprobs"] == pytest.approx(theirs["token_logprobs"], abs=1e-4)
        for ours, reference in zip(mine["top_logprobs"], theirs["top_logprobs"], strict=True):
            assert sorted(ours.values()) == pytest.approx(sorted(reference.values()), abs=1e-4)


async def expected_of(model: Path) -> Answers:
    """What one engine with one rank says, prompt by prompt."""
    if model not in _expected:
        async with standalone(model, "model.dtype=float32") as topology:
            _expected[model] = await ask_one_by_one(topology, prompts())
            await topology.idle_within()
    return _expected[model]


@pytest.mark.parametrize(("variant", "layout"), CASES)
async def test_pools_say_what_one_engine_says(
    tiny: MakeCheckpoint, tmp_path: Path, variant: str, layout: tuple[int, tuple[int, ...], int, int]
) -> None:
    model = tiny(variant)
    expected = await expected_of(model)
    pp, layers, cp, kvp = layout
    prefill = {"pp_size": pp, "cp_size": cp, "layers_per_stage": list(layers)}
    decode = {"kvp_size": kvp, "attn_tp_size": kvp}
    path = cluster_file(tmp_path, model, prefill=prefill, decode=decode, transfer={"digest": "all"})
    async with pools(resolve.load(path, ["model.dtype=float32"])) as topology:
        assert_same(await ask_staggered(topology, prompts()), expected)
        assert_same(await ask_one_by_one(topology, prompts()), expected)
        await topology.idle_within()


async def test_company_does_not_matter_to_one_engine(tiny: MakeCheckpoint) -> None:
    model = tiny("2.0")
    async with standalone(model, "model.dtype=float32") as topology:
        assert_same(await ask_staggered(topology, prompts()), await expected_of(model))
