"""Quantisation kernels against slow formulas of their own, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.npu.device import install

install()
npu = torch.ops.npu
DRAW = torch.Generator().manual_seed(11)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=DRAW).to(dtype)


def int8(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, generator=DRAW, dtype=torch.int8)


def positive(*shape: int) -> Tensor:
    return torch.rand(shape, generator=DRAW) * 0.01 + 0.001


def quantised_slowly(row: list[float]) -> tuple[list[int], float]:
    """In fp64; Python's round is half to even too."""
    scale = max(abs(value) for value in row) / 127
    return [round(value / scale) if scale else 0 for value in row], scale


def assert_quantised(q: Tensor, scale: Tensor, expected: Tensor) -> None:
    """int8 within one step where fp64 lies near a half, scales to 1e-5."""
    assert q.dtype == torch.int8 and scale.dtype == torch.float32
    for row, got, factor in zip(expected.double().tolist(), q.tolist(), scale.tolist(), strict=True):
        steps, exact = quantised_slowly(row)
        assert factor == pytest.approx(exact, rel=1e-5)
        assert [
            (a, b, value)
            for a, b, value in zip(got, steps, row, strict=True)
            if a != b and abs(abs(value / exact) % 1 - 0.5) > 1e-3
        ] == []


def silu(value: float) -> float:
    return value / (1 + math.exp(-value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_gates_with_the_first_half(dtype: torch.dtype) -> None:
    x = normal(5, 12, dtype=dtype)
    expected = [[silu(row[i]) * row[i + 6] for i in range(6)] for row in x.tolist()]
    y = npu.npu_swiglu(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y, torch.tensor(expected).to(dtype))
    torch.testing.assert_close(npu.npu_swiglu(x.t().contiguous(), dim=0), y.t())


def test_dynamic_quant_rounds_half_to_even_and_leaves_zeros() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0], [-254.0, 1.0, 3.0, -127.0]])
    q, scale = npu.npu_dynamic_quant(x)
    assert q.tolist() == [[127, 0, 2, -2], [0, 0, 0, 0], [-127, 0, 2, -64]]
    assert scale.tolist() == [1.0, 0.0, 2.0]


def test_dynamic_quant_smooths_by_group_and_leaves_other_rows_undefined() -> None:
    x, smooth = normal(3, 3, 16, dtype=torch.bfloat16), normal(3, 16, dtype=torch.bfloat16)
    q, scale = npu.npu_dynamic_quant(x, smooth_scales=smooth, group_index=torch.tensor([2, 2, 7], dtype=torch.int32))
    assert q.shape == x.shape and scale.shape == (3, 3)
    group_of_row = [0, 0, 2, 2, 2, 2, 2]
    expected = x.flatten(0, 1)[:7].double() * smooth[group_of_row].double()
    assert_quantised(q.flatten(0, 1)[:7], scale.flatten()[:7], expected)
    assert scale.flatten()[7:].isnan().all()
    q, scale = npu.npu_dynamic_quant(x[0], smooth_scales=smooth[1])
    assert_quantised(q, scale, x[0].double() * smooth[1].double())


def product_slowly(x: Tensor, w: Tensor) -> list[list[int]]:
    return [[sum(a * b for a, b in zip(row, column, strict=True)) for column in w.t().tolist()] for row in x.tolist()]


def test_quant_matmul_scales_exact_sums_and_rounds_once() -> None:
    x, w, scale, rows = int8(4, 70), int8(70, 6), positive(6), positive(4)
    sums = product_slowly(x, w)
    raw = npu.npu_quant_matmul(x, w, scale, output_dtype=torch.int32)
    assert raw.dtype == torch.int32 and raw.tolist() == sums
    exact = torch.tensor(sums, dtype=torch.float64) * scale.double() * rows.double().unsqueeze(1)
    y = npu.npu_quant_matmul(x, w, scale, pertoken_scale=rows, output_dtype=torch.float32)
    torch.testing.assert_close(y.double(), exact, rtol=3e-7, atol=0)
    bf16 = npu.npu_quant_matmul(x, w, scale, pertoken_scale=rows, output_dtype=torch.bfloat16)
    assert bf16.dtype == torch.bfloat16 and torch.equal(bf16, y.bfloat16())
    assert torch.equal(npu.npu_quant_matmul(x, w, scale, pertoken_scale=rows, output_dtype=torch.float16), y.half())
    with_one = npu.npu_quant_matmul(x.view(2, 2, 70), w, scale[:1].bfloat16(), output_dtype=torch.bfloat16)
    expected = torch.tensor(sums).float() * scale[0].bfloat16().float()
    assert torch.equal(with_one, expected.bfloat16().view(2, 2, 6))


