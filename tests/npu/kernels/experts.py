"""CPU kernels: products of many experts at once, in the form that the mixture of experts uses.

Rows are sorted by expert; rows beyond those of the last group are undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.npu.kernels.limits import FLOATS, Limits, runs, undefined
from tests.npu.kernels.quant import integer_product, quantised, swiglu

MAX_GROUPS = 1024
MAX_DIM = 65535
SCALES_OF = {  # what the scales of int8 weights may be, for each type of the result
    torch.bfloat16: (torch.bfloat16,),
    torch.float16: (torch.float32,),
    torch.float32: (torch.float32, torch.bfloat16),
}


def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    scale: Sequence[Tensor] | None = None,
    offset: Sequence[Tensor] | None = None,
    antiquant_scale: Sequence[Tensor] | None = None,
    antiquant_offset: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    group_list: Tensor | None = None,
    activation_input: Sequence[Tensor] | None = None,
    activation_quant_scale: Sequence[Tensor] | None = None,
    activation_quant_offset: Sequence[Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    output_dtype: Any = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[Tensor]:
    """``x`` [[T, K]] and ``weight`` [[E, K, N]] -> [[T, N]]: floats, or int8 as raw sums or with its scales."""
    limits = Limits("npu_grouped_matmul")
    limits.absent(bias=bias, offset=offset, antiquant_scale=antiquant_scale, antiquant_offset=antiquant_offset)
    limits.absent(activation_input=activation_input, activation_quant_scale=activation_quant_scale)
    limits.absent(activation_quant_offset=activation_quant_offset, x_dtype=x_dtype, weight_dtype=weight_dtype)
    limits.absent(scale_dtype=scale_dtype, per_token_scale_dtype=per_token_scale_dtype)
    limits.one_of("split_item", split_item, 2, 3)
    limits.one_of("group_type", group_type, 0)
    limits.one_of("act_type", act_type, 0)
    if tuning_config is not None:
        expected = list(tuning_config)
        limits.require(
            len(expected) >= 1 and expected[0] >= 0, f"tuning_config is {expected}, it should be [rows per expert]"
        )
    rows, matrices = limits.single("x", x), limits.single("weight", weight)
    counts = _checked_groups(limits, rows, matrices, group_list, group_list_type)
    if rows.dtype in FLOATS:
        limits.dtype("weight", matrices, rows.dtype)
        limits.absent(**{"scale of a float x": scale, "per_token_scale of a float x": per_token_scale})
        if output_dtype is not None:
            limits.output("output_dtype", output_dtype, rows.dtype)
        out = undefined(len(rows), matrices.shape[2], dtype=rows.dtype)
        for expert, run in runs(counts):
            out[run] = (rows[run].float() @ matrices[expert].float()).to(rows.dtype)
        return [out]
    limits.dtype("x", rows, torch.int8, *FLOATS)
    limits.dtype("weight", matrices, torch.int8)
    limits.contiguous("weight", matrices)
    return [_int8_products(limits, rows, matrices, counts, scale, per_token_scale, output_dtype)]


def _int8_products(
    limits: Limits,
    rows: Tensor,
    matrices: Tensor,
    counts: Sequence[int],
    scale: Sequence[Tensor] | None,
    per_token_scale: Sequence[Tensor] | None,
    output_dtype: Any,
) -> Tensor:
    dtype = limits.output("output_dtype", output_dtype, torch.int32, *FLOATS)
    experts, _, columns = matrices.shape
    out = undefined(len(rows), columns, dtype=dtype)
    if dtype == torch.int32:
        limits.absent(**{"scale of an int32 result": scale, "per_token_scale of an int32 result": per_token_scale})
        for expert, run in runs(counts):
            out[run] = integer_product(rows[run], matrices[expert])
        return out
    limits.require(scale is not None, f"scale is not given, which a result of {dtype} needs")
    scales = limits.single("scale", scale)
    limits.dtype("scale", scales, *SCALES_OF[dtype])
    limits.shape("scale", scales, experts, columns)
    tokens = None
    if per_token_scale is not None:
        tokens = limits.single("per_token_scale", per_token_scale)
        limits.dtype("per_token_scale", tokens, torch.float32)
        limits.shape("per_token_scale", tokens, len(rows))
    for expert, run in runs(counts):
        product = integer_product(rows[run], matrices[expert]).float() * scales[expert].float()
        out[run] = (product if tokens is None else product * tokens[run].unsqueeze(1)).to(dtype)
    return out


def npu_grouped_matmul_swiglu_quant_v2(
    x: Tensor,
    weight: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    *,
    smooth_scale: Tensor | None = None,
    weight_assist_matrix: Sequence[Tensor] | None = None,
    bias: Tensor | None = None,
    dequant_mode: int | None = 0,
    dequant_dtype: Any = 6,
    quant_mode: int | None = 0,
    quant_dtype: Any = 1,
    group_list_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    weight_scale_dtype: int | None = None,
    x_scale_dtype: int | None = None,
) -> tuple[Tensor, Tensor]:
    """int8 product, scales of both sides, swiglu whose silu is on the left, quantised again; one scale a row and column."""
    limits = Limits("npu_grouped_matmul_swiglu_quant_v2")
    limits.absent(smooth_scale=smooth_scale, weight_assist_matrix=weight_assist_matrix, bias=bias, x_dtype=x_dtype)
    limits.absent(weight_dtype=weight_dtype, weight_scale_dtype=weight_scale_dtype, x_scale_dtype=x_scale_dtype)
    limits.one_of("dequant_mode", dequant_mode, 0)
    limits.one_of("quant_mode", quant_mode, 0)
    limits.output("dequant_dtype", dequant_dtype, torch.float32)
    limits.output("quant_dtype", quant_dtype, torch.int8)
    matrices, scales = limits.single("weight", weight), limits.single("weight_scale", weight_scale)
    limits.dtype("x", x, torch.int8)
    limits.dtype("weight", matrices, torch.int8)
    limits.contiguous("weight", matrices)
    counts = _checked_groups(limits, x, matrices, group_list, group_list_type)
    experts, _, both = matrices.shape
    limits.require(both % 2 == 0, f"weight has an odd width, N = {both}")
    limits.dtype("weight_scale", scales, torch.float32, torch.bfloat16)
    limits.shape("weight_scale", scales, experts, both)
    limits.dtype("x_scale", x_scale, torch.float32)
    limits.shape("x_scale", x_scale, len(x))
    q, out_scale = undefined(len(x), both // 2, dtype=torch.int8), undefined(len(x), dtype=torch.float32)
    for expert, run in runs(counts):
        product = integer_product(x[run], matrices[expert]).float() * scales[expert].float() * x_scale[run].unsqueeze(1)
        q[run], out_scale[run] = quantised(swiglu(product, -1))
    return q, out_scale


def _checked_groups(
    limits: Limits, x: Tensor, weight: Tensor, group_list: Tensor | None, group_list_type: int | None
) -> list[int]:
    """Rows of each expert."""
    limits.shape("x", x, None, None)
    limits.shape("weight", weight, None, None, None)
    experts, inner, columns = weight.shape
    limits.require(x.shape[1] == inner, f"x has K = {x.shape[1]}, weight has K = {inner}")
    limits.within("groups of weight", experts, 1, MAX_GROUPS)
    limits.within("K of weight", inner, 1, MAX_DIM)
    limits.within("N of weight", columns, 1, MAX_DIM)
    limits.require(isinstance(group_list, Tensor), f"group_list is a {type(group_list).__name__}, it should be a tensor")
    assert isinstance(group_list, Tensor)
    limits.dtype("group_list", group_list, torch.int64)
    limits.shape("group_list", group_list, experts)
    limits.one_of("group_list_type", group_list_type, 0, 1)
    return limits.groups("group_list", group_list, is_sums=group_list_type == 0, rows=len(x))


KERNELS: dict[str, Callable[..., Any]] = {
    "npu_grouped_matmul": npu_grouped_matmul,
    "npu_grouped_matmul_swiglu_quant_v2": npu_grouped_matmul_swiglu_quant_v2,
}
