"""CPU kernels of norms, rotations, casts: against loops over elements, and what they refuse."""

import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.npu.device import install
from tests.npu.kernels import formats
from tests.npu.kernels.formats import format_of

install()
npu = torch.ops.npu


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def _slow_norm(row: list[float], gamma: list[float], epsilon: float) -> tuple[list[float], float]:
    rstd = 1 / math.sqrt(sum(x * x for x in row) / len(row) + epsilon)
    return [x * rstd * g for x, g in zip(row, gamma, strict=True)], rstd


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm(dtype: torch.dtype) -> None:
    x, gamma = _random(2, 3, 48, dtype=dtype), _random(48, seed=1)
    y, rstd = npu.npu_rms_norm(x, gamma, epsilon=0.25)
    assert y.dtype == dtype and rstd.dtype == torch.float32 and rstd.shape == (2, 3, 1)
    for b in range(2):
        for t in range(3):
            want, scale = _slow_norm(x[b, t].tolist(), gamma.tolist(), 0.25)
            torch.testing.assert_close(y[b, t], torch.tensor(want, dtype=torch.float64).to(dtype), rtol=1e-6, atol=0)
            assert rstd[b, t].item() == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_rms_norm_is_the_norm_of_the_sum_that_it_returns(dtype: torch.dtype) -> None:
    x1, x2, gamma = _random(3, 48, dtype=dtype), _random(3, 48, dtype=dtype, seed=2), _random(48, dtype=dtype, seed=1)
    y, rstd, x = npu.npu_add_rms_norm(x1, x2, gamma, epsilon=1e-3)
    assert torch.equal(x, x1 + x2)
    for t in range(3):
        want, scale = _slow_norm(x[t].tolist(), gamma.tolist(), 1e-3)
        torch.testing.assert_close(y[t], torch.tensor(want, dtype=torch.float64).to(dtype), rtol=1e-6, atol=0)
        assert rstd[t].item() == pytest.approx(scale, rel=1e-6)


def _turned_pairs(x: Tensor, angles: list[float], pairs: list[tuple[int, int]]) -> dict[int, tuple[float, float]]:
    """Each pair as a complex number times exp(i angle)."""
    turned = {}
    for i, (a, b) in enumerate(pairs):
        z = complex(x[a], x[b]) * complex(math.cos(angles[i]), math.sin(angles[i]))
        turned[i] = (z.real, z.imag)
    return turned


@pytest.mark.parametrize("shared_rows", [False, True])
def test_interleave_rope_turns_neighbours_and_leaves_them_in_halves(shared_rows: bool) -> None:
    x, angles = _random(2, 2, 3, 64), _random(2, 1, 1 if shared_rows else 3, 32).double()
    cos, sin = (torch.cat((f, f), -1).float() for f in (angles.cos(), angles.sin()))
    y = npu.npu_interleave_rope(x, cos, sin)
    for b in range(2):
        for n in range(2):
            for s in range(3):
                row = angles[b, 0, 0 if shared_rows else s].tolist()
                turned = _turned_pairs(x[b, n, s], row, [(2 * i, 2 * i + 1) for i in range(32)])
                for i in range(32):
                    assert (y[b, n, s, i].item(), y[b, n, s, 32 + i].item()) == pytest.approx(turned[i], abs=1e-5)


@pytest.mark.parametrize(("mode", "place"), [("half", lambda i: (i, 8 + i)), ("interleave", lambda i: (2 * i, 2 * i + 1))])
def test_rotary_mul_turns_pairs_where_they_stand(mode: str, place: Any) -> None:
    x, angles = _random(2, 3, 4, 16), _random(1, 3, 1, 8).double()
    pairs = [place(i) for i in range(8)]
    cos, sin = torch.empty(1, 3, 1, 16), torch.empty(1, 3, 1, 16)
    for i, (a, b) in enumerate(pairs):
        cos[..., a] = cos[..., b] = angles[..., i].cos()
        sin[..., a] = sin[..., b] = angles[..., i].sin()
    y = npu.npu_rotary_mul(x, cos, sin, rotary_mode=mode)
    for b in range(2):
        for s in range(3):
            for n in range(4):
                turned = _turned_pairs(x[b, s, n], angles[0, s, 0].tolist(), pairs)
                for i, (first, second) in enumerate(pairs):
                    assert (y[b, s, n, first].item(), y[b, s, n, second].item()) == pytest.approx(turned[i], abs=1e-5)


def test_rotary_mul_takes_any_layout_that_fits() -> None:
    long = torch.zeros(1, 2000, 2, 16)
    assert npu.npu_rotary_mul(long, long[:, :, :1], long[:, :, :1]).shape == long.shape
    swapped = long.transpose(1, 2)
    assert npu.npu_rotary_mul(swapped, swapped[:, :1], swapped[:, :1]).shape == swapped.shape


