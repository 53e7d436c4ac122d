"""What a sequence shares is to the bit what it would have computed itself: every cache entry, tokens and log-probs.

Of all kinds of entries: latents, rotary parts, index keys, and the draft layer's, which depend on the token behind as well;
with n-grams, whose history lies in the shared part. Computed as a prompt, in chunks, or token by token as an answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longcat_pd.clock import MonotonicClock
from longcat_pd.config.schema import RankSpec
from longcat_pd.engine.driver import Engine
from longcat_pd.engine.inline import InlineExecutor
from longcat_pd.engine.request import Request, SamplingParams, TokenOutput
from longcat_pd.metrics import Metrics
from tests.parity.conftest import MakeCheckpoint
from tests.parity.single import rank_spec

BLOCK, CHUNK, NUM_NEW = 8, 16, 21


@dataclass
class Seen:
    """One answered request: what its cache held after its prompt, what it said, and what it did not compute."""

    entries: dict[str, torch.Tensor]  # [positions, width]
    tokens: list[TokenOutput]
    num_cached: int


def spec_of(path: Path, **engine: Any) -> RankSpec:
    spec = rank_spec(path, dtype="float32", block_size=BLOCK, num_blocks=200, num_drafts=engine.get("num_draft_tokens", 0))
    settings = replace(spec.instance.engine, max_num_batched_tokens=CHUNK, **engine)
    return replace(spec, instance=replace(spec.instance, engine=settings))


async def answers(path: Path, prompts: list[list[int]], **settings: Any) -> list[Seen]:
    """Each prompt once, then once with its answer and two tokens behind it, one after the other."""
    spec = spec_of(path, **settings)
    executor = InlineExecutor(spec)
    engine = Engine(
        spec.instance.engine,
        spec.instance.parallel,
        executor=executor,
        eos_token_ids=frozenset(),
        clock=MonotonicClock(),
        metrics=Metrics(role="standalone", instance="s0"),
    )
    await engine.start()
    found = []
    for prompt in prompts:
        for _ in range(2):
            found.append(await answer(engine, executor, prompt, settings.get("num_draft_tokens", 0)))
            prompt = [*prompt, *(token.token_id for token in found[-1].tokens), 30, 31]
    assert (await engine.accounting())["idle"]
    await engine.close()
    return found


async def answer(engine: Engine, executor: InlineExecutor, prompt: list[int], num_drafts: int) -> Seen:
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, num_logprobs=1)
    asked = Request(request_id="r", prompt_token_ids=tuple(prompt), sampling=sampling, deadline=float("inf"))
    async with engine.reserve(asked, len(prompt) + NUM_NEW + num_drafts) as seq:
        first = await engine.prefill(seq)
        cache, draft = executor._runner.cache, {}
        for entry in cache.spec.entries:
            draft[entry.name] = cache.tensor(entry.name)[seq.blocks].flatten(0, 1)[: len(prompt) - 1].clone()
        deltas = [delta async for delta in engine.decode(seq, first)]
    return Seen(draft, [token for delta in deltas for token in delta.tokens], asked.life.num_cached_tokens or 0)


def prompts() -> list[list[int]]:
    draw = random.Random(2)
    stem = [draw.randrange(32, 1000) for _ in range(70)]
    lengths = (2 * BLOCK, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 1, 3 * BLOCK + 2, 70)
    forks = [[*stem[:n], 7, *stem[n + 1 : n + 9]] for n in (1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 5 * BLOCK + 3)]
    return [*(stem[:n] for n in lengths), *forks]


LONGER = [pytest.param(variant, 0, marks=pytest.mark.slow) for variant in ("2.0", "lite-sparse")]


@pytest.mark.parametrize(("variant", "num_drafts"), [("2.0", 3), ("chat+predictable", 2), *LONGER])
async def test_shared_entries_are_those_that_would_have_been_computed(
    tiny: MakeCheckpoint, variant: str, num_drafts: int
) -> None:
    path = tiny(variant)
    plain = await answers(path, prompts(), num_draft_tokens=num_drafts, prefix_cache=False)
    shared = await answers(path, prompts(), num_draft_tokens=num_drafts)
    assert all(seen.num_cached == 0 for seen in plain)
    hits = [seen.num_cached for seen in shared]
    assert hits[0] == 0 and max(hits) >= 64 and sum(hits) > 400, hits
    for number, (one, other) in enumerate(zip(shared, plain, strict=True)):
        for name, entries in one.entries.items():
            equal = (entries == other.entries[name]).all(-1)
            assert equal.all(), f"prompt {number}: {name} differs at {equal.logical_not().nonzero()[:, 0].tolist()}"
        assert one.tokens == other.tokens, f"prompt {number}"
