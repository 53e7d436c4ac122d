"""Candidates of the lightning indexer and the choice of the best, on an NPU.

The stock operator names the best keys and tells no scores of keys in pages, so the scores of what it found are computed
again, in fp32. Owns that composition; knows no forced keys, which its caller adds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from longcat_pd.kernels.npu.limits import INDEX_WIDTH, MOST_CANDIDATES, MOST_INDEX_HEADS, check_block_size
from longcat_pd.kernels.npu.tables import pieces, rows_of, visible, visible_slots
from longcat_pd.kernels.ops import IndexCandidates

_PLAIN_COUNT, _COUNT_STEP = 2048, 1024
_MOST_ELEMENTS = 1 << 26  # of gathered keys, and of their products with all heads: 256 MiB in fp32
_ABOVE = float(1 << 25)  # above every position


def select_positions(scores: Tensor, positions: Tensor, *, low: int, high: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """See ``ops.SelectPositions``; for positions below 2^24, which fp32 has all of.

    Two passes in fp32, because no integer of 64 bits is sorted by vector units: the least score that is picked, and of the
    keys with that score those with the smallest positions.
    """
    is_eligible = (positions >= low) & (positions < high.unsqueeze(-1))
    scores = torch.where(is_eligible, scores, -torch.inf)
    missing = budget - scores.shape[-1]
    if missing > 0:
        scores = functional.pad(scores, (0, missing), value=-torch.inf)
        positions = functional.pad(positions, (0, missing), value=-1)
    least = torch.topk(scores, budget, dim=-1, sorted=True).values[:, -1:]
    order = torch.where(scores > least, _ABOVE, torch.where(scores == least, -positions.float(), -_ABOVE))
    picked = torch.topk(order, budget, dim=-1, sorted=False).indices
    best = scores.gather(-1, picked)
    return best, torch.where(best == -torch.inf, -1, positions.gather(-1, picked))


def index_candidates_with(values_of: Any | None) -> IndexCandidates:
    """See ``ops.IndexCandidates``. Keys at or above ``high`` are left out by each row's length, without a mask.

    ``values_of``: an operator with the stock one's arguments that tells scores of keys in pages; they come in the type of
    the queries.
    """

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
        (batch, rows_each, heads, width), (low, budget) = index_q.shape, limits
        assert heads <= MOST_INDEX_HEADS and width == INDEX_WIDTH, f"indexer: {heads} heads of {width}, at most 64 of 128"
        check_block_size("indexer", cache.shape[1])
        count = _count(low + budget)
        at_most = max(_MOST_ELEMENTS // (count * max(width, heads)), 1)
        scores = [index_q.new_empty((0, budget), dtype=torch.float32)]
        found = [high.new_empty((0, budget))]
        for piece in pieces(batch * rows_each, block_tables.shape[1], at_most=at_most):
            q, by, ends = (x.flatten(0, 1)[piece.start : piece.stop] for x in (index_q, weights, high.unsqueeze(-1)))
            tables, starts = (rows_of(table, piece, rows_each) for table in (block_tables, block_starts))
            ends = ends.squeeze(-1)
            lengths = visible(starts, ends, cache.shape[1]).clamp_min(1)
            keys, values = _best_keys(values_of, q, by, cache=cache, tables=tables, lengths=lengths, count=count)
            positions = _positions(keys, starts, cache.shape[1])
            if values_of is None:
                values = _scores(q, by, cache, visible_slots(keys, tables, cache.shape[1]))
            best = select_positions(values.float(), positions, low=low, high=ends, budget=budget)
            scores.append(best[0])
            found.append(best[1])
        return torch.cat(scores).view(*high.shape, budget), torch.cat(found).view(*high.shape, budget)

    return index_candidates


def _best_keys(
    values_of: Any | None, q: Tensor, weights: Tensor, *, cache: Tensor, tables: Tensor, lengths: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Visible keys [T, count], -1 for none, in no order, and the operator's second result."""
    operator = torch.ops.npu.npu_lightning_indexer if values_of is None else values_of
    keys, values = operator(
        q.contiguous(),
        cache.contiguous().unsqueeze(2),
        weights,
        actual_seq_lengths_query=torch.arange(1, len(q) + 1, dtype=torch.int32, device=q.device),
        actual_seq_lengths_key=lengths.int(),
        block_table=tables.int(),
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=count,
        sparse_mode=0,
        return_value=values_of is not None,
    )
    return keys.squeeze(1).long(), values.squeeze(1) if values_of is not None else values


def _scores(q: Tensor, weights: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    """[T, K] fp32 of the keys in ``slots`` [T, K]."""
    keys = cache.reshape(-1, cache.shape[-1])[slots].float()
    dots = torch.bmm(q.float(), keys.transpose(1, 2)).relu()
    return torch.bmm(weights.unsqueeze(1), dots).squeeze(1)


def _positions(keys: Tensor, starts: Tensor, block_size: int) -> Tensor:
    """-1 for -1."""
    known = keys.clamp_min(0)
    return torch.where(keys >= 0, starts.gather(1, known // block_size) + known % block_size, -1)


def _count(wanted: int) -> int:
    """How many keys the operator is asked for."""
    count = wanted if wanted <= _PLAIN_COUNT else -(-wanted // _COUNT_STEP) * _COUNT_STEP
    assert count <= MOST_CANDIDATES, f"indexer: {wanted} candidates, at most {MOST_CANDIDATES}"
    return count
