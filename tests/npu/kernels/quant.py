"""CPU kernels: activation, quantisation and int8 products.

Order of operations: int32 sums are exact; they become fp32, are multiplied by one scale after the other, and are rounded
once to the output's type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.npu.kernels.limits import FLOATS, Limits, runs, undefined

LEVELS = 127
MAX_DIM = 65535
MAX_GROUPS = 1024
MAX_GROUPED_WIDTH = 10496


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """silu of the first half times the second."""
    limits = Limits("npu_swiglu")
    limits.dtype("input", input, *FLOATS)
    limits.require(-input.dim() <= dim < input.dim(), f"dim is {dim} for an input of {input.dim()} dimensions")
    limits.require(input.shape[dim] % 2 == 0, f"input has an odd number of elements, {input.shape[dim]}, along dim {dim}")
    return swiglu(input.float(), dim).to(input.dtype)


def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: Any = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """One scale a row; ``group_index`` are running sums, and rows beyond the last are undefined."""
    limits = Limits("npu_dynamic_quant")
    limits.dtype("input", input, *FLOATS)
    limits.require(input.dim() >= 2, f"input has {input.dim()} dimensions, at least 2 are needed")
    limits.one_of("quant_mode", quant_mode, "pertoken")
    limits.one_of("dst_type_max", dst_type_max, 0.0)
    if dst_type is not None:
        limits.output("dst_type", dst_type, torch.int8)
    width = input.shape[-1]
    if smooth_scales is None:
        limits.absent(**{"group_index without smooth_scales": group_index})
        return quantised(input.float())
    limits.dtype("smooth_scales", smooth_scales, input.dtype)
    if group_index is None:
        limits.shape("smooth_scales", smooth_scales, width)
        return quantised(input.float() * smooth_scales.float())
    limits.dtype("group_index", group_index, torch.int32)
    limits.shape("group_index", group_index, None)
    limits.within("groups of group_index", len(group_index), 1, MAX_GROUPS)
    limits.shape("smooth_scales", smooth_scales, len(group_index), width)
    rows = input.float().flatten(0, -2)
    counts = limits.groups("group_index", group_index, is_sums=True, rows=len(rows))
    q, scale = undefined(*rows.shape, dtype=torch.int8), undefined(len(rows), dtype=torch.float32)
    for group, run in runs(counts):
        q[run], scale[run] = quantised(rows[run] * smooth_scales[group].float())
    return q.view(input.shape), scale.view(input.shape[:-1])


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: Any = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: Sequence[int] | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    """int8 times int8: the raw sums as int32, or sums times ``scale`` times ``pertoken_scale``, plus bias, as floats."""
    limits = Limits("npu_quant_matmul")
    limits.absent(offset=offset, group_sizes=group_sizes, y_scale=y_scale, x1_dtype=x1_dtype, x2_dtype=x2_dtype)
    limits.absent(pertoken_scale_dtype=pertoken_scale_dtype, scale_dtype=scale_dtype)
    limits.dtype("x1", x1, torch.int8)
    limits.dtype("x2", x2, torch.int8)
    limits.require(2 <= x1.dim() <= 6, f"x1 has {x1.dim()} dimensions, allowed are 2 to 6")
    limits.shape("x2", x2, None, None)
    limits.contiguous("x2", x2)
    (inner, columns), rows = x2.shape, x1.shape[:-1].numel()
    limits.require(x1.shape[-1] == inner, f"x1 has K = {x1.shape[-1]}, x2 has K = {inner}")
    limits.within("last dimension of x1", inner, 1, MAX_DIM)
    limits.within("last dimension of x2", columns, 1, MAX_DIM)
    out = limits.output("output_dtype", output_dtype, torch.int32, *FLOATS)
    _check_scales(limits, out, scale, columns, pertoken_scale, rows)
    sums = integer_product(x1.flatten(0, -2), x2)
    if bias is not None:
        float_bias = (
            () if out == torch.int32 else (torch.float32,) if out != torch.bfloat16 else (torch.bfloat16, torch.float32)
        )
        limits.dtype("bias", bias, torch.int32, *((torch.float16,) if out == torch.float16 else float_bias))
        limits.shape("bias", bias, columns)
        if bias.dtype == torch.int32:
            sums = sums + bias
    if out == torch.int32:
        return sums.view(*x1.shape[:-1], columns)
    y = sums.float() * scale.float()
    if pertoken_scale is not None:
        y = y * pertoken_scale.unsqueeze(1)
    if bias is not None and bias.dtype != torch.int32:
        y = y + bias.float()
    return y.to(out).view(*x1.shape[:-1], columns)


def _check_scales(
    limits: Limits, out: torch.dtype, scale: Tensor, columns: int, pertoken: Tensor | None, rows: int
) -> None:
    limits.dtype("scale", scale, torch.float32, *((torch.bfloat16,) if out != torch.float16 else ()))
    limits.shape("scale", scale, 1 if len(scale) == 1 else columns)
    if pertoken is not None:
        limits.require(out != torch.int32, "pertoken_scale is given, but output_dtype int32 means raw sums")
        limits.dtype("pertoken_scale", pertoken, torch.float32)
        limits.shape("pertoken_scale", pertoken, rows)
    limits.require(pertoken is not None or out != torch.float16, "pertoken_scale is not given, which float16 output needs")


def npu_dequant_swiglu_quant(
    x: Tensor,
    *,
    weight_scale: Tensor | None = None,
    activation_scale: Tensor | None = None,
    bias: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    group_index: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    dst_type: Any = None,
    round_mode: int | None = None,
    activate_dim: int | None = None,
    swiglu_mode: int = 0,
    clamp_limit: float = 7.0,
    glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Scales of both sides, swiglu, quantised again. Rows beyond the counts of ``group_index`` are undefined."""
    limits = Limits("npu_dequant_swiglu_quant")
    limits.absent(bias=bias, round_mode=round_mode, activate_dim=activate_dim)
    limits.one_of("swiglu_mode", swiglu_mode, 0)
    limits.one_of("quant_mode", quant_mode, 0, 1)
    limits.dtype("x", x, torch.int32, *FLOATS)
    limits.shape("x", x, None, None)
    if dst_type is not None:
        limits.output("dst_type", dst_type, torch.int8)
    rows, both = x.shape
    limits.require(both % 2 == 0, f"x has an odd width, {both}")
    counts = _counts(limits, x, group_index, quant_mode)
    groups, is_grouped = len(counts), group_index is not None
    activation = _dequantising(limits, x, weight_scale, activation_scale, groups if is_grouped else None)
    if quant_scale is not None:
        limits.dtype("quant_scale", quant_scale, torch.float32)
        limits.shape("quant_scale", quant_scale, groups, both // 2)
    limits.require(quant_mode == 1 or quant_scale is not None, "quant_scale is not given, but quant_mode is 0 (static)")
    if quant_mode == 1:
        limits.absent(quant_offset=quant_offset)
    q, scale = undefined(rows, both // 2, dtype=torch.int8), undefined(rows, dtype=torch.float32)
    for group, run in runs(counts):
        wide = x[run].float()
        if activation is not None and weight_scale is not None:
            wide = wide * activation[run] * weight_scale.view(-1, both)[group]
        inner = swiglu(wide if activate_left else torch.cat(wide.chunk(2, -1)[::-1], -1), -1)
        if quant_scale is not None:
            inner = inner * quant_scale[group]
        if quant_mode == 1:
            q[run], scale[run] = quantised(inner)
        else:
            q[run] = (
                (inner if quant_offset is None else inner + quant_offset).round().clamp(-LEVELS - 1, LEVELS).to(torch.int8)
            )
    return q, scale


def _counts(limits: Limits, x: Tensor, group_index: Tensor | None, quant_mode: int) -> list[int]:
    if group_index is None:
        return [len(x)]
    limits.dtype("group_index", group_index, torch.int64)
    limits.shape("group_index", group_index, None)
    limits.one_of("quant_mode with group_index", quant_mode, 1)
    width = x.shape[1] // 2
    limits.within("half the width of x with group_index", width, 64, MAX_GROUPED_WIDTH)
    limits.require(width % 64 == 0, f"half the width of x is {width}, with group_index it should be a multiple of 64")
    return limits.groups("group_index", group_index, is_sums=False, rows=len(x))


def _dequantising(
    limits: Limits, x: Tensor, weight_scale: Tensor | None, activation_scale: Tensor | None, groups: int | None
) -> Tensor | None:
    """The scales of rows, [rows, 1]. Without groups there is one row of weight scales, with or without its dimension."""
    if x.dtype != torch.int32:
        limits.absent(**{"weight_scale of a float x": weight_scale, "activation_scale of a float x": activation_scale})
        return None
    limits.require(weight_scale is not None, "weight_scale is not given, which an int32 x needs")
    limits.require(activation_scale is not None, "activation_scale is not given, which an int32 x needs")
    assert weight_scale is not None and activation_scale is not None
    limits.dtype("weight_scale", weight_scale, torch.float32)
    if groups is None and weight_scale.dim() == 1:
        limits.shape("weight_scale", weight_scale, x.shape[1])
    else:
        limits.shape("weight_scale", weight_scale, groups or 1, x.shape[1])
    limits.dtype("activation_scale", activation_scale, torch.float32)
    limits.shape("activation_scale", activation_scale, len(x), *((1,) if activation_scale.dim() == 2 else ()))
    return activation_scale.view(-1, 1)


def swiglu(wide: Tensor, dim: int) -> Tensor:
    """Of fp32."""
    left, right = wide.chunk(2, dim)
    return functional.silu(left) * right


def quantised(wide: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 rows -> int8, and scales without the last dimension. A row of zeros has scale 0."""
    scale = wide.abs().amax(-1) / LEVELS
    steps = wide / torch.where(scale == 0, 1.0, scale).unsqueeze(-1)
    return torch.round(steps).clamp(-LEVELS, LEVELS).to(torch.int8), scale


def integer_product(x: Tensor, weight: Tensor) -> Tensor:
    """int8 [M, K] times [K, N] -> int32, exact: fp64 holds every sum."""
    return (x.double() @ weight.double()).to(torch.int32)


KERNELS: dict[str, Callable[..., Any]] = {
    "npu_swiglu": npu_swiglu,
    "npu_dynamic_quant": npu_dynamic_quant,
    "npu_quant_matmul": npu_quant_matmul,
    "npu_dequant_swiglu_quant": npu_dequant_swiglu_quant,
}
