"""Products whose rows do not depend on their neighbours: a row gives the same bits alone, in a batch and in any chunk.

Matrix libraries choose how to add by the shape. Measured with MKL and oneDNN, fp32 and bf16: where the second factor is
transposed, or the product one of a batch, the choice varies below 16 rows, so rows come in multiples of 16. Where it is one
plain matrix, [in, out] as weights are stored, only few rows are added in another way, so there are never so few: one on
processors of Intel; on those of AMD up to three, or eleven with several threads (four rows take thrice the time of two).
Sums over more than 512 may be cut according to the rows, so they are cut here. Sums over keys are cut too, always in the
same places, and keys come in multiples of 16. More columns (of 16 at least), more products in a batch, and zeros at the end
of a sum over at most 128 do not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from longcat_pd.kernels.ops import PrologScales, PrologWeights, WeightKind

ROW_TILE = 16
KEY_TILE = 128
SUM_TILE = 512


def _least_rows() -> int:
    """Rows from which this processor adds as in a product of many, with the threads that torch has; two at least."""
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(ROW_TILE, 96, generator=draw), torch.randn(96, 64, generator=draw)
    whole = x @ weight
    apart = [rows for rows in range(1, ROW_TILE) if not torch.equal(x[:rows] @ weight, whole[:rows])]
    return max(1 + max(apart, default=1), 2)


LEAST_ROWS = _least_rows()


def in_tiles(x: Tensor) -> Tensor:
    """``x`` [..., rows, width] with rows of zeros behind, up to a multiple of ``ROW_TILE``."""
    missing = -x.shape[-2] % ROW_TILE
    return functional.pad(x, (0, 0, 0, missing)) if missing else x


def prepare(weight: Tensor, kind: WeightKind) -> Tensor:
    """See ``ops.Prepare``: operators take weights as they are loaded."""
    return weight


def prepare_prolog(weights: PrologWeights, scales: PrologScales) -> tuple[Tensor, ...]:
    """See ``ops.PrepareProlog``."""
    return weights


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See ``ops.LinearMap``."""
    return product(never_few(x), weight)[: x.shape[0]]


def never_few(x: Tensor) -> Tensor:
    """``x`` [rows, width] with its first row again behind it, up to ``LEAST_ROWS``; no row stays none."""
    missing = LEAST_ROWS - x.shape[0]
    return torch.cat((x, x[:1].expand(missing, -1))) if 0 < missing < LEAST_ROWS else x


def product(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight`` for as many rows as ``never_few`` gives: [rows, in] and [in, out]."""
    if x.shape[1] <= SUM_TILE or x.dtype != torch.float32:  # 16-bit products add everything in fp32, in one order
        return x @ weight
    total = x[:, :SUM_TILE] @ weight[:SUM_TILE]
    for start in range(SUM_TILE, x.shape[1], SUM_TILE):
        part = slice(start, start + SUM_TILE)
        total = total + x[:, part] @ weight[part]
    return total


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
