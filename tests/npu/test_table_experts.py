"""The choice of experts and grouped products of the NPU table against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longcat_pd.kernels.npu.experts import check_experts
from longcat_pd.kernels.refusal import Unsupported
from tests.npu.expert_rig import EXPERTS, HIDDEN, REFERENCE, TOPK, Experts, close, drawn_ids, npu_ops, randn

TYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize("is_normalized", [False, True])
def test_routing(rows: int, is_normalized: bool) -> None:
    logits, bias = randn(rows, 24), 0.1 * randn(24, seed=1)
    given = {"topk": 5, "factor": 2.5, "is_normalized": is_normalized}
    ids, weights = npu_ops().route_topk(logits, bias, **given)
    wanted_ids, wanted = REFERENCE.route_topk(logits, bias, **given)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    by_id = [ids_.sort(-1) for ids_ in (ids.long(), wanted_ids)]
    assert torch.equal(by_id[0].values, by_id[1].values)
    close(weights.gather(-1, by_id[0].indices), wanted.gather(-1, by_id[1].indices))


def sorted_rows(counts: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of all experts, with garbage behind them."""
    x = randn(sum(counts) + 3, HIDDEN, dtype=dtype)
    x[sum(counts) :] = torch.nan
    return x, torch.tensor(counts)


COUNTS = [[2, 0, 3, 1], [0, 0, 0, 0], [0, 7, 0, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("is_int8", [False, True])
def test_rows_by_expert(dtype: torch.dtype, counts: list[int], is_int8: bool) -> None:
    experts, ops = Experts.drawn(is_int8=is_int8, dtype=dtype), npu_ops(dtype)
    x, numbers = sorted_rows(counts, dtype)
    got = ops.expert_rows(x, numbers, row_scale=None, **experts.prepared(ops))
    wanted = REFERENCE.expert_rows(x.float(), numbers, row_scale=None, **as_floats(experts))
    assert got.dtype == dtype and got.shape == x.shape
    close(got[: sum(counts)], wanted[: sum(counts)], dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_that_came_quantised(dtype: torch.dtype) -> None:
    """The model's type is that of the table: int8 rows do not show it."""
    experts, ops, counts = Experts.drawn(is_int8=True), npu_ops(dtype), COUNTS[0]
    x, numbers = sorted_rows(counts, dtype)
    scale = x.float().abs().amax(-1) / 127
    quantised = (x.float() / scale.unsqueeze(1)).round().to(torch.int8)
    got = ops.expert_rows(quantised, numbers, row_scale=scale, **experts.prepared(ops))
    assert got.dtype == dtype
    total = sum(counts)
    close(got[:total], REFERENCE.expert_rows(x.float(), numbers, row_scale=None, **experts.given)[:total], dtype)


IDS = {
    "mixed": drawn_ids(9, among=EXPERTS + 3),
    "nobody's": drawn_ids(6, among=5) + EXPERTS,
    "one expert": torch.tensor([[2, EXPERTS, EXPERTS + 1]] * 5),
    "below zero": torch.where(drawn_ids(7, among=EXPERTS + 3) > 4, -1, drawn_ids(7, among=EXPERTS + 3)),
    "every number of another rank": torch.full((4, TOPK), EXPERTS),
    "one row": drawn_ids(1, among=EXPERTS),
    "no row": drawn_ids(0, among=EXPERTS),
    "one choice": drawn_ids(6, among=EXPERTS, topk=1),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", IDS)
@pytest.mark.parametrize("is_int8", [False, True])
def test_grouped_experts(dtype: torch.dtype, case: str, is_int8: bool) -> None:
    experts, ops, ids = Experts.drawn(is_int8=is_int8, dtype=dtype), npu_ops(dtype), IDS[case]
    x, weights = randn(len(ids), HIDDEN, dtype=dtype), torch.rand(ids.shape, generator=torch.Generator().manual_seed(1))
    wanted_ids = torch.where(ids < 0, EXPERTS, ids)
    wanted = REFERENCE.grouped_experts(x.float(), wanted_ids, weights=weights, **as_floats(experts))
    for given in (ids, ids.int()):
        got = ops.grouped_experts(x, given, weights=weights, **experts.prepared(ops))
        assert got.dtype == torch.float32
        close(got, wanted, dtype)


def test_sums_over_experts_are_not_rounded_to_the_models_type() -> None:
    """What ranks add up afterwards has more bits than each expert's result."""
    experts, ops, ids = Experts.drawn(dtype=torch.bfloat16), npu_ops(torch.bfloat16), IDS["mixed"]
    x, weights = randn(len(ids), HIDDEN, dtype=torch.bfloat16), randn(*ids.shape, seed=1).abs()
    got = ops.grouped_experts(x, ids, weights=weights, **experts.prepared(ops))
    assert (got != got.bfloat16().float()).float().mean() > 0.9


def test_sizes_beyond_the_limits_are_refused() -> None:
    check_experts(num_choices=896, topk=12, inner_width=2048, is_int8=True)
    check_experts(num_choices=896, topk=12, inner_width=100, is_int8=False)
    with pytest.raises(Unsupported, match=r"12 of 2049.*2048"):
        check_experts(num_choices=2049, topk=12, inner_width=2048, is_int8=False)
    with pytest.raises(Unsupported, match=r"96 wide inside.*multiples of 64 up to 10496"):
        check_experts(num_choices=896, topk=12, inner_width=96, is_int8=True)
    with pytest.raises(Unsupported, match="10560 wide"):
        check_experts(num_choices=896, topk=12, inner_width=10560, is_int8=True)


def test_weights_that_were_not_prepared_are_our_own_mistake() -> None:
    ops, x, counts = npu_ops(torch.bfloat16), randn(3, HIDDEN, dtype=torch.bfloat16), torch.tensor([1, 1, 1, 0])
    unturned = Experts.drawn(is_int8=True).given["gate_up"]
    with pytest.raises(AssertionError, match=r"rows of 1024 and experts \(4, 128, 1024\)"):
        ops.expert_rows(x, counts, row_scale=None, **Experts.drawn(is_int8=True).prepared(ops) | {"gate_up": unturned})
    unscaled = Experts.drawn(is_int8=True).prepared(ops) | {"down_scale": torch.ones(EXPERTS, HIDDEN)}
    with pytest.raises(AssertionError, match="not prepared"):
        ops.expert_rows(x, counts, row_scale=None, **unscaled)
    with pytest.raises(AssertionError, match=r"torch\.int32 counts"):
        ops.expert_rows(x, counts.int(), row_scale=None, **Experts.drawn(dtype=torch.bfloat16).prepared(ops))


def as_floats(experts: Experts) -> dict[str, Tensor]:
    """What the reference takes with rows in fp32."""
    return {name: part if part.dtype == torch.int8 else part.float() for name, part in experts.given.items()}
