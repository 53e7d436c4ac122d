"""Kernels of many experts against slow formulas, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longcat_pd.kernels.reference.moe import experts_with
from longcat_pd.kernels.reference.norm import swiglu
from tests.npu.device import install

install()
npu = torch.ops.npu
DRAW = torch.Generator().manual_seed(12)
COUNTS, EXPERT_OF_ROW, USED = [2, 0, 3], [0, 0, 2, 2, 2], 5
MOE: dict[str, Any] = {"split_item": 3, "group_type": 0}


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=DRAW).to(dtype)


def int8(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, generator=DRAW, dtype=torch.int8)


def groups(kind: int) -> Tensor:
    counts = torch.tensor(COUNTS)
    return counts if kind == 1 else counts.cumsum(0)


def products(x: Tensor, w: Tensor) -> Tensor:
    """fp64, row by row."""
    return torch.stack([x[t].double() @ w[e].double() for t, e in enumerate(EXPERT_OF_ROW)])


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("split_item", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_floats_meet_their_expert(kind: int, split_item: int, dtype: torch.dtype) -> None:
    x, w = normal(8, 16, dtype=dtype), normal(3, 16, 10, dtype=dtype)
    (y,) = npu.npu_grouped_matmul(
        [x],
        [w],
        group_list=groups(kind),
        group_type=0,
        split_item=split_item,
        group_list_type=kind,
        tuning_config=[2],
    )
    assert y.dtype == dtype
    torch.testing.assert_close(
        y[:USED], products(x, w).to(dtype), rtol=0.005 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )
    assert y[USED:].isnan().all()


def test_int8_as_raw_sums_and_with_scales() -> None:
    x, w, scale, rows = int8(8, 16), int8(3, 16, 10), normal(3, 10).abs(), normal(8).abs()
    common = MOE | {"group_list": groups(1), "group_list_type": 1}
    (raw,) = npu.npu_grouped_matmul([x], [w], output_dtype=torch.int32, **common)
    exact = products(x, w)
    assert raw.dtype == torch.int32 and torch.equal(raw[:USED].double(), exact)
    assert raw[USED:].abs().min() > 1_000_000
    expected = exact * scale[EXPERT_OF_ROW].double() * rows[:USED].double().unsqueeze(1)
    (y,) = npu.npu_grouped_matmul([x], [w], scale=[scale], per_token_scale=[rows], output_dtype=torch.float32, **common)
    torch.testing.assert_close(y[:USED].double(), expected, rtol=3e-7, atol=0)
    assert y[USED:].isnan().all()
    coarse = scale.bfloat16()
    (y,) = npu.npu_grouped_matmul([x], [w], scale=[coarse], per_token_scale=[rows], output_dtype=torch.bfloat16, **common)
    expected = exact * coarse[EXPERT_OF_ROW].double() * rows[:USED].double().unsqueeze(1)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y[:USED].double(), expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize("kind", [0, 1])
def test_the_fused_product_is_the_three_operators(kind: int) -> None:
    x, w, scale, rows = int8(8, 16), int8(3, 16, 128), normal(3, 128).abs() * 1e-3, normal(8).abs()
    q, out_scale = npu.npu_grouped_matmul_swiglu_quant_v2(
        x, [w], [scale], rows, groups(kind), dequant_mode=0, dequant_dtype=torch.float32, quant_mode=0, group_list_type=kind
    )
    wide = products(x, w) * scale[EXPERT_OF_ROW].double() * rows[:USED].double().unsqueeze(1)
    gate, value = wide.chunk(2, -1)
    inner = gate * torch.sigmoid(gate) * value
    torch.testing.assert_close(out_scale[:USED].double(), inner.abs().amax(-1) / 127, rtol=1e-5, atol=0)
    assert ((q[:USED] - inner / (inner.abs().amax(-1, keepdim=True) / 127)).abs() <= 0.501).all()
    assert out_scale[USED:].isnan().all() and len(set(q[USED:].flatten().tolist())) == 1


X, W, X8, W8, S, P = normal(8, 16), normal(3, 16, 10), int8(8, 16), int8(3, 16, 10), normal(3, 10), normal(8)
REFUSED: list[tuple[Any, Any, dict[str, Any], str]] = [
    ([X], [W[:, :15]], {}, "x has K = 16, weight has K = 15"),
    ([X, X], [W], {}, "x lists 2 tensors"),
    ([X], [W, W], {}, "weight lists 2 tensors"),
    ([X], [W[0]], {}, "weight has shape"),
    ([X[0]], [W], {}, "x has shape"),
    ([X], [W.bfloat16()], {}, "weight is torch.bfloat16"),
    ([X.int()], [W], {}, "x is torch.int32"),
    ([X8], [W], {}, "weight is torch.float32"),
    ([X], [W], {"group_list": None}, "group_list is a NoneType"),
    ([X], [W], {"group_list": torch.tensor(COUNTS, dtype=torch.int32)}, "group_list is torch.int32"),
    ([X], [W], {"group_list": torch.tensor([1, 1])}, r"group_list has shape \[2\], it should be \[3\]"),
    ([X], [W], {"group_list": torch.tensor([4, 4, 1])}, "covers 9 rows of 8"),
    ([X], [W], {"group_list": torch.tensor([4, 3, 8]), "group_list_type": 0}, r"no running sums: \[4, 3, 8\]"),
    ([X], [W], {"group_list_type": 2}, "group_list_type is 2"),
    ([X], [W], {"split_item": 0}, "split_item is 0"),
    ([X], [W], {"group_type": None}, "group_type is None"),
    ([X], [W], {"act_type": 1}, "act_type is 1"),
    ([X], [W], {"tuning_config": []}, "tuning_config"),
    ([X], [W], {"scale": [S]}, "scale of a float x"),
    ([X], [W], {"bias": [S]}, "bias is given"),
    ([X], [W], {"output_dtype": torch.bfloat16}, "output_dtype is 15"),
    ([X8], [W8], {}, "output_dtype is not given"),
    (
        [X8],
        [W8.transpose(1, 2).contiguous().transpose(1, 2)],
        {"output_dtype": torch.int32},
        "weight of shape .* is a view",
    ),
    ([X8], [W8], {"output_dtype": torch.int8}, "output_dtype is 1"),
    ([X8], [W8], {"output_dtype": torch.int32, "scale": [S]}, "scale of an int32 result"),
    ([X8], [W8], {"output_dtype": torch.int32, "per_token_scale": [P]}, "per_token_scale of an int32 result"),
    ([X8], [W8], {"output_dtype": torch.bfloat16}, "scale is not given"),
    ([X8], [W8], {"output_dtype": torch.bfloat16, "scale": [S]}, "scale is torch.float32, allowed are torch.bfloat16"),
    ([X8], [W8], {"output_dtype": torch.float16, "scale": [S.bfloat16()]}, "scale is torch.bfloat16"),
    ([X8], [W8], {"output_dtype": torch.float32, "scale": [S[:, :9]]}, r"scale has shape \[3, 9\]"),
    ([X8], [W8], {"output_dtype": torch.float32, "scale": [S], "per_token_scale": [P[:7]]}, r"per_token_scale has shape"),
    ([X8], [W8], {"output_dtype": torch.float32, "scale": [S], "per_token_scale": [P.half()]}, "per_token_scale is torch"),
    ([torch.zeros(1, 1)], [torch.zeros(1025, 1, 1)], {"group_list": torch.zeros(1025, dtype=torch.int64)}, "is 1025"),
    ([torch.zeros(1, 65536)], [torch.zeros(1, 65536, 1)], {"group_list": torch.tensor([1])}, "K of weight is 65536"),
    ([torch.zeros(1, 1)], [torch.zeros(1, 1, 65536)], {"group_list": torch.tensor([1])}, "N of weight is 65536"),
]
GIVEN = MOE | {"group_list": torch.tensor(COUNTS), "group_list_type": 1}


@pytest.mark.parametrize(("x", "weight", "changed", "complaint"), REFUSED)
def test_grouped_matmul_refuses(x: Any, weight: Any, changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match="npu_grouped_matmul: .*" + complaint):
        npu.npu_grouped_matmul(x, weight, **(GIVEN | changed))


def test_a_tensor_is_no_list() -> None:
    with pytest.raises((ValueError, RuntimeError), match="x"):
        npu.npu_grouped_matmul(X, [W], **GIVEN)


FUSED: dict[str, Any] = {
    "x": X8,
    "weight": [W8],
    "weight_scale": [S],
    "x_scale": P,
    "group_list": torch.tensor(COUNTS),
    "group_list_type": 1,
}


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"x": X}, "x is torch.float32"),
        ({"weight": [W]}, "weight is torch.float32"),
        ({"weight_scale": [S[:2]]}, "weight_scale has shape"),
        ({"x_scale": P[:1]}, "x_scale has shape"),
        ({"x_scale": P.half()}, "x_scale is torch.float16"),
        ({"group_list": torch.tensor([9, 0, 0])}, "covers 9 rows of 8"),
        ({"quant_mode": 1}, "quant_mode is 1"),
        ({"dequant_mode": 1}, "dequant_mode is 1"),
        ({"dequant_dtype": torch.bfloat16}, "dequant_dtype is 15"),
        ({"smooth_scale": P}, "smooth_scale is given"),
    ],
)
def test_the_fused_product_refuses(changed: dict[str, Any], complaint: str) -> None:
    npu.npu_grouped_matmul_swiglu_quant_v2(**FUSED)
    with pytest.raises(ValueError, match="npu_grouped_matmul_swiglu_quant_v2: .*" + complaint):
        npu.npu_grouped_matmul_swiglu_quant_v2(**(FUSED | changed))


def test_the_int8_chain_gives_what_the_reference_table_gives() -> None:
    """Every row quantised and sorted, two products with an activation between them, and back: in fp32 only the order of
    multiplications and sums differs. A value may land on the other side of a half, so a few outputs may be a step off.
    """
    rows, hidden, inner, experts, topk = 40, 128, 64, 6, 3
    ids = torch.stack([torch.randperm(experts + 2, generator=DRAW)[:topk] for _ in range(rows)]).int()
    x, weights = normal(rows, hidden), torch.rand(rows, topk, generator=DRAW)
    gate_up, down = int8(experts, 2 * inner, hidden), int8(experts, hidden, inner)
    up_scale, down_scale = normal(experts, 2 * inner).abs() * 1e-3, normal(experts, hidden).abs() * 1e-3
    expected = experts_with(swiglu)(
        x, ids, weights=weights, gate_up=gate_up, down=down, gate_up_scale=up_scale, down_scale=down_scale
    )
    q, index, counts, scales = npu.npu_moe_init_routing_v2(
        x, ids, expert_num=experts, expert_tokens_num_type=1, expert_tokens_num_flag=True, quant_mode=1
    )
    common = MOE | {"group_list": counts, "group_list_type": 1}
    (wide,) = npu.npu_grouped_matmul([q], [gate_up.transpose(1, 2).contiguous()], output_dtype=torch.int32, **common)
    q, scales = npu.npu_dequant_swiglu_quant(
        wide,
        weight_scale=up_scale,
        activation_scale=scales,
        group_index=counts,
        activate_left=True,
        quant_mode=1,
    )
    (y,) = npu.npu_grouped_matmul(
        [q],
        [down.transpose(1, 2).contiguous()],
        scale=[down_scale],
        per_token_scale=[scales],
        output_dtype=torch.float32,
        **common,
    )
    out = npu.npu_moe_finalize_routing(y.unsqueeze(1), None, None, None, weights, index, None, drop_pad_mode=3)
    is_close = (out - expected).abs() <= 1e-5 * expected.abs().max()
    assert is_close.all(-1).sum() >= rows - 2
    torch.testing.assert_close(out, expected, rtol=0, atol=0.02 * float(expected.abs().max()))
