"""Rows about the decode step: what is asked for, in which order, and what becomes of the answers."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from longcat_pd.bench import steps
from longcat_pd.bench.client import cached_tokens
from longcat_pd.bench.orders import READY, Order, Runners, Setup, Took
from longcat_pd.bench.prefixes import check_cached
from longcat_pd.bench.runner import answers
from longcat_pd.bench.servers import BenchFailed
from longcat_pd.tiny.make import write_tiny


def took(step_ms: float, *, seconds: float = 1.0, num_steps: int = 10, tokens: int = 10) -> Took:
    return Took(step_s=step_ms / 1000, seconds=seconds, steps=num_steps, tokens=tokens)


class Asked:
    """Runners that only note what they are asked for."""

    def __init__(self) -> None:
        self.orders: list[Order] = []

    def take(self, order: Order) -> Took:
        self.orders.append(order)
        return took(len(self.orders))


def test_runners_take_turns_with_the_same_prompts_and_the_first_round_does_not_count() -> None:
    asked = Asked()
    blocks = steps.in_turn(cast(Runners, asked), ["a", "b"], batch=8, num_tokens=5)
    orders = [(order.name, order.seed) for order in asked.orders]
    assert orders == [(name, seed) for seed in range(1 + steps.ROUNDS) for name in ("a", "b")]
    assert {(order.batch, order.length, order.num_tokens) for order in asked.orders} == {(8, steps.LENGTH, 5)}
    assert [found.step_s * 1000 for found in blocks["b"]] == pytest.approx([4, 6, 8, 10, 12])


def test_a_compiled_step_is_compared_with_the_eager_one_of_as_many_drafts() -> None:
    blocks = {"eager 0": [took(7)], "inductor 0": [took(5)], "eager 3": [took(12)], "inductor 3": [took(6)]}
    row = steps.compiled_row("batch 1", blocks, drafts=3)
    assert (row.ours, row.other, row.ratio) == ("6.00 ms", "eager 12.0 ms", pytest.approx(0.5))
    assert steps.compiled_row("batch 1", blocks).ratio == pytest.approx(5 / 7)


def test_drafts_are_judged_by_tokens_for_time() -> None:
    blocks = {
        "eager 0": [took(10, seconds=2.0, num_steps=50, tokens=400)],
        "eager 3": [took(16, seconds=1.0, num_steps=16, tokens=410)],
    }
    row = steps.drafts_row("batch 8", blocks, mode="eager", batch=8)
    assert (row.ours, row.other, row.ratio) == ("410", "no drafts 200", pytest.approx(2.05))
    assert "3.20 tokens a step" in row.what


def test_int8_is_compared_with_the_data_type_of_the_rest() -> None:
    row = steps.int8_row("decode step", {"float": [took(40)], "int8": [took(20)]}, dtype="bfloat16")
    assert (row.ours, row.other, row.ratio) == ("20.0 ms", "bfloat16 40.0 ms", pytest.approx(0.5))


def test_orders_and_answers_survive_their_lines() -> None:
    order = Order(name="eager 0", batch=8, length=32, num_tokens=0, seed=3)
    assert Order.from_json(order.to_json()) == order
    assert Took.from_json(took(1.5).to_json()) == took(1.5)


def test_usage_is_found_at_the_end_of_a_stream() -> None:
    stream = b'{"usage": null}\n\ndata: {"usage": {"prompt_tokens_details": {"cached_tokens": 896}}}\n\ndata: [DONE]'
    assert cached_tokens(stream) == 896
    assert cached_tokens(b'"cached_tokens":7}') == 7
    with pytest.raises(AssertionError, match="without usage"):
        cached_tokens(b"data: [DONE]")


def test_a_prefix_that_was_not_shared_ends_the_bench() -> None:
    check_cached(896, 896)
    with pytest.raises(BenchFailed, match="0 tokens of a prompt came from the cache of prefixes, not 896"):
        check_cached(0, 896)


def test_runners_decode_what_is_ordered(tmp_path: Path) -> None:
    write_tiny(tmp_path / "m", "2.0+predictable", dtype="float32", with_tokenizer=False)
    names = {"eager 0": 0, "eager 3": 3}
    setups = [
        Setup(name=name, model=str(tmp_path / "m"), settings=(*steps.ENGINE, f"engine.num_draft_tokens={drafts}"))
        for name, drafts in names.items()
    ]
    orders = [Order(name=name, batch=2, length=20, num_tokens=12, seed=1) for name in names for _ in range(2)]
    orders.append(Order(name="eager 3", batch=1, length=100, num_tokens=0, seed=1))
    ready, *found = answers(setups, iter([order.to_json() for order in orders]))
    assert ready == READY
    plain, again, drafted, _, chunk = (Took.from_json(line) for line in found)
    assert (plain.steps, plain.tokens) == (again.steps, again.tokens) == (12, 24)
    assert 24 <= drafted.tokens < 24 + 8
    assert drafted.steps < 12
    assert plain.seconds >= plain.step_s > 0
    assert (chunk.steps, chunk.tokens) == (1, 1)
