"""Products of int8 weights and activations that are quantised on the fly: W8A8, symmetric, one scale a row on both sides.

Sums are integers and exact, and the rest is rounded number by number, so a row's bits depend on nothing but the row: no
tiles are needed here (see ``rows.py``).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

LEVELS = 127
MAX_WIDTH = (2**31 - 1) // (LEVELS * (LEVELS + 1))  # longer sums could overflow; a weight of another maker may be -128


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., n] -> int8 of the same shape and fp32 scales [..., 1], so that ``x`` is about int8 times scale.

    ``scale = max|x| / 127``, and ``round(x / scale)`` half to even. A row of zeros stays one. A row that holds NaN or
    infinity has such a scale and arbitrary int8, so that products with it do not look sound.
    """
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / LEVELS
    steps = wide / scale.masked_fill(scale == 0, 1.0)
    return steps.round_().clamp_(-LEVELS, LEVELS).to(torch.int8), scale


def linear_int8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """See ``ops.LinearInt8``."""
    quantised, row_scale = quantise(x)
    return scaled_product(quantised, row_scale, weight=weight, scale=scale).to(x.dtype)


def scaled_product(x: Tensor, row_scale: Tensor, *, weight: Tensor, scale: Tensor) -> Tensor:
    """int8 rows [T, in] with scales [T, 1], times int8 [out, in] with scales [out] -> [T, out] fp32."""
    return integer_product(x, weight).float().mul_(row_scale).mul_(scale)


def integer_product(x: Tensor, weight: Tensor) -> Tensor:
    """``x W^T`` of int8 [T, in] and [out, in] -> int32 [T, out], exact.

    The weight is read as it is stored: a transposed copy was measured to bring nothing, and costs a lot for one row.
    """
    assert x.shape[1] <= MAX_WIDTH, f"a sum over {x.shape[1]} products of int8 may not fit in int32"
    if x.device.type == "cpu" and x.shape[1] > 1 and _has_exact_product():  # sums of one product come out wrong there
        return torch._int_mm(x, weight.t())
    return (x.double() @ weight.double().t()).to(torch.int32)


@cache
def _has_exact_product() -> bool:
    """Whether this processor's int8 product adds in 32 bits: old ones add pairs in 16 bits, where they can overflow."""
    x = torch.full((1, 64), LEVELS, dtype=torch.int8)
    extremes = torch.stack((x[0], -x[0], x[0], -x[0] - 1))
    exact = (x.double() @ extremes.double().t()).to(torch.int32)
    return torch.equal(torch._int_mm(x.expand(16, -1).contiguous(), extremes.t()), exact.expand(16, -1))
