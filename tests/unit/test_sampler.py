"""engine/sampler.py: filters in order, draws by key alone, ties to the lowest id."""

import math

import numpy as np
import pytest
import torch

from longcat_pd.engine import sampler
from longcat_pd.engine.plan import SlotSampling
from longcat_pd.engine.sampler import keyed_uniform, sample


def rule(
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 1,
    choice: int = 0,
    num_logprobs: int | None = None,
) -> SlotSampling:
    return SlotSampling(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, choice=choice, num_logprobs=num_logprobs
    )


def draws(logits: list[float], how: SlotSampling, count: int = 400) -> list[int]:
    rows = torch.tensor(logits).repeat(count, 1)
    return [token.token_id for token in sample(rows, [how] * count, list(range(count)))]


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert [t.token_id for t in sample(logits, [rule(0.0), rule(0.0)], [4, 9])] == [1, 0]


def test_a_draw_depends_on_its_key_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 50, generator=generator)
    rules = [
        rule(seed=s, choice=c, top_p=0.9, top_k=k)
        for s, c, k in [(1, 0, 0), (1, 1, 5), (-3, 0, 9), (2**63 - 1, 2, 0), (0, 0, 1)]
    ]
    positions = [0, 7, 7, 100000, 3]
    together = sample(logits, rules, positions)
    alone = [sample(logits[i : i + 1], [rules[i]], [positions[i]])[0] for i in range(5)]
    assert together == alone
    order = [3, 0, 4, 2, 1]
    assert sample(logits[order], [rules[i] for i in order], [positions[i] for i in order]) == [together[i] for i in order]


def test_keys_differ_in_every_part() -> None:
    keys = [(seed, choice, position) for seed in (-1, 0, 1) for choice in (0, 1) for position in range(200)]
    values = keyed_uniform([rule(seed=s, choice=c) for s, c, _ in keys], [p for _, _, p in keys])
    assert len(set(values.tolist())) == len(keys)
    assert values.min() >= 0.0 and values.max() < 1.0
    counts, _ = np.histogram(values, bins=8, range=(0.0, 1.0))
    assert counts.min() > 0.7 * len(keys) / 8 and counts.max() < 1.3 * len(keys) / 8


def test_the_key_hash_never_changes() -> None:
    """A seeded text must be the same after an update: these numbers are part of the contract."""
    values = keyed_uniform([rule(seed=0), rule(seed=-5, choice=3)], [0, 123456])
    assert values.tolist() == [0.13870941014555427, 0.9411003284026059]


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
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]])
    expected = logits[0].log_softmax(-1)
    got = sample(logits, [rule(temperature=0.3, top_k=1, num_logprobs=3)], [0])[0]
    assert got.token_id == 1
    assert got.logprob == pytest.approx(float(expected[1]))
    assert [i for i, _ in got.top] == [1, 3, 2]
    assert [p for _, p in got.top] == pytest.approx([float(expected[i]) for i in (1, 3, 2)])
    none, zero = sample(logits.repeat(2, 1), [rule(0.0), rule(0.0, num_logprobs=0)], [0, 0])
    assert none.logprob is None and none.top == ()
    assert zero.logprob is not None and zero.top == ()


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.24, 1), (0.26, 3), (1.0 - 2.0**-53, 3)])
def test_the_ends_of_the_range_never_meet_an_id_without_probability(
    monkeypatch: pytest.MonkeyPatch, uniform: float, token: int
) -> None:
    monkeypatch.setattr(sampler, "keyed_uniform", lambda rules, positions: np.array([uniform]))
    logits = torch.tensor([[-torch.inf, math.log(0.25), -torch.inf, math.log(0.75), -torch.inf]])
    assert sample(logits, [rule()], [0])[0].token_id == token
