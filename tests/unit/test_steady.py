"""kernels/reference/steady.py: fp32 results that are the rounded truth, whatever order or exponential they came from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from longcat_pd import kernels
from longcat_pd.kernels.reference.int8 import quantise

OPS = kernels.load("cpu", is_steady=True)
PLAIN = kernels.load("cpu")
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ROWS, WIDTH = 40, 333  # no multiple of a vector's length: the end of a row, and of a tensor, is computed in another way


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rounded(exact: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(exact.astype(np.float64)).to(dtype)


def precise(*tensors: Tensor) -> Sequence[np.ndarray]:
    """For sums that nothing is lost in: 64 bits behind the point of x86, else numpy's double with another order."""
    return [tensor.double().numpy().astype(np.longdouble)[..., ::-1] for tensor in tensors]


@TYPES
def test_norms_are_the_rounded_truth(dtype: torch.dtype) -> None:
    x, delta = randn(ROWS, WIDTH, dtype=dtype), randn(ROWS, WIDTH, seed=1, dtype=dtype)
    weight, bias = randn(WIDTH, seed=2, dtype=dtype), randn(WIDTH, seed=3, dtype=dtype)
    total, normed = OPS.add_rms_norm(x, delta, weight=weight, eps=1e-5)
    assert torch.equal(total, x + delta)
    for got, rows in ((OPS.rms_norm(x, weight, 1e-5), x), (normed, x + delta)):
        wide, factor = precise(rows, weight)
        wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * factor
        assert torch.equal(got, rounded(wanted[..., ::-1], dtype))
    wide, factor, term = precise(x, weight, bias)
    centred = wide - wide.mean(-1, keepdims=True)
    wanted = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * factor + term
    assert torch.equal(OPS.layer_norm(x, weight, bias=bias, eps=1e-5), rounded(wanted[..., ::-1], dtype))


@TYPES
def test_swiglu_is_the_rounded_truth(dtype: torch.dtype) -> None:
    x = randn(ROWS, 2 * WIDTH, dtype=dtype) * 4
    gate, up = precise(*x.chunk(2, -1))
    assert torch.equal(OPS.swiglu(x), rounded((gate / (1 + np.exp(-gate)) * up)[..., ::-1], dtype))


@pytest.mark.parametrize("is_normalized", [True, False])
def test_weights_of_experts_are_the_rounded_truth(is_normalized: bool) -> None:
    logits, bias = randn(ROWS, 37) * 3, randn(37, seed=1) * 0.01
    ids, weights = OPS.route_topk(logits, bias, topk=6, factor=2.5, is_normalized=is_normalized)
    chosen, _ = PLAIN.route_topk(logits, bias, topk=6, factor=2.5, is_normalized=is_normalized)
    assert torch.equal(ids.sort(-1).values, chosen.sort(-1).values)
    wide = logits.numpy().astype(np.longdouble)
    probabilities = np.exp(wide) / np.exp(wide).sum(-1, keepdims=True)
    wanted = np.take_along_axis(probabilities, ids.numpy(), -1)
    if is_normalized:
        wanted /= wanted[:, ::-1].sum(-1, keepdims=True)
    assert weights.dtype == torch.float32
    assert torch.equal(weights, rounded(wanted * 2.5, torch.float32))


@TYPES
@pytest.mark.parametrize("heads", [(), (3,)])
@pytest.mark.parametrize("is_interleaved", [True, False])
def test_rope_is_the_rounded_truth(dtype: torch.dtype, heads: tuple[int, ...], is_interleaved: bool) -> None:
    x, angles = randn(ROWS, *heads, 10, dtype=dtype), randn(ROWS, 5, seed=1) * 100
    cos, sin = angles.cos(), angles.sin()
    rotation = torch.stack((torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)))
    first = np.arange(5) * (2 if is_interleaved else 1)
    second = first + (1 if is_interleaved else 5)
    wide = x.double().numpy().astype(np.longdouble)
    c, s = (t.numpy().astype(np.longdouble).reshape(ROWS, *(1 for _ in heads), 5) for t in (cos, sin))
    wanted = np.empty_like(wide)
    wanted[..., first] = wide[..., first] * c - wide[..., second] * s
    wanted[..., second] = wide[..., second] * c + wide[..., first] * s
    assert torch.equal(OPS.rope(x, rotation, is_interleaved=is_interleaved), rounded(wanted, dtype))


def test_experts_activate_in_the_same_way() -> None:
    """The activation between the two products of an expert, which is in no table: a step of the second one shows it."""
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randint(-127, 128, (2, 2 * WIDTH, 48), generator=generator, dtype=torch.int8)
    down = torch.randint(-127, 128, (2, 48, WIDTH), generator=generator, dtype=torch.int8)
    scales = torch.rand(2, 2 * WIDTH, generator=generator) * 0.002, torch.rand(2, 48, generator=generator)
    x, ids = randn(ROWS, 48), torch.arange(ROWS).remainder(2).unsqueeze(-1)
    got = OPS.grouped_experts(
        x,
        ids,
        weights=torch.ones(ROWS, 1),
        gate_up=gate_up,
        down=down,
        gate_up_scale=scales[0],
        down_scale=scales[1],
    )
    for t in range(ROWS):
        e = t % 2
        inner = OPS.swiglu(OPS.linear_int8(x[t : t + 1], gate_up[e], scales[0][e]))
        assert torch.equal(got[t : t + 1], OPS.linear_int8(inner, down[e], scales[1][e]))


def test_quantising_has_no_order() -> None:
    x = randn(ROWS, WIDTH)
    order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(1))
    values, scale = quantise(x)
    moved, same = quantise(x[:, order])
    assert torch.equal(moved, values[:, order]) and torch.equal(same, scale)
    naive = x.numpy() / (np.abs(x.numpy()).max(-1, keepdims=True) / np.float32(127))
    assert np.array_equal(values.numpy(), np.rint(naive).astype(np.int8))
