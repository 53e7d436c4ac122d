"""Norms and activation. Each computes in fp32 and rounds once: the activation too, where the reference rounds its silu."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

OPERATORS = ("npu_rms_norm", "npu_add_rms_norm", "npu_swiglu")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``ops.RmsNorm``."""
    assert weight.shape == x.shape[-1:], f"a norm of {tuple(weight.shape)} over rows of {x.shape[-1]}"
    assert weight.dtype in (x.dtype, torch.float32), f"a norm in {weight.dtype} over {x.dtype}"
    normed: Tensor = torch.ops.npu.npu_rms_norm(x, weight, epsilon=eps)[0]
    return normed


def add_rms_norm(x: Tensor, delta: Tensor, *, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``ops.AddRmsNorm``. The operator gives the sum last."""
    assert x.shape == delta.shape and x.dtype == delta.dtype, f"{x.dtype} {x.shape} and {delta.dtype} {delta.shape}"
    assert weight.shape == x.shape[-1:], f"a norm of {tuple(weight.shape)} over rows of {x.shape[-1]}"
    assert weight.dtype == x.dtype, f"a norm in {weight.dtype} over sums in {x.dtype}"
    normed, _, total = torch.ops.npu.npu_add_rms_norm(x, delta, weight, epsilon=eps)
    return total, normed


def layer_norm(x: Tensor, weight: Tensor, *, bias: Tensor, eps: float) -> Tensor:
    """See ``ops.LayerNorm``: torch's own operator, whose kernel keeps statistics in fp32."""
    assert weight.dtype == bias.dtype == x.dtype, f"a norm in {weight.dtype} and {bias.dtype} over {x.dtype}"
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def swiglu(x: Tensor) -> Tensor:
    """See ``ops.Swiglu``."""
    assert x.shape[-1] % 2 == 0, f"two halves of {x.shape[-1]}"
    gated: Tensor = torch.ops.npu.npu_swiglu(x, dim=-1)
    return gated
