"""Products whose rows do not depend on their neighbours: a row gives the same bits alone, in a batch and in any chunk.

Matrix libraries choose how to add by the number of rows, and below 16 rows the choice varies (measured with MKL and oneDNN,
fp32 and bf16). So rows come in multiples of 16 here. Long sums are cut according to their length, so sums over keys are cut
here, always in the same places. More columns, more products in a batch, and zeros at the end of a sum that is short enough
were measured not to matter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

ROW_TILE = 16
KEY_TILE = 256


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


def sum_over_keys(weights: Tensor, values: Tensor) -> Tensor:
    """``weights @ values`` for [n, rows, s] and [n, s, c], whose bits do not depend on zeros at the end of ``weights``."""
    total = torch.bmm(weights[..., :KEY_TILE], values[:, :KEY_TILE])
    for start in range(KEY_TILE, values.shape[1], KEY_TILE):
        part = slice(start, start + KEY_TILE)
        total = total + torch.bmm(weights[..., part], values[:, part])
    return total