def test_quant_matmul_adds_either_bias() -> None:
    x, w, scale, rows = int8(3, 8), int8(8, 4), positive(4), positive(3)
    sums = torch.tensor(product_slowly(x, w))
    whole, real = torch.tensor([5, -6, 7, 1000], dtype=torch.int32), normal(4)

    def call(bias: Tensor) -> Tensor:
        return npu.npu_quant_matmul(x, w, scale, pertoken_scale=rows, bias=bias, output_dtype=torch.float32)

    factor = scale.double() * rows.double().unsqueeze(1)
    torch.testing.assert_close(call(whole).double(), (sums + whole) * factor)
    torch.testing.assert_close(call(real).double(), sums * factor + real)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("flat", [False, True], ids=["[T,1]", "[T]"])
def test_dequant_swiglu_quant_by_group(left: bool, flat: bool) -> None:
    x = torch.randint(-3000, 3000, (7, 128), generator=DRAW, dtype=torch.int32)
    weight_scale, rows, smooth = positive(3, 128), positive(7, 1), normal(3, 64)
    q, scale = npu.npu_dequant_swiglu_quant(
        x,
        weight_scale=weight_scale,
        activation_scale=rows.flatten() if flat else rows,
        quant_scale=smooth,
        group_index=torch.tensor([2, 0, 3]),
        activate_left=left,
        quant_mode=1,
    )
    wide = x[:5].double() * rows[:5].double() * weight_scale[[0, 0, 2, 2, 2]].double()
    gate, value = (wide[:, :64], wide[:, 64:]) if left else (wide[:, 64:], wide[:, :64])
    assert_quantised(q[:5], scale[:5], gate / (1 + torch.exp(-gate)) * value * smooth[[0, 0, 2, 2, 2]].double())
    assert scale[5:].isnan().all() and len(set(q[5:].flatten().tolist())) == 1


def test_dequant_swiglu_quant_of_floats_and_with_static_scales() -> None:
    x, factor, offset = normal(3, 12), normal(1, 6) * 20, normal(1, 6)
    inner = torch.tensor([[silu(row[i]) * row[i + 6] for i in range(6)] for row in x.tolist()], dtype=torch.float64)
    q, scale = npu.npu_dequant_swiglu_quant(x, activate_left=True, quant_mode=1)
    assert_quantised(q, scale, inner)
    fixed, nothing = npu.npu_dequant_swiglu_quant(
        x, quant_scale=factor, quant_offset=offset, activate_left=True, quant_mode=0
    )
    assert torch.equal(fixed.double(), (inner * factor + offset).round().clamp(-128, 127))
    assert nothing.isnan().all()


