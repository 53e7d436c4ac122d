"""Scores of the lightning indexer and the choice of the best keys."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from longcat_pd.kernels.reference.rows import batched


def index_scores(index_q: Tensor, weights: Tensor, *, cache: Tensor, block_tables: Tensor) -> Tensor:
    """Scores [B, Q, S] of all visible keys (see ``ops.IndexCandidates``). In fp32 throughout: 16 bits would make ties."""
    batch, rows, heads, width = index_q.shape
    keys = cache[block_tables].view(batch, -1, width).float()
    dots = batched(index_q.reshape(batch, rows * heads, width).float(), keys.transpose(1, 2)).relu()
    scores = batched(weights.reshape(batch * rows, 1, heads), dots.reshape(batch * rows, heads, -1))
    return scores.reshape(batch, rows, -1)


def select_positions(scores: Tensor, positions: Tensor, *, low: int, high: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """See ``ops.SelectPositions``. Scores and positions become one integer each, so that no two are equal."""
    is_eligible = (positions >= low) & (positions < high.unsqueeze(-1))
    scores = (scores + 0.0).masked_fill(~is_eligible, -torch.inf)  # + 0.0: -0 and 0 are the same score
    missing = budget - scores.shape[-1]
    if missing > 0:
        scores = functional.pad(scores, (0, missing), value=-torch.inf)
        positions = functional.pad(positions, (0, missing), value=-1)
    bits = scores.view(torch.int32).long()
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # floats sort like sign and magnitude
    picked = torch.topk((ascending << 32) - positions, budget, dim=-1, sorted=False).indices
    best = scores.gather(-1, picked)
    return best, positions.gather(-1, picked).masked_fill(best == -torch.inf, -1)


def index_candidates(
    index_q: Tensor,
    weights: Tensor,
    *,
    cache: Tensor,
    block_tables: Tensor,
    block_starts: Tensor,
    high: Tensor,
    limits: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """See ``ops.IndexCandidates``."""
    rows_each, (low, budget) = index_q.shape[1], limits
    scores = index_scores(index_q, weights, cache=cache, block_tables=block_tables)
    offsets = torch.arange(cache.shape[1], device=cache.device)
    positions = (block_starts.unsqueeze(-1) + offsets).flatten(1).repeat_interleave(rows_each, 0)
    best = select_positions(scores.flatten(0, 1), positions, low=low, high=high.flatten(), budget=budget)
    return best[0].view(*high.shape, budget), best[1].view(*high.shape, budget)
