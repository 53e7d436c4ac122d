"""From the spans of prompts to the batch as this rank sees it. Knows slots and the split of blocks, no models.

Windows of decode steps are built on the device (``decode_state.py``). What differs between ranks is which rows a rank
computes (under context parallelism those whose block it keeps, else all of its group) and which blocks its attention can
see (see ``CacheShard``). A group without rows has an empty batch: its ranks go through the step beside the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from longcat_pd.engine.slots import Int64s, Load, Span
from longcat_pd.models.batch import ForwardInputs, Rows
from longcat_pd.parallel.layout import CacheShard

NOWHERE = 1 << 40  # a position above every position
_NO_ROWS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Tables:
    blocks: list[Int64s]
    starts: list[Int64s]
    gather: Int64s | None


class InputsBuilder:
    """Fills ForwardInputs. ``ngram_order``: N of the over-embedding, 0 where this rank embeds without it.

    ``has_draft``: this rank has the draft layer, which takes the rows of prompts too. ``group_size``: ranks that have the
    same rows; ``is_split``: between attentions each of them keeps its share of these only (see ``Rows``).
    """

    def __init__(
        self,
        shard: CacheShard,
        block_size: int,
        ngram_order: int,
        device: torch.device,
        *,
        has_draft: bool = False,
        group_size: int = 1,
        is_split: bool = False,
    ) -> None:
        self._shard = shard
        self._block_size = block_size
        self._ngram_order = ngram_order
        self._device = device
        self._has_draft = has_draft
        self._group_size = group_size
        self._is_split = is_split

    def build(self, spans: Sequence[Span], load: Load | None = None) -> ForwardInputs:
        """The batch of one step. ``load``: of all groups, where there are others than that of ``spans``."""
        load = load or _load_of(spans)
        rows = [self._own_positions(span) for span in spans]
        counts = np.array([len(positions) for positions in rows], dtype=np.int64)
        offsets = np.concatenate(([0], np.cumsum(counts)))
        tables = self._tables(spans)
        ids = [span.state.token_ids[positions] for span, positions in zip(spans, rows, strict=True)]
        slots = [self._cache_slots(span, positions) for span, positions in zip(spans, rows, strict=True)]
        return ForwardInputs(
            token_ids=self._tensor(np.concatenate((_NO_ROWS, *ids))),
            positions=self._tensor(np.concatenate((_NO_ROWS, *rows))),
            row_seqs=self._tensor(np.repeat(np.arange(len(spans)), counts)),
            slot_mapping=self._tensor(np.concatenate((_NO_ROWS, *slots))),
            ngram_windows=self._ngram_windows(spans, rows),
            cu_seqlens_q=tuple(int(offset) for offset in offsets),
            kv_lens=tuple(span.end for span in spans),
            block_tables=self._tensor(_padded(tables.blocks, 0)),
            block_starts=self._tensor(_padded(tables.starts, NOWHERE)),
            table_stride=self._shard.num_ranks if self._shard.access == "partitioned" else 1,
            gather_blocks=None if tables.gather is None else self._tensor(tables.gather),
            output_rows=self._tensor(self._output_rows(spans, rows, offsets)),
            rows=self._rows(spans, load),
            outputs=Rows(sum(span.wants_token for span in spans), self._share(load.outputs)),
            next_token_ids=self._next_token_ids(spans, rows),
        )

    def _rows(self, spans: Sequence[Span], load: Load) -> Rows:
        """All ranks of a stage know the rows of all, so they need not tell each other."""
        if self._shard.access != "gathered":
            return Rows(sum(span.end - span.start for span in spans), self._share(load.rows), self._is_split)
        by_rank = np.zeros(self._shard.num_ranks, dtype=np.int64)
        for span in spans:
            ranks = span.state.block_ranks[np.arange(span.start, span.end) // self._block_size]
            by_rank += np.bincount(ranks, minlength=len(by_rank))
        return Rows(int(by_rank[self._shard.rank]), int(by_rank.max()))

    def _share(self, by_group: Sequence[int]) -> int:
        """What each rank hands in: enough for the group that has most."""
        return -(-max(by_group) // self._group_size)

    def _own_positions(self, span: Span) -> Int64s:
        """The positions whose rows this rank computes, ascending."""
        positions: Int64s = np.arange(span.start, span.end)
        if self._shard.access != "gathered":
            return positions
        own: Int64s = positions[span.state.block_ranks[positions // self._block_size] == self._shard.rank]
        return own

    def _cache_slots(self, span: Span, positions: Int64s) -> Int64s:
        """Where the entries of these positions are written; inside block 0 if another rank keeps them."""
        numbers = positions // self._block_size
        kept = span.state.block_ranks[numbers] == self._shard.rank
        return np.where(kept, span.state.blocks[numbers], 0) * self._block_size + positions % self._block_size

    def _tables(self, spans: Sequence[Span]) -> _Tables:
        if self._shard.access == "gathered":
            return self._gathered_tables(spans)
        numbers = [held[held < span.num_blocks] for span in spans for held in [span.state.held_by(self._shard.rank)]]
        blocks = [span.state.blocks[held] for span, held in zip(spans, numbers, strict=True)]
        return _Tables(blocks, [held * self._block_size for held in numbers], None)

    def _gathered_tables(self, spans: Sequence[Span]) -> _Tables:
        """Every rank contributes its blocks of all sequences, one sequence behind the other, padded to the longest."""
        n = self._shard.num_ranks
        held = np.array([np.bincount(s.state.block_ranks[: s.num_blocks], minlength=n) for s in spans])  # [B, n]
        num_gather = int(held.sum(0).max())
        firsts = np.cumsum(held, 0) - held + np.arange(n) * num_gather  # place of a sequence in each rank's contribution
        blocks, starts, mine = [], [], []
        for span, first in zip(spans, firsts, strict=True):
            numbers = np.arange(span.num_blocks)
            ranks = span.state.block_ranks[: span.num_blocks]
            blocks.append(first[ranks] + numbers // n)
            starts.append(numbers * self._block_size)
            mine.append(span.state.blocks[: span.num_blocks][ranks == self._shard.rank])
        gather = np.zeros(num_gather, dtype=np.int64)
        contributed = np.concatenate(mine)
        gather[: len(contributed)] = contributed
        return _Tables(blocks, starts, gather)

    def _ngram_windows(self, spans: Sequence[Span], rows: Sequence[Int64s]) -> torch.Tensor | None:
        if not self._ngram_order:
            return None
        windows = [np.empty((0, self._ngram_order), dtype=np.int64)]
        for span, positions in zip(spans, rows, strict=True):
            back = positions[:, None] - np.arange(self._ngram_order)
            windows.append(np.where(back >= 0, span.state.token_ids[np.maximum(back, 0)], -1))
        return self._tensor(np.concatenate(windows))

    def _output_rows(self, spans: Sequence[Span], rows: Sequence[Int64s], offsets: Int64s) -> Int64s:
        """The last row of each span that wants a token; -1 where another rank computes it."""
        wanted = []
        for span, positions, end in zip(spans, rows, offsets[1:], strict=True):
            if span.wants_token:
                is_here = len(positions) and positions[-1] == span.end - 1
                wanted.append(end - 1 if is_here else -1)
        return np.array(wanted, dtype=np.int64)

    def _next_token_ids(self, spans: Sequence[Span], rows: Sequence[Int64s]) -> torch.Tensor | None:
        """The token behind a prompt is not known yet: its row is written again before the first drafts."""
        if not self._has_draft:
            return None
        found = [_NO_ROWS]
        for span, positions in zip(spans, rows, strict=True):
            found.append(np.where(positions + 1 < span.state.num_tokens, span.state.token_ids[positions + 1], 0))
        return self._tensor(np.concatenate(found))

    def _tensor(self, array: Int64s) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self._device)


def _load_of(spans: Sequence[Span]) -> Load:
    """Of one group alone."""
    return Load((sum(span.end - span.start for span in spans),), (sum(span.wants_token for span in spans),))


def _padded(rows: Sequence[Int64s], fill: int) -> Int64s:
    """Rows of uneven length as a rectangle with at least one column."""
    table = np.full((len(rows), max((1, *(len(row) for row in rows)))), fill, dtype=np.int64)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return table
