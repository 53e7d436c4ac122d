"""engine/sampler.py: filters in order, draws by key alone, ties to the lowest id."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from longcat_pd import kernels
from longcat_pd.engine.plan import SlotSampling
from longcat_pd.engine.sampler import SamplingRows, logprobs, sample

OPS = kernels.load("cpu")
CPU = torch.device("cpu")


def rule(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 1, choice: int = 0) -> SlotSampling:
    return SlotSampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, choice=choice, num_logprobs=None)


def sampled(logits: torch.Tensor, rules: Sequence[SlotSampling], positions: Sequence[int]) -> list[int]:
    ids: list[int] = sample(logits, SamplingRows.of(rules, CPU), torch.tensor(positions), OPS).tolist()
    return ids


def draws(logits: list[float], how: SlotSampling, count: int = 400) -> list[int]:
    rows = torch.tensor(logits).repeat(count, 1)
    return sampled(rows, [how] * count, range(count))


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert sampled(logits, [rule(0.0), rule(0.0)], [4, 9]) == [1, 0]


def test_a_draw_depends_on_its_key_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 50, generator=generator)
    rules = [
        rule(seed=s, choice=c, top_p=0.9, top_k=k)
        for s, c, k in [(1, 0, 0), (1, 1, 5), (-3, 0, 9), (2**63 - 1, 2, 0), (0, 0, 1)]
    ]
    positions = [0, 7, 7, 100000, 3]
    together = sampled(logits, rules, positions)
    alone = [sampled(logits[i : i + 1], [rules[i]], [positions[i]])[0] for i in range(5)]
    assert together == alone


def test_every_part_of_the_key_reaches_the_draw() -> None:
    logits = torch.zeros(1, 10000)
    keys = [(1, 0, 5), (2, 0, 5), (1, 1, 5), (1, 0, 6), (0, 1, 5), (5, 0, 1)]
    assert len({sampled(logits, [rule(seed=s, choice=c)], [p])[0] for s, c, p in keys}) == len(keys)


def test_frequencies_follow_the_softmax() -> None:
    got = draws([math.log(0.5), math.log(0.3), math.log(0.2)], rule(), 4000)
    assert [got.count(i) / 4000 for i in range(3)] == pytest.approx([0.5, 0.3, 0.2], abs=0.03)


def test_temperature_sharpens() -> None:
    got = draws([0.0, 1.0], rule(temperature=0.1), 300)
    assert got.count(1) >= 299
    assert set(draws([0.0, 1.0], rule(temperature=1e-300), 50)) == {1}


def test_top_k_keeps_the_lower_ids_of_a_tie() -> None:
    assert set(draws([1.0, 2.0, 1.0, 1.0], rule(top_k=2))) == {0, 1}
    assert set(draws([1.0, 1.0, 1.0, 1.0], rule(top_k=3))) == {0, 1, 2}
    assert set(draws([1.0, 1.0, 1.0], rule(top_k=9))) == {0, 1, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = [math.log(p) for p in (0.1, 0.5, 0.25, 0.15)]
    assert set(draws(logits, rule(top_p=0.49))) == {1}
    assert set(draws(logits, rule(top_p=0.51))) == {1, 2}
    assert set(draws(logits, rule(top_p=0.8))) == {1, 2, 3}


def test_top_k_comes_before_top_p() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.3)]
    assert set(draws(logits, rule(top_k=2, top_p=0.5))) == {0}  # 0.4 of 0.7 reaches a half; of 1.0 it would not


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 9.0]])
    expected = logits.log_softmax(-1)
    first, second = logprobs(logits, [1, 0], 3)
    assert (first.token_id, second.token_id) == (1, 0)
    assert first.logprob == pytest.approx(float(expected[0, 1])) and second.logprob == pytest.approx(float(expected[1, 0]))
    assert [i for i, _ in first.top] == [1, 3, 2] and [i for i, _ in second.top] == [3, 0, 1]
    assert [p for _, p in first.top] == pytest.approx([float(expected[0, i]) for i in (1, 3, 2)])
    assert logprobs(logits, [1, 0], 0) == [replace(first, top=()), replace(second, top=())]
    assert len(logprobs(logits, [1, 0], 9)[0].top) == 4
