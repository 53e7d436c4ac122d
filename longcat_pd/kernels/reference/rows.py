"""Products whose rows do not depend on their neighbours: a row gives the same bits alone, in a batch and in any chunk.

Matrix libraries choose how to add by the number of rows, and below 16 rows the choice varies (measured with MKL and oneDNN,
fp32 and bf16). So rows come in multiples of 16 here. More columns, a longer sum that ends in zeros, and more products in
a batch were measured not to matter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

ROW_TILE = 16


def in_tiles(x: Tensor) -> Tensor:
    """``x`` [..., rows, width] with rows of zeros behind, up to a multiple of ``ROW_TILE``."""
    missing = -x.shape[-2] % ROW_TILE
    return functional.pad(x, (0, 0, 0, missing)) if missing else x


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See ``ops.LinearMap``."""
    return functional.linear(in_tiles(x), weight)[: x.shape[0]]


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See ``ops.HeadLinear``."""
    return batched(x.transpose(0, 1), weight).transpose(0, 1)


def batched(x: Tensor, y: Tensor) -> Tensor:
    """``x @ y`` for [n, rows, k] and [n, k, columns]."""
    return torch.bmm(in_tiles(x), y)[:, : x.shape[1]]
