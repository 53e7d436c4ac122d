"""engine/speculative.py, decode_step.py and graph.py: which draws stand, what rows of a batch touch, and what travels."""

from __future__ import annotations

from itertools import product
from typing import Any, cast

import pytest
import torch

from longcat_pd import kernels
from longcat_pd.config.schema import EngineConfig
from longcat_pd.engine.accounting import Acceptance
from longcat_pd.engine.decode_state import DecodeShape, DecodeState
from longcat_pd.engine.decode_step import DecodeStep
from longcat_pd.engine.handover import packed, unpacked
from longcat_pd.engine.plan import SlotOutput
from longcat_pd.engine.slots import SlotState
from longcat_pd.engine.speculative import accepted
from longcat_pd.kv_cache.block_pool import GroupPool
from longcat_pd.kv_cache.spec import CacheEntry, CacheSpec
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.metrics import Metrics
from longcat_pd.parallel.layout import CacheShard
from tests.drafts import Script
from tests.slots import admit
from tests.unit.test_runner import VOCAB, SumModel

BLOCK = 4


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3])
def test_a_run_stands_up_to_the_first_wrong_draft(num_drafts: int) -> None:
    patterns = list(product([True, False], repeat=num_drafts))
    drawn = torch.tensor([[30 + i for i in range(num_drafts + 1)]] * len(patterns))
    drafts = torch.tensor([[30 + i if ok else 9 for i, ok in enumerate(p)] for p in patterns]).view(
        len(patterns), num_drafts
    )
    expected = [1 + next((i for i, ok in enumerate(p) if not ok), num_drafts) for p in patterns]
    assert accepted(drawn, drafts).tolist() == expected


def answer(prompt: list[int], num_tokens: int) -> list[int]:
    ids = list(prompt)
    while len(ids) < len(prompt) + num_tokens:
        ids.append(sum(ids) % VOCAB)
    return ids


class Bench:
    """A step over the model that adds up all it sees, with scripted drafts; three slots with the cache of their prompts."""

    def __init__(self, pattern: tuple[int, ...], max_model_len: int = 40) -> None:
        self.cache = KVCache(CacheSpec((CacheEntry("latent.0", 0, 1, torch.float32),)), 40, BLOCK, torch.device("cpu"))
        engine = EngineConfig(block_size=BLOCK, max_num_seqs=3, max_model_len=max_model_len, num_draft_tokens=3)
        shard = CacheShard("local", 1, 0)
        shape = DecodeShape.of(engine, shard, num_groups=1, ngram_order=0, hidden_size=1, vocab_size=VOCAB)
        self.state = DecodeState(shape, shard, dtype=torch.float32, device=torch.device("cpu"))
        self.prompts = [[5, 6, 7], [9], [1, 2, 3, 4, 5, 6]]
        drafts = Script(self.state, [answer(prompt, 60) for prompt in self.prompts], pattern)
        model = cast(Any, SumModel(self.cache, []))
        self.step = DecodeStep(model, self.state, ops=kernels.load("cpu"), drafts=drafts)
        self.found = [answer(prompt, 1) for prompt in self.prompts]
        pool = GroupPool(0, 1, 40)
        for slot, ids in enumerate(self.found):
            record = admit(pool, slot, ids, block_size=BLOCK, room=max_model_len - len(ids), num_computed=len(ids) - 1)
            known = SlotState(record, 1, BLOCK)
            for position, token in enumerate(ids[:-1]):
                self.cache.tensor("latent.0")[known.blocks[position // BLOCK], position % BLOCK] = token
            self.state.seat(slot, known, torch.zeros(1, 1))

    def run(self, *slots: int) -> list[int]:
        """One step of these slots; how many tokens stand of each."""
        lengths = tuple(int(n) + 3 for n in self.state.num_tokens[list(slots)])
        drawn, counts, _ = self.step(torch.tensor(slots), lengths)
        for slot, tokens, count in zip(slots, drawn.tolist(), counts.tolist(), strict=True):
            if slot < 3:
                self.found[slot] += tokens[:count]
        return cast(list[int], counts.tolist())


@pytest.mark.parametrize("pattern", [(0,), (3,), (0, 3, 1, 2), (2, 2, 1)])
def test_every_pattern_of_acceptance_gives_the_same_tokens(pattern: tuple[int, ...]) -> None:
    bench = Bench(pattern)
    for number in range(7):
        assert bench.run(0, 1, 2) == [1 + pattern[number % len(pattern)]] * 3
    for prompt, found in zip(bench.prompts, bench.found, strict=True):
        assert found == answer(prompt, len(found) - len(prompt))


def test_sequences_come_and_go_between_steps() -> None:
    bench = Bench((2, 0))
    for slots in ((0,), (2, 0), (1,), (0, 1, 2), (2,), (1, 0)):
        bench.run(*slots)
    for prompt, found in zip(bench.prompts, bench.found, strict=True):
        assert found == answer(prompt, len(found) - len(prompt))


def test_rows_of_nobody_touch_nothing_that_lives() -> None:
    bench = Bench((3,))
    padding = bench.state.padding
    for _ in range(3):
        states = {name: tensor.clone() for name, tensor in bench.state.named_buffers()}
        cache = bench.cache.tensor("latent.0").clone()
        bench.run(padding, padding)
        for name, tensor in bench.state.named_buffers():
            assert torch.equal(tensor[:padding], states[name][:padding]), name
        assert torch.equal(bench.cache.tensor("latent.0")[1:], cache[1:])
        assert bench.state.num_tokens[padding] == bench.state.padding_length - 3 == 2
        assert (bench.state.recent[padding] >= 0).all()
    bench.run(0, padding, padding)
    assert bench.found[0] == answer(bench.prompts[0], 5)


def test_a_window_behind_the_end_of_everything_is_harmless() -> None:
    """A sequence that has ended may step once more: nobody else's cache or state is touched, and nothing fails."""
    bench = Bench((3,), max_model_len=24)
    for _ in range(5):
        bench.run(0)
    assert int(bench.state.num_tokens[0]) == 24  # all positions of the model's length and its drafts are used up next
    others = [block for slot in (1, 2) for block in bench.state.blocks[slot].tolist() if block]
    cache = bench.cache.tensor("latent.0").clone()
    for _ in range(3):
        bench.run(0)
    assert torch.equal(bench.cache.tensor("latent.0")[others], cache[others])
    bench.run(1, 2)
    for slot in (1, 2):
        assert bench.found[slot] == answer(bench.prompts[slot], 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_for_drafts_travels_exactly(dtype: torch.dtype) -> None:
    final = torch.randn(1, 6).to(dtype)
    found = unpacked(packed(final), torch.empty(0, dtype=dtype))
    assert found.dtype == dtype and torch.equal(found, final)


def test_acceptance_is_a_mean_over_rows_and_counts_go_on() -> None:
    metrics = Metrics(role="decode", instance="d0")
    acceptance = Acceptance(metrics.engine)
    assert acceptance.mean() is None
    rows = [SlotOutput(slot=s, token_ids=tuple(range(n)), num_drafts=3) for s, n in enumerate((4, 1, 2))]
    acceptance.add(rows)
    assert acceptance.mean() == pytest.approx(7 / 3)
    acceptance.restart()
    assert acceptance.mean() is None
    text = metrics.render().decode()
    assert 'longcat_pd_draft_tokens_total{instance="d0",role="decode"} 9.0' in text
    assert 'longcat_pd_accepted_tokens_total{instance="d0",role="decode"} 4.0' in text
