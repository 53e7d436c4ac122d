"""Operators on single rows: norms, activation, rotation. Each is one row's own business, so batches cannot matter."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``ops.RmsNorm``."""
    return functional.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, delta: Tensor, *, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``ops.AddRmsNorm``."""
    total = x + delta
    return total, rms_norm(total, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, *, bias: Tensor, eps: float) -> Tensor:
    """See ``ops.LayerNorm``."""
    return functional.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps).to(x.dtype)


def swiglu(x: Tensor) -> Tensor:
    """See ``ops.Swiglu``."""
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def prepare_rotation(frequencies: Tensor, *, magnitude: float, dtype: torch.dtype) -> Tensor:
    """See ``ops.PrepareRotation``: both, fp64."""
    return torch.stack((frequencies, torch.full_like(frequencies, magnitude)))


def rotation(positions: Tensor, prepared: Tensor) -> Tensor:
    """See ``ops.Rotation``.

    Computed where it is needed and not read from a table: a table for a million positions takes a quarter of a GiB on every
    rank and ends somewhere. Angles are fp64, because a large position times a frequency loses the fraction in fp32.
    """
    frequencies, magnitude = prepared.unbind(0)
    angles = positions.double().unsqueeze(-1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (torch.stack((cos, cos, -sin, sin)) * magnitude).float().view(2, 2, *angles.shape).movedim(1, -1)


def rope(x: Tensor, rotation: Tensor, *, is_interleaved: bool) -> Tensor:
    """See ``ops.Rope``."""
    return turned(x.float(), rotation, is_interleaved=is_interleaved).to(x.dtype)


def turned(x: Tensor, rotation: Tensor, *, is_interleaved: bool) -> Tensor:
    """Rope in the type of both. Not as a product of complex numbers: torch's rounds differently at the end of a tensor."""
    half, lead = x.shape[-1] // 2, x.shape[:-1]
    pairs = x.reshape(*lead, half, 2) if is_interleaved else x.reshape(*lead, 2, half).transpose(-1, -2)
    cos, sin = rotation if x.dim() == 2 else rotation.unsqueeze(2)
    result: Tensor = pairs * cos + pairs.flip(-1) * sin
    return (result if is_interleaved else result.transpose(-1, -2)).flatten(-2)
