"""Norms, activation and rotation, step by step."""

from __future__ import annotations

import torch
from torch import Tensor


class Norms:
    """``sums``: the type that everything is computed in."""

    def __init__(self, sums: torch.dtype) -> None:
        self._sums = sums

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``ops.RmsNorm``."""
        wide = x.to(self._sums)
        squares = wide * wide
        mean = squares.mean(-1, keepdim=True)
        deviation = torch.sqrt(mean + eps)
        normed = wide / deviation
        return (normed * weight.to(self._sums)).to(x.dtype)

    def add_rms_norm(self, x: Tensor, delta: Tensor, *, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See ``ops.AddRmsNorm``."""
        total = x + delta
        return total, self.rms_norm(total, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, *, bias: Tensor, eps: float) -> Tensor:
        """See ``ops.LayerNorm``."""
        wide = x.to(self._sums)
        centred = wide - wide.mean(-1, keepdim=True)
        squares = centred * centred
        mean = squares.mean(-1, keepdim=True)
        normed = centred / torch.sqrt(mean + eps)
        return (normed * weight.to(self._sums) + bias.to(self._sums)).to(x.dtype)

    def swiglu(self, x: Tensor) -> Tensor:
        """See ``ops.Swiglu``."""
        width = x.shape[-1] // 2
        return gated(x[..., :width], x[..., width:], self._sums)

    def rope(self, x: Tensor, rotation: Tensor, *, is_interleaved: bool) -> Tensor:
        """See ``ops.Rope``. Cosine and sine of a pair stand in the table's first numbers and, negated, in the other's."""
        wide, half = x.to(self._sums), x.shape[-1] // 2
        places = (slice(0, None, 2), slice(1, None, 2)) if is_interleaved else (slice(0, half), slice(half, None))
        cos, sin = rotation[0, ..., 0].to(self._sums), rotation[1, ..., 1].to(self._sums)
        if x.dim() > 2:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        first, second = wide[..., places[0]], wide[..., places[1]]
        turned = torch.empty_like(wide)
        turned[..., places[0]] = first * cos - second * sin
        turned[..., places[1]] = second * cos + first * sin
        return turned.to(x.dtype)


def gated(gate: Tensor, up: Tensor, sums: torch.dtype) -> Tensor:
    """``silu(gate) * up``, in the type of both."""
    wide = gate.to(sums)
    activated = wide * torch.sigmoid(wide)
    return (activated * up.to(sums)).to(gate.dtype)
