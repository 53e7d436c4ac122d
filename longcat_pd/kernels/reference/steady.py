"""Row operators in fp64, rounded once to the type of the result: the bits do not show how they were computed.

Compilers add in another order than torch does, contract products and sums, and bring their own exponential; torch itself
has one for whole vectors and one for what is left. All that moves an fp32 result by its last bit, and what is quantised
behind it by a whole step. In fp64 it moves the 53rd bit of what is rounded to 24: about one number in 2^29 can still come
out differently.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longcat_pd.kernels.reference import norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``ops.RmsNorm``."""
    return norm.rms_norm(x.double(), weight.double(), eps).to(x.dtype)


def add_rms_norm(x: Tensor, delta: Tensor, *, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``ops.AddRmsNorm``. The sum is one operation in the type of ``x``."""
    total = x + delta
    return total, rms_norm(total, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, *, bias: Tensor, eps: float) -> Tensor:
    """See ``ops.LayerNorm``."""
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    deviation = (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return (centred / deviation * weight.double() + bias.double()).to(x.dtype)


def swiglu(x: Tensor) -> Tensor:
    """See ``ops.Swiglu``."""
    return norm.swiglu(x.double()).to(x.dtype)


def rope(x: Tensor, rotation: Tensor, *, is_interleaved: bool) -> Tensor:
    """See ``ops.Rope``. Products of fp32 are exact here, so it does not matter whether they are added in one operation."""
    return norm.turned(x.double(), rotation.double(), is_interleaved=is_interleaved).to(x.dtype)


def route_topk(logits: Tensor, bias: Tensor, *, topk: int, factor: float, is_normalized: bool) -> tuple[Tensor, Tensor]:
    """See ``ops.RouteTopk``. The choice compares fp32, where equal logits still have equal probabilities."""
    probabilities = torch.softmax(logits.double(), -1)
    expert_ids = torch.topk(probabilities.float() + bias, topk, dim=-1, sorted=False).indices
    weights = probabilities.gather(-1, expert_ids)
    if is_normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return expert_ids, (weights * factor).float()
