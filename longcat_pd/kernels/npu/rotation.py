"""Rotary angles and the turning of pairs on an NPU, whose vector units know no fp64.

Owns the form of a rotation: every factor in the order in which each operator wants it. Knows no weights and no cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

OPERATORS = ("npu_rotary_mul",)
_LOW = 1024  # a position is high * _LOW + low
_HIGHS = 2048
MAX_POSITIONS = _LOW * _HIGHS
_MOST_HEADS = 999
_MOST_WIDTH = 894


class Factors(NamedTuple):
    """Cosines and sines, each [T, R]; of pairs (i, i + R / 2), and of pairs (2 i, 2 i + 1)."""

    cos_of_halves: Tensor
    sin_of_halves: Tensor
    cos_of_neighbours: Tensor
    sin_of_neighbours: Tensor


def factors(rotation: Tensor) -> Factors:
    """What ``rotation`` made, by name."""
    cos_of_halves, cos_of_neighbours, sin_of_halves, sin_of_neighbours = rotation.unbind(0)
    return Factors(cos_of_halves, sin_of_halves, cos_of_neighbours, sin_of_neighbours)


def prepare_rotation(frequencies: Tensor, *, magnitude: float, dtype: torch.dtype) -> Tensor:
    """See ``ops.PrepareRotation``: cosines and sines of both parts of a position, made in fp64 and rounded once.

    [4, high and low parts, R] fp32, seen as ``dtype``: so the result's type needs no second argument. The first two are
    cosines for halves and for neighbours, the others sines; the magnitude is in those of the high part. 3 MiB for R = 64.
    """
    low = torch.arange(_LOW, dtype=torch.float64).unsqueeze(1) * frequencies
    high = torch.arange(_HIGHS, dtype=torch.float64).unsqueeze(1) * _LOW * frequencies
    turns = [torch.cat((by(high) * magnitude, by(low))) for by in (torch.cos, torch.sin)]
    orders = [order(turn) for turn in turns for order in (_for_halves, _for_neighbours)]
    return torch.stack(orders).float().view(dtype)


def rotation(positions: Tensor, prepared: Tensor) -> Tensor:
    """See ``ops.Rotation``: [4, T, R] in the type that will be turned, for positions below ``MAX_POSITIONS``.

    By the addition formulas in fp32, each factor is off by at most 4 * 2^-25 for the four rounded table entries, 2 * 2^-25
    for two products and 2^-24 for their sum (values up to 1), together 2^-22 times the magnitude at any position. The
    rounding to bf16 behind it is 2^-9.
    """
    tables = prepared.view(torch.float32)
    high = (positions // _LOW).clamp(0, _HIGHS - 1)
    a, b = tables[:, high], tables[:, _HIGHS + positions % _LOW]
    cos = a[:2] * b[:2] - a[2:] * b[2:]
    sin = a[2:] * b[:2] + a[:2] * b[2:]
    return torch.cat((cos, sin)).to(prepared.dtype)


def rope(x: Tensor, rotation: Tensor, *, is_interleaved: bool) -> Tensor:
    """See ``ops.Rope``. [T, H, R] goes in as one batch of T rows (BSND), so that T has no limit.

    ``npu_interleave_rope`` is not used: it moves pairs apart.
    """
    by, heads = factors(rotation), x if x.dim() == 3 else x.unsqueeze(1)
    _, num_heads, width = heads.shape
    assert num_heads <= _MOST_HEADS, f"npu_rotary_mul: {num_heads} heads, at most {_MOST_HEADS}"
    assert width <= _MOST_WIDTH and width % 2 == 0, f"npu_rotary_mul: width {width}, even and at most {_MOST_WIDTH}"
    if not x.shape[0]:
        return x
    cos, sin = (by.cos_of_neighbours, by.sin_of_neighbours) if is_interleaved else (by.cos_of_halves, by.sin_of_halves)
    turned: Tensor = torch.ops.npu.npu_rotary_mul(
        heads.unsqueeze(0),
        cos.view(1, -1, 1, width),
        sin.view(1, -1, 1, width),
        rotary_mode="interleave" if is_interleaved else "half",
    )
    return turned.view(x.shape)


def _for_halves(x: Tensor) -> Tensor:
    return torch.cat((x, x), -1)


def _for_neighbours(x: Tensor) -> Tensor:
    return torch.stack((x, x), -1).flatten(-2)
