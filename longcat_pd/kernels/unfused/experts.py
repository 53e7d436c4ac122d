"""Experts by hand: one after the other, each with a mask of the rows that chose it."""

from __future__ import annotations

import torch
from torch import Tensor

from longcat_pd.kernels.expert_ops import GroupedExperts
from longcat_pd.kernels.unfused.norms import gated

_LEVELS = 127


def experts_in(sums: torch.dtype) -> GroupedExperts:
    """See ``ops.GroupedExperts``; activations are computed, and results added, in ``sums``."""

    def grouped_experts(
        x: Tensor,
        expert_ids: Tensor,
        *,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_scale: Tensor | None = None,
        down_scale: Tensor | None = None,
    ) -> Tensor:
        out = torch.zeros(x.shape, dtype=sums, device=x.device)
        for expert in range(gate_up.shape[0]):
            mask = expert_ids == expert
            rows = mask.any(-1).nonzero().squeeze(1)
            weight = (weights * mask).sum(-1)[rows].unsqueeze(1)
            both = _product(x[rows], gate_up[expert], None if gate_up_scale is None else gate_up_scale[expert])
            gate, up = both.chunk(2, -1)
            inner = gated(gate, up, sums)
            made = _product(inner, down[expert], None if down_scale is None else down_scale[expert])
            out[rows] += weight * made.to(sums)
        return out

    return grouped_experts


def _product(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """See ``ops.LinearMap``, or with a scale ``ops.LinearInt8``: sums of doubles are exact too."""
    if scale is None:
        return x @ weight
    wide = x.float()
    step = wide.abs().amax(-1, keepdim=True) / _LEVELS
    levels = torch.round(wide / torch.where(step == 0, 1.0, step))
    return ((levels.double() @ weight.double().t()).float() * step * scale).to(x.dtype)
