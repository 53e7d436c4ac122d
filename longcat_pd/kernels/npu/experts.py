"""The choice of experts, and grouped products of rows that are sorted by expert.

Between the two products of an expert nothing is rounded to the model's type in int8. Rows behind the sum of counts are
garbage from one operator to the next: nothing that is used is computed from them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longcat_pd.kernels.expert_ops import ExpertRows, GroupedExperts
from longcat_pd.kernels.npu.int8 import quantise
from longcat_pd.kernels.npu.norms import swiglu
from longcat_pd.kernels.refusal import Unsupported

OPERATORS = (
    "npu_moe_gating_top_k",
    "npu_moe_init_routing_v2",
    "npu_moe_finalize_routing",
    "npu_grouped_matmul",
    "npu_dequant_swiglu_quant",
)
MAX_CHOICES = 2048
MAX_INNER_INT8, INNER_UNIT_INT8 = 10496, 64
_ID_END = 10240  # above every id


def check_experts(*, num_choices: int, topk: int, inner_width: int, is_int8: bool) -> None:
    """``num_choices``: experts with and without weights; ``inner_width``: what a rank has of an expert's.

    Raises:
        Unsupported: the checkpoint's sizes are beyond what operators take.
    """
    if not topk <= num_choices <= MAX_CHOICES:
        text = f"device=npu: {topk} of {num_choices} experts are chosen; the operator chooses among at most {MAX_CHOICES}"
        raise Unsupported(text, param="model.path")
    if is_int8 and (inner_width % INNER_UNIT_INT8 or inner_width > MAX_INNER_INT8):
        text = f"device=npu: int8 experts are {inner_width} wide inside; the operator takes multiples of {INNER_UNIT_INT8}"
        raise Unsupported(f"{text} up to {MAX_INNER_INT8}", param="model.path")


def route_topk(logits: Tensor, bias: Tensor, *, topk: int, factor: float, is_normalized: bool) -> tuple[Tensor, Tensor]:
    """See ``ops.RouteTopk``; ids are int32. Normalised weights are not of the operator, which does not know them so."""
    assert logits.dtype == bias.dtype == torch.float32, f"{logits.dtype} and a bias in {bias.dtype}"
    assert topk <= logits.shape[1] <= MAX_CHOICES, f"{topk} of {logits.shape[1]}"
    weights, expert_ids, _ = torch.ops.npu.npu_moe_gating_top_k(
        logits,
        k=topk,
        bias=bias,
        k_group=1,
        group_count=1,
        group_select_mode=0,
        renorm=0,
        norm_type=0,
        out_flag=False,
        routed_scaling_factor=1.0 if is_normalized else factor,
    )
    if is_normalized:
        weights = weights / weights.sum(-1, keepdim=True) * factor
    return expert_ids, weights


class _Matrices(NamedTuple):
    """Of all experts of this rank, [E, in, out]; int8 if they come with scales."""

    gate_up: Tensor
    down: Tensor
    gate_up_scale: Tensor | None
    down_scale: Tensor | None

    @property
    def is_int8(self) -> bool:
        assert (self.gate_up_scale is None) == (self.down_scale is None), "one product in int8 and one in floats"
        return self.gate_up_scale is not None


def rows_in(dtype: torch.dtype) -> ExpertRows:
    """See ``ops.ExpertRows``; ``dtype``: the model's, which int8 rows do not show."""

    def expert_rows(
        x: Tensor,
        counts: Tensor,
        *,
        row_scale: Tensor | None,
        gate_up: Tensor,
        down: Tensor,
        gate_up_scale: Tensor | None = None,
        down_scale: Tensor | None = None,
    ) -> Tensor:
        matrices = _Matrices(gate_up, down, gate_up_scale, down_scale)
        if not matrices.is_int8:
            assert row_scale is None, "int8 rows for experts in floats"
            return _grouped(swiglu(_grouped(x, gate_up, counts)), down, counts)
        if row_scale is None:
            x, row_scale = quantise(x)
        return _rows_int8(x, row_scale, counts, matrices=matrices, dtype=dtype)

    return expert_rows


