"""Norms, products and what else the NPU table does row by row, against the reference; and what it refuses at the start."""

from __future__ import annotations

import pytest
import torch

from longcat_pd.kernels import npu
from longcat_pd.kernels.npu import ngram, operators
from longcat_pd.kernels.refusal import Unsupported
from tests.npu.expert_rig import REFERENCE, close, npu_ops, randn
from tests.npu.kernels.formats import format_of
from tests.npu.kernels.routing import define_own

TYPES = [torch.float32, torch.bfloat16]
BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_norms_and_activation(dtype: torch.dtype, rows: int) -> None:
    x, delta, weight, bias = (randn(*shape, seed=s, dtype=dtype) for s, shape in enumerate([(rows, 64)] * 2 + [(64,)] * 2))
    ops, wide = npu_ops(dtype), [part.float() for part in (x, delta, weight, bias)]
    close(ops.rms_norm(x, weight, 1e-3), REFERENCE.rms_norm(wide[0], wide[2], 1e-3), dtype)
    total, normed = ops.add_rms_norm(x, delta, weight=weight, eps=1e-3)
    assert torch.equal(total, x + delta)
    close(normed, REFERENCE.rms_norm(total.float(), wide[2], 1e-3), dtype)
    close(
        ops.layer_norm(x, weight, bias=bias, eps=1e-3),
        REFERENCE.layer_norm(wide[0], wide[2], bias=wide[3], eps=1e-3),
        dtype,
    )
    close(ops.swiglu(x), REFERENCE.swiglu(wide[0]), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_maps(dtype: torch.dtype, rows: int) -> None:
    ops, x, weight = npu_ops(dtype), randn(rows, 48, dtype=dtype), randn(48, 80, seed=1, dtype=dtype)
    close(ops.linear(x, ops.prepare(weight, "linear")), x.float() @ weight.float(), dtype)
    heads, maps = randn(rows, 2, 32, dtype=dtype), randn(2, 32, 16, seed=2, dtype=dtype)
    got = ops.head_linear(heads, ops.prepare(maps, "heads"))
    close(got, REFERENCE.head_linear(heads.float(), maps.float()), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_int8_products(dtype: torch.dtype, rows: int) -> None:
    x, draw = randn(rows, 96, dtype=dtype), torch.Generator().manual_seed(1)
    weight, scale = torch.randint(-128, 128, (40, 96), generator=draw).to(torch.int8), 0.01 * torch.rand(40, generator=draw)
    x[1:2] = 0.0
    ops = npu_ops(dtype)
    got = ops.linear_int8(x, ops.prepare(weight, "linear_int8"), scale)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got, REFERENCE.linear_int8(x, weight, scale), rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=0
    )


def test_weights_take_the_devices_format_once() -> None:
    ops = npu_ops(BF16)
    for kind, shape, dtype in (
        ("linear", (16, 32), BF16),
        ("experts", (2, 16, 32), BF16),
        ("linear_int8", (16, 32), torch.int8),
        ("experts_int8", (2, 16, 32), torch.int8),
    ):
        weight = torch.zeros(shape, dtype=dtype)
        made = ops.prepare(weight, kind)
        assert format_of("test", kind, made) == 29 and made.is_contiguous()
        wanted = shape if dtype == BF16 else (*shape[:-2], shape[-1], shape[-2])
        assert tuple(made.shape) == wanted
        with pytest.raises(ValueError, match="format 29"):
            format_of("test", kind, made[..., 1:])
    wide = torch.zeros(16, 32)
    assert ops.prepare(wide, "linear") is wide  # no such format for fp32
    assert format_of("test", "heads", ops.prepare(torch.zeros(2, 16, 32, dtype=BF16), "heads")) == 2
    nothing = torch.empty(0, 32, dtype=BF16)
    assert ops.prepare(nothing, "linear") is nothing


def test_scales_take_the_type_that_grouped_products_want() -> None:
    scale = torch.rand(2, 8)
    assert npu_ops(BF16).prepare(scale, "experts_scale").dtype == BF16
    assert npu_ops(torch.float16).prepare(scale, "experts_scale") is scale


@pytest.mark.parametrize(
    ("kind", "shape", "numbers"),
    [
        ("linear_int8", (65536, 1), "65536"),
        ("experts_int8", (1, 65536, 1), "65536"),
        ("experts", (1, 1, 65536), "65536"),
        ("experts", (1025, 1, 1), "1025.*1024"),
        ("heads", (1, 24, 16), "24 to 16"),
        ("heads", (1, 16, 24), "16 to 24"),
    ],
)
def test_weights_beyond_the_limits_are_refused_at_the_start(kind, shape, numbers) -> None:  # type: ignore[no-untyped-def]
    dtype = torch.int8 if kind.endswith("int8") else BF16
    with pytest.raises(Unsupported, match=numbers):
        npu_ops(BF16).prepare(torch.zeros(shape, dtype=dtype), kind)


def test_wide_maps_of_floats_are_not_refused() -> None:
    assert npu_ops(BF16).prepare(torch.zeros(1, 65536, dtype=BF16), "linear").shape == (1, 65536)


@pytest.mark.parametrize("dtype", TYPES)
def test_store(dtype: torch.dtype) -> None:
    caches = [torch.zeros(4, 16, 8, dtype=dtype) for _ in range(2)]
    slots, values = torch.tensor([17, 63, 0, 5]), randn(4, 8, dtype=dtype)
    npu_ops(dtype).store(caches[0], slots, values)
    REFERENCE.store(caches[1], slots, values)
    assert torch.equal(*caches)
    with pytest.raises(AssertionError, match="float64 into a cache"):
        npu_ops(dtype).store(caches[0], slots, values.double())


def test_norms_of_other_widths_or_types_are_our_own_mistakes() -> None:
    ops, x = npu_ops(BF16), randn(2, 64, dtype=BF16)
    with pytest.raises(AssertionError, match=r"\(32,\) over rows of 64"):
        ops.rms_norm(x, randn(32, dtype=BF16), 1e-5)
    with pytest.raises(AssertionError, match=r"float32 over sums in torch\.bfloat16"):
        ops.add_rms_norm(x, x, weight=randn(64), eps=1e-5)
    with pytest.raises(AssertionError, match="float32"):
        ops.layer_norm(x, randn(64), bias=randn(64), eps=1e-5)


WINDOWS = torch.tensor(
    [
        [7, 3, 9, 2],
        [7, 99, 9, 2],  # an EOS that is not its own
        [99, 3, 9, 2],  # its own
        [7, 3, -1, -1],
        [7, 60, 5, 1],  # ignored
        [60, 7, 3, 2],  # ignored itself
        [98, 99, 99, 2],
        [0, 0, 0, 0],
    ]
)
POWERS = torch.tensor(
    [[1, 100, 0, 0], [1, 100, 0, 0], [1, 100, 39, 0], [1, 100, 39, 0], [1, 100, 39, 22], [1, 100, 39, 22]]
)
MODULI = torch.tensor([1001, 1003, 1005, 1007, 2**31 - 1, 1011])


@pytest.mark.parametrize("ignored", [[(60, 70), (5, 6)], []])
@pytest.mark.parametrize("rows", [slice(None), slice(0, 0)])
def test_ngram_ids(ignored: list[tuple[int, int]], rows: slice) -> None:
    """Stock arithmetic, and the operator of a deployment's package."""
    define_own()
    given = {
        "powers": POWERS,
        "moduli": MODULI,
        "eos": torch.tensor([99]),
        "ignored": torch.tensor(ignored, dtype=torch.int64).view(-1, 2),
    }
    wanted = REFERENCE.ngram_ids(WINDOWS[rows], **given)
    for made in (ngram.ngram_ids(WINDOWS[rows], **given), ngram.ngram_ids_in_one(WINDOWS[rows], **given)):
        assert torch.equal(made, wanted) and made.dtype == torch.int64


def test_the_packages_operator_is_taken_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    define_own()
    assert npu_ops().ngram_ids is ngram.ngram_ids_in_one
    monkeypatch.setattr(npu, "has", lambda name: name != "compute_n_gram_ids" and operators.has(name))
    assert npu_ops().ngram_ids is ngram.ngram_ids


def test_what_is_missing_is_named_with_who_has_it() -> None:
    assert operators.has("npu_rms_norm") and operators.has("npu::npu_rms_norm") and operators.has("aten::relu")
    assert not operators.has("npu_planted") and not operators.has("planted::op")
    with pytest.raises(Unsupported, match=r"drawing needs.*npu_planted: every release.*planted::op: an operator package"):
        operators.require("npu_rms_norm", "npu_planted", "planted::op", purpose="drawing")


def test_a_table_without_its_operators_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = operators.has
    monkeypatch.setattr(operators, "has", lambda name: name != "npu_moe_gating_top_k" and stock(name))
    with pytest.raises(Unsupported, match=r"a mixture of experts needs.*npu_moe_gating_top_k"):
        npu_ops()
