"""Weights as the operators of this table want them, the maps that use them as they are, and writing to a cache.

Matrices of 16 bits and of int8 go into the device's own format (FRACTAL_NZ), once, and nothing may be cut out of them or
turned afterwards. fp32 has no such format. Nothing is done to a weight without elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longcat_pd.kernels.npu.int8 import MAX_WIDTH
from longcat_pd.kernels.ops import Prepare, WeightKind
from longcat_pd.kernels.refusal import Unsupported

OPERATORS = ("npu_format_cast", "npu_transpose_batchmatmul", "npu_scatter_nd_update_")
MAX_EXPERTS = 1024  # of one rank
HEAD_UNIT = 16
FRACTAL_NZ = 29


def preparing(dtype: torch.dtype) -> Prepare:
    """See ``ops.Prepare``; ``dtype`` is the model's."""

    def prepare(weight: Tensor, kind: WeightKind) -> Tensor:
        """Raises Unsupported where a weight's size is beyond what operators take."""
        if weight.numel() == 0:
            return weight
        _check(weight, kind)
        match kind:
            case "linear" | "experts":
                return formatted(weight)
            case "linear_int8" | "experts_int8":
                return formatted(weight.transpose(-1, -2))
            case "experts_scale":  # beside a result in bf16 the grouped product wants them so
                return weight.to(torch.bfloat16) if dtype == torch.bfloat16 else weight
            case "heads":  # its operator takes them as they are
                return weight.contiguous()

    return prepare


def formatted(weight: Tensor) -> Tensor:
    """In the device's own format, if there is one for its type."""
    weight = weight.contiguous()
    return weight if weight.dtype == torch.float32 else cast(weight)


def cast(weight: Tensor) -> Tensor:
    """In the device's own format."""
    made: Tensor = torch.ops.npu.npu_format_cast(weight.contiguous(), acl_format=FRACTAL_NZ)
    return made


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See ``ops.LinearMap``."""
    return torch.matmul(x, weight)


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See ``ops.HeadLinear``: transposed, multiplied and transposed back in one operator."""
    assert x.shape[1:] == weight.shape[:2], f"heads {tuple(x.shape)} and maps {tuple(weight.shape)}"
    mapped: Tensor = torch.ops.npu.npu_transpose_batchmatmul(
        x, weight, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
    )
    return mapped


def store(cache: Tensor, slots: Tensor, values: Tensor) -> None:
    """See ``ops.Store``. Of rows with one slot, which only padding has, any may win."""
    assert cache.dtype == values.dtype, f"{values.dtype} into a cache of {cache.dtype}"
    torch.ops.npu.npu_scatter_nd_update_(cache.view(-1, cache.shape[-1]), slots.unsqueeze(-1), values)


def _check(weight: Tensor, kind: WeightKind) -> None:
    """What the configuration of a checkpoint decides. Shapes are those of the loaded weight."""
    widest = max(weight.shape[1:] if kind.startswith("experts") else weight.shape)
    if kind in ("linear_int8", "experts", "experts_int8") and widest > MAX_WIDTH:
        text = f"device=npu: a weight of {tuple(weight.shape)}; these operators take widths up to {MAX_WIDTH}"
        raise Unsupported(text, param="model.path")
    if kind in ("experts", "experts_int8") and len(weight) > MAX_EXPERTS:
        text = f"device=npu: {len(weight)} experts on one rank, at most {MAX_EXPERTS}; raise parallel.ep_size"
        raise Unsupported(text, param="parallel.ep_size")
    if kind == "heads" and (weight.shape[1] % HEAD_UNIT or weight.shape[2] % HEAD_UNIT):
        text = f"device=npu: a head maps {weight.shape[1]} to {weight.shape[2]}; both have to be multiples of {HEAD_UNIT}"
        raise Unsupported(text, param="model.path")
