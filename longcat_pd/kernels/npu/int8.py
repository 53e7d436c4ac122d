"""Products of int8 weights and activations that are quantised on the fly, one scale a row on both sides.

Sums are integers and exact; they are multiplied by the scale of the output first and that of the row then, in fp32, and
rounded once. The reference multiplies in the other order, so the last bit of an fp32 result may differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

OPERATORS = ("npu_dynamic_quant", "npu_quant_matmul")
MAX_WIDTH = 65535


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [T, n] -> int8 of the same shape and fp32 scales [T]."""
    quantised, scale = torch.ops.npu.npu_dynamic_quant(x, dst_type=torch.int8)
    return quantised, scale


def linear_int8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """See ``ops.LinearInt8``; the weight was turned to [in, out] when it was prepared."""
    assert x.shape[1] == weight.shape[0], f"rows of {x.shape[1]} and a weight {tuple(weight.shape)}, [in, out]"
    assert scale.shape == weight.shape[1:] and scale.dtype == torch.float32, f"scales {scale.dtype} {tuple(scale.shape)}"
    quantised, row_scale = quantise(x)
    product: Tensor = torch.ops.npu.npu_quant_matmul(
        quantised, weight, scale, pertoken_scale=row_scale, output_dtype=x.dtype
    )
    return product