def test_a_cast_weight_is_known_until_it_is_gone() -> None:
    weight = _random(4, 32, 16)
    cast = npu.npu_format_cast(weight, 29)
    assert torch.equal(cast, weight) and cast.data_ptr() != weight.data_ptr()
    assert format_of("op", "w", cast) == 29 and format_of("op", "w", weight) == 2
    assert format_of("op", "w", torch.nn.Parameter(cast, requires_grad=False)) == 29
    for view in (cast[0], cast[1:], cast.transpose(1, 2), cast.view(4, 512)):
        with pytest.raises(ValueError, match="op: w is a slice, view or transposition"):
            format_of("op", "w", view)
    assert format_of("op", "w", npu.npu_format_cast(cast, 2)) == 2
    address = cast.data_ptr()
    del cast, view
    gc.collect()
    assert address not in formats._casts


def test_prefetch_does_nothing() -> None:
    weight = _random(4, 16)
    assert npu.npu_prefetch(weight, None, 1 << 20) is None
    assert npu.npu_prefetch(weight, weight, 64, offset=128) is None


X = _random(2, 2, 3, 64)
TURN = _random(2, 1, 3, 64)
REFUSED: dict[str, tuple[Any, str]] = {
    "norm: ints": (lambda: npu.npu_rms_norm(X.int(), X[0, 0, 0]), "npu_rms_norm: input.dtype"),
    "norm: gamma's length": (lambda: npu.npu_rms_norm(X, X[0, 0, 0, :63]), r"npu_rms_norm: gamma.shape .* \[64\]"),
    "norm: gamma's type": (lambda: npu.npu_rms_norm(X.half(), X[0, 0, 0].bfloat16()), "npu_rms_norm: gamma.dtype"),
    "add: gamma's type": (lambda: npu.npu_add_rms_norm(X.half(), X.half(), X[0, 0, 0]), "npu_add_rms_norm: gamma.dtype"),
    "add: shapes": (lambda: npu.npu_add_rms_norm(X, X[:1], X[0, 0, 0]), "npu_add_rms_norm: x2.shape"),
    "add: types": (lambda: npu.npu_add_rms_norm(X, X.half(), X[0, 0, 0]), "npu_add_rms_norm: x2.dtype"),
    "rope: width": (lambda: npu.npu_interleave_rope(X[..., :32].contiguous(), TURN, TURN), r"npu_interleave_rope: x.shape"),
    "rope: not 4-D": (lambda: npu.npu_interleave_rope(X[0], TURN, TURN), "npu_interleave_rope: x.shape"),
    "rope: strided x": (
        lambda: npu.npu_interleave_rope(X.transpose(1, 2), TURN, TURN),
        "npu_interleave_rope: x .*contiguous",
    ),
    "rope: strided cos": (
        lambda: npu.npu_interleave_rope(X, TURN.expand(2, 1, 3, 64)[:, :, ::2], TURN),
        "cos .*contiguous",
    ),
    "rope: batch of cos": (lambda: npu.npu_interleave_rope(X, TURN[:1], TURN[:1]), r"npu_interleave_rope: cos.shape"),
    "rope: rows of cos": (lambda: npu.npu_interleave_rope(X, *[TURN[:, :, :2].contiguous()] * 2), r"cos.shape\[2\]"),
    "rope: type of cos": (lambda: npu.npu_interleave_rope(X.half(), TURN, TURN), "npu_interleave_rope: cos.dtype"),
    "rotary: mode": (lambda: npu.npu_rotary_mul(X, TURN, TURN, rotary_mode="quarter"), "rotary_mode .*'quarter'"),
    "rotary: width": (lambda: npu.npu_rotary_mul(*[torch.zeros(1, 1, 1, 896)] * 3), "head dimension .*896"),
    "rotary: rows": (
        lambda: npu.npu_rotary_mul(X, TURN[:, :, :2], TURN[:, :, :2]),
        r"npu_rotary_mul: r1.shape .*\(2, 2, 3",
    ),
    "rotary: B": (lambda: npu.npu_rotary_mul(torch.zeros(1000, 1, 2, 8), *[torch.zeros(1000, 1, 2, 8)] * 2), "below 1000"),
    "rotary: N": (lambda: npu.npu_rotary_mul(torch.zeros(2, 3, 1000, 8), *[torch.zeros(2, 3, 1, 8)] * 2), "below 1000"),
    "rotary: rotate": (lambda: npu.npu_rotary_mul(X, TURN, TURN, rotate=X), "npu_rotary_mul: rotate"),
    "rotary: types": (lambda: npu.npu_rotary_mul(X.half(), TURN, TURN), "npu_rotary_mul: r1.dtype"),
    "cast: format": (lambda: npu.npu_format_cast(X, 3), "npu_format_cast: acl_format has to be 2 or 29, not 3"),
    "cast: strided": (lambda: npu.npu_format_cast(X.transpose(2, 3), 29), "npu_format_cast: input .*contiguous"),
    "cast: 1-D": (lambda: npu.npu_format_cast(X[0, 0, 0], 29), r"npu_format_cast: input.dim\(\)"),
    "cast: a slice": (lambda: npu.npu_format_cast(npu.npu_format_cast(X, 29)[0], 29), "slice, view"),
    "prefetch: size": (lambda: npu.npu_prefetch(X, X, 0), "npu_prefetch: max_size"),
    "prefetch: offset": (lambda: npu.npu_prefetch(X, X, 1, offset=X.numel() * 4), "npu_prefetch: offset .*3072"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()
