"""Candidates and the choice of positions by the NPU's table, against the reference's."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from longcat_pd.kernels import NpuSettings, load
from longcat_pd.kernels.npu import indexer
from longcat_pd.kernels.npu.limits import check_indexer
from longcat_pd.kernels.reference import table as reference_table
from longcat_pd.kernels.refusal import Unsupported
from tests.npu import device
from tests.npu.kernels import indexer as kernel
from tests.npu.paged import BLOCK, Paged, noise, paged

device.install()
OPS, REFERENCE = load("npu", npu=NpuSettings(dtype=torch.float32)), reference_table()
HEADS, LOW, BUDGET, LOCAL = 8, 4, 20, 6
PLACES = [(1, 0), (2, 0), (2, 1), (3, 2)]
Picked = tuple[Tensor, Tensor]


def ordered(found: Picked) -> Picked:
    """By position."""
    scores, positions = found
    positions, order = positions.sort(-1)
    return scores.gather(-1, order), positions


def alike(got: Picked, expected: Picked, close: float = 1e-4) -> None:
    (scores, positions), (wanted_scores, wanted) = ordered(got), ordered(expected)
    assert torch.equal(positions, wanted)
    torch.testing.assert_close(scores, wanted_scores, rtol=close, atol=close)


def case(
    at: Paged, dtype: torch.dtype = torch.float32, *, whole: bool = False
) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """``whole``: small whole numbers, so that many scores are equal, to the bit and in any type."""
    lead = at.positions.shape
    q, weights = noise(*lead, HEADS, 128, seed=1, dtype=dtype), noise(*lead, HEADS, seed=2)
    cache = noise(at.num_blocks, BLOCK, 128, seed=3, dtype=dtype)
    if whole:
        q, weights, cache = q.round() * (q > 1.5), weights.round(), cache.round() * (cache.abs() > 1.5)
    where = {"cache": cache, "block_tables": at.tables, "block_starts": at.starts, "high": at.positions + 1 - LOCAL}
    return (q, weights), where | {"limits": (LOW, BUDGET)}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("ranks", "rank"), PLACES)
@pytest.mark.parametrize("rows_each", [1, 3])
def test_candidates(whole: bool, ranks: int, rank: int, rows_each: int) -> None:
    """Rows with more keys than the budget, with fewer, and with none below the local window."""
    at = paged([150, 24, 5, 33], rows_each, ranks=ranks, rank=rank, seed=rank)
    rows, where = case(at, whole=whole)
    alike(OPS.index_candidates(*rows, **where), REFERENCE.index_candidates(*rows, **where))


def test_candidates_in_16_bits() -> None:
    at = paged([150, 24, 5, 33], 2)
    rows, where = case(at, torch.bfloat16)
    alike(OPS.index_candidates(*rows, **where), REFERENCE.index_candidates(*rows, **where), close=1e-4)


def test_equal_scores_go_to_smaller_positions() -> None:
    at = paged([150], 1)
    rows, where = case(at)
    rows[1].zero_()
    scores, positions = ordered(OPS.index_candidates(*rows, **where))
    assert positions[0, 0].tolist() == list(range(LOW, LOW + BUDGET))
    assert not scores[0].any()


def test_calls_are_cut_where_keys_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    at = paged([150, 24, 5, 33], 3)
    rows, where = case(at)
    whole = OPS.index_candidates(*rows, **where)
    monkeypatch.setattr(indexer, "_MOST_ELEMENTS", 24 * 128 * 4)
    cut = OPS.index_candidates(*rows, **where)
    alike(cut, whole)


@pytest.fixture
def patched() -> Iterator[None]:
    """An operator package whose indexer tells scores of keys in pages."""
    library = torch.library.Library("custom", "FRAGMENT")
    library.define(str(torch.ops.npu.npu_lightning_indexer.default._schema).removeprefix("npu::"))
    operator = torch.ops.custom.npu_lightning_indexer.default

    def with_values(query: Tensor, key: Tensor, weights: Tensor, return_value: bool, **options: Any) -> Picked:
        assert return_value
        found, values = kernel._best(kernel.Limits("custom"), query, key, weights, **options)
        return found, values.to(query.dtype)

    library.impl(operator.name(), device.by_keyword(operator._schema, with_values), "CPU")
    yield
    library._destroy()


def test_a_patched_operator_spares_the_second_computation(patched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    at = paged([150, 24, 5, 33], 2)
    rows, where = case(at)
    monkeypatch.delattr(indexer, "_scores")
    ops = load("npu", npu=NpuSettings(dtype=torch.float32))
    alike(ops.index_candidates(*rows, **where), REFERENCE.index_candidates(*rows, **where))


@pytest.mark.parametrize("width", [5, 20, 64])
@pytest.mark.parametrize("seed", range(3))
def test_the_choice(width: int, seed: int) -> None:
    """Few different scores, both zeros, infinities and padding among them; positions in no order."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randint(-2, 3, (6, width), generator=draw).float()
    scores[:, ::3] *= -1.0  # -0.0
    scores[0] = noise(width, seed=seed) * 1e-3
    positions = torch.stack([torch.randperm(1 << 20, generator=draw)[:width] for _ in range(6)])
    positions[1, ::2] = -1
    scores[1, ::2] = -torch.inf
    positions[2] += (1 << 24) - (1 << 20) - 1
    high = torch.tensor([1 << 31, 1 << 31, 1 << 31, 0, 1 << 19, 1 << 19])
    got = OPS.select_positions(scores, positions, low=9, high=high, budget=20)
    alike(got, REFERENCE.select_positions(scores, positions, low=9, high=high, budget=20), close=0)


@pytest.mark.parametrize(
    ("heads", "width", "init", "budget", "told"),
    [(65, 128, 16, 1008, "65"), (32, 64, 16, 1008, "64"), (32, 128, 16, 9000, "9016")],
)
def test_limits_are_told_at_start(heads: int, width: int, init: int, budget: int, told: str) -> None:
    with pytest.raises(Unsupported, match=told):
        check_indexer(heads=heads, width=width, init=init, budget=budget)
    check_indexer(heads=32, width=128, init=16, budget=1008)


@pytest.mark.parametrize(("budget", "count"), [(2044, 2048), (2045, 3072), (5000, 5120)])
def test_the_operator_is_asked_for_a_number_that_it_takes(budget: int, count: int) -> None:
    assert indexer._count(LOW + budget) == count