def experts_in(dtype: torch.dtype) -> GroupedExperts:
    """See ``ops.GroupedExperts``; ``dtype``: the model's."""
    expert_rows = rows_in(dtype)

    def grouped_experts(
        x: Tensor,
        expert_ids: Tensor,
        *,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_scale: Tensor | None = None,
        down_scale: Tensor | None = None,
    ) -> Tensor:
        """A negative id becomes one that nobody has. int8: a row is quantised once, before it goes to its experts.

        Sums are made in fp32, for which the results of experts are widened: their operator would round weights and sums
        to the type of its rows.
        """
        if len(x) == 0:
            return torch.zeros_like(x, dtype=torch.float32)
        rows, row_scale = (x, None) if gate_up_scale is None else quantise(x)
        by_expert, scales, places, counts = _sorted(rows, row_scale, expert_ids, num_experts=len(gate_up))
        results = expert_rows(
            by_expert,
            counts,
            row_scale=scales,
            gate_up=gate_up,
            down=down,
            gate_up_scale=gate_up_scale,
            down_scale=down_scale,
        )
        sums: Tensor = torch.ops.npu.npu_moe_finalize_routing(
            results.float().unsqueeze(1), None, None, None, weights, places, None, drop_pad_mode=3
        )
        return sums

    return grouped_experts


def _sorted(
    x: Tensor, row_scale: Tensor | None, expert_ids: Tensor, *, num_experts: int
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Rows [T topk, hidden] by expert and their scales; places of all choices there, -1 for others' experts; counts."""
    by_expert, places, counts, scales = torch.ops.npu.npu_moe_init_routing_v2(
        x,
        expert_ids.int().remainder(_ID_END),
        scale=row_scale,
        active_num=expert_ids.numel(),
        expert_capacity=-1,
        expert_num=num_experts,
        drop_pad_mode=0,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=-1,
        active_expert_range=[0, num_experts],
        row_idx_type=0,
    )
    return by_expert, None if row_scale is None else scales, places, counts


def _rows_int8(x: Tensor, row_scale: Tensor, counts: Tensor, *, matrices: _Matrices, dtype: torch.dtype) -> Tensor:
    """int8 rows with one fp32 scale each -> [A, hidden] in ``dtype``."""
    inner_width = matrices.gate_up.shape[2] // 2
    check_experts(num_choices=1, topk=1, inner_width=inner_width, is_int8=True)
    down_scale = matrices.down_scale
    assert down_scale is not None and (down_scale.dtype == torch.bfloat16) == (dtype == torch.bfloat16), "not prepared"
    inner, inner_scale = torch.ops.npu.npu_dequant_swiglu_quant(
        _grouped(x, matrices.gate_up, counts, into=torch.int32),
        weight_scale=matrices.gate_up_scale,
        activation_scale=row_scale.unsqueeze(1),
        bias=None,
        quant_scale=None,
        quant_offset=None,
        group_index=counts,
        activate_left=True,
        quant_mode=1,
    )
    return _grouped(inner, matrices.down, counts, into=dtype, scales=(down_scale, inner_scale))


def _grouped(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    *,
    into: torch.dtype | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """``x`` [A, in] by runs of ``counts``, times ``weight`` [E, in, out]. ``scales``: of outputs and of rows."""
    assert x.shape[1] == weight.shape[1], f"rows of {x.shape[1]} and experts {tuple(weight.shape)}, [E, in, out]"
    assert counts.dtype == torch.int64 and len(counts) == len(weight), f"{counts.dtype} counts of {len(counts)} experts"
    product: Tensor = torch.ops.npu.npu_grouped_matmul(
        [x],
        [weight],
        scale=None if scales is None else [scales[0]],
        per_token_scale=None if scales is None else [scales[1]],
        group_list=counts,
        split_item=3,
        group_type=0,
        group_list_type=1,
        act_type=0,
        output_dtype=into,
    )[0]
    return product