X8, W8, S, P = int8(4, 16), int8(16, 6), positive(6), positive(4)
XI, WS, AS = torch.ones(4, 128, dtype=torch.int32), positive(2, 128), positive(4, 1)
REFUSED: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (npu.npu_swiglu, (torch.ones(2, 4, dtype=torch.int32),), {}, "npu_swiglu: input is torch.int32"),
    (npu.npu_swiglu, (torch.ones(2, 5),), {}, "5"),
    (npu.npu_swiglu, (torch.ones(2, 4),), {"dim": 2}, "dim is 2"),
    (npu.npu_dynamic_quant, (torch.ones(4),), {}, "npu_dynamic_quant: input has 1 dim"),
    (npu.npu_dynamic_quant, (X8,), {}, "input is torch.int8"),
    (npu.npu_dynamic_quant, (torch.ones(2, 4),), {"smooth_scales": torch.ones(3)}, r"\[3\].*\[4\]"),
    (npu.npu_dynamic_quant, (torch.ones(2, 4),), {"smooth_scales": torch.ones(4).half()}, "smooth_scales is torch.float16"),
    (npu.npu_dynamic_quant, (torch.ones(2, 4),), {"group_index": torch.ones(1, dtype=torch.int32)}, "group_index without"),
    (
        npu.npu_dynamic_quant,
        (torch.ones(2, 4),),
        {"smooth_scales": torch.ones(2, 4), "group_index": torch.tensor([1, 2])},
        "group_index is torch.int64",
    ),
    (
        npu.npu_dynamic_quant,
        (torch.ones(2, 4),),
        {"smooth_scales": torch.ones(2, 4), "group_index": torch.tensor([1, 3], dtype=torch.int32)},
        "covers 3 rows of 2",
    ),
    (npu.npu_dynamic_quant, (torch.ones(2, 4),), {"dst_type": torch.int32}, "dst_type is 3"),
    (npu.npu_dynamic_quant, (torch.ones(2, 4),), {"quant_mode": "pertensor"}, "quant_mode is 'pertensor'"),
    (npu.npu_quant_matmul, (X8, W8.t().contiguous().t(), S), {"output_dtype": torch.int32}, "x2 of shape .* is a view"),
    (npu.npu_quant_matmul, (X8, W8, S), {}, "npu_quant_matmul: output_dtype is not given"),
    (npu.npu_quant_matmul, (X8, W8, S), {"output_dtype": torch.int8}, "output_dtype is 1"),
    (npu.npu_quant_matmul, (X8.int(), W8, S), {"output_dtype": torch.int32}, "x1 is torch.int32"),
    (npu.npu_quant_matmul, (X8, W8.float(), S), {"output_dtype": torch.int32}, "x2 is torch.float32"),
    (npu.npu_quant_matmul, (X8[:, :15], W8, S), {"output_dtype": torch.int32}, "K = 15, x2 has K = 16"),
    (npu.npu_quant_matmul, (X8, W8, S[:5]), {"output_dtype": torch.bfloat16}, r"scale has shape \[5\]"),
    (npu.npu_quant_matmul, (X8, W8, S.half()), {"output_dtype": torch.bfloat16}, "scale is torch.float16"),
    (npu.npu_quant_matmul, (X8, W8, S), {"output_dtype": torch.float16}, "pertoken_scale is not given"),
    (npu.npu_quant_matmul, (X8, W8, S), {"output_dtype": torch.int32, "pertoken_scale": P}, "raw sums"),
    (npu.npu_quant_matmul, (X8, W8, S), {"output_dtype": torch.bfloat16, "pertoken_scale": P[:3]}, r"pertoken.*\[3\]"),
    (
        npu.npu_quant_matmul,
        (X8, W8, S),
        {"output_dtype": torch.bfloat16, "pertoken_scale": P.bfloat16()},
        "pertoken_scale is torch.bfloat16",
    ),
    (
        npu.npu_quant_matmul,
        (X8, W8, S.bfloat16()),
        {"output_dtype": torch.float16, "pertoken_scale": P},
        "scale is torch.b",
    ),
    (npu.npu_quant_matmul, (X8, W8, S), {"output_dtype": torch.bfloat16, "offset": S}, "offset is given"),
    (npu.npu_quant_matmul, (int8(1, 65536), int8(65536, 1), S[:1]), {"output_dtype": torch.int32}, "x1 is 65536"),
    (npu.npu_quant_matmul, (int8(1, 1), int8(1, 65536), S[:1]), {"output_dtype": torch.int32}, "x2 is 65536"),
]
GIVEN = {"weight_scale": WS, "activation_scale": AS, "group_index": torch.tensor([1, 3]), "quant_mode": 1}
REFUSED_FUSED: list[tuple[Tensor, dict[str, Any], str]] = [
    (XI, {"weight_scale": None}, "weight_scale is not given"),
    (XI, {"activation_scale": None}, "activation_scale is not given"),
    (XI, {"activation_scale": AS[:3]}, r"activation_scale has shape \[3, 1\]"),
    (XI, {"activation_scale": AS.half()}, "activation_scale is torch.float16"),
    (XI, {"weight_scale": WS[:1]}, r"weight_scale has shape \[1, 128\]"),
    (XI, {"weight_scale": WS.bfloat16()}, "weight_scale is torch.bfloat16"),
    (XI, {"quant_mode": 0}, "quant_mode with group_index is 0"),
    (XI, {"quant_mode": 2}, "quant_mode is 2"),
    (XI, {"group_index": torch.tensor([1, 3], dtype=torch.int32)}, "group_index is torch.int32"),
    (XI, {"group_index": torch.tensor([2, 3])}, "covers 5 rows of 4"),
    (XI, {"group_index": torch.tensor([2, -1])}, "no counts"),
    (XI, {"group_index": None, "quant_mode": 0, "weight_scale": WS[:1]}, "quant_scale is not given"),
    (XI, {"quant_scale": positive(2, 63)}, r"quant_scale has shape \[2, 63\]"),
    (XI, {"quant_offset": positive(2, 64)}, "quant_offset is given"),
    (XI, {"swiglu_mode": 1}, "swiglu_mode is 1"),
    (XI, {"bias": torch.ones(128, dtype=torch.int32)}, "bias is given"),
    (XI[:, :126].contiguous(), {"weight_scale": WS[:, :126]}, "63"),
    (torch.ones(1, 2 * 10560, dtype=torch.int32), {}, "10560, allowed are 64 to 10496"),
    (X8, {}, "x is torch.int8"),
    (XI.float(), {}, "weight_scale of a float x is given"),
]


@pytest.mark.parametrize(("call", "tensors", "keywords", "complaint"), REFUSED)
def test_refused(call: Callable[..., Any], tensors: tuple[Any, ...], keywords: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        call(*tensors, **keywords)


@pytest.mark.parametrize(("x", "changed", "complaint"), REFUSED_FUSED)
def test_dequant_swiglu_quant_refuses(x: Tensor, changed: dict[str, Any], complaint: str) -> None:
    npu.npu_dequant_swiglu_quant(XI, **GIVEN)
    with pytest.raises(ValueError, match="npu_dequant_swiglu_quant: .*" + complaint):
        npu.npu_dequant_swiglu_quant(x, **(GIVEN | changed))
