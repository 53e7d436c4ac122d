"""Cutting a batch into tiles, so that one operator call does as much as memory allows. Knows shapes only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from longcat_pd.models.batch import ForwardInputs


@dataclass(frozen=True, slots=True)
class Tile:
    """Consecutive sequences with equally many rows each, and the columns of their tables that can hold visible keys."""

    rows: slice
    rows_each: int
    block_tables: Tensor  # [B, M]
    block_starts: Tensor  # [B, M]

    def cut(self, x: Tensor) -> Tensor:
        """[T, ...] of the batch -> [B, Q, ...] of the tile."""
        return x[self.rows].view(-1, self.rows_each, *x.shape[1:])


@dataclass(frozen=True, slots=True)
class Cost:
    """Elements that a call makes: for each row, for each visible key of a sequence, and for each pair of these."""

    row: int = 0
    key: int = 0
    pair: int = 0

    def of(self, num_rows: int, num_keys: int) -> int:
        """For rows of one sequence."""
        return num_rows * (self.row + self.pair * num_keys) + self.key * num_keys


def tiles(inputs: ForwardInputs, block_size: int, cost: Cost, *, at_most: int) -> Iterator[Tile]:
    """All rows of the batch in order; sequences without rows are left out. A tile costs ``at_most`` so much.

    Decode rows come in one tile (of a graph, whatever it costs), and so do prompts of equal length; a sequence that costs
    too much is cut between its rows.
    """
    if inputs.is_whole:
        tables = inputs.block_tables
        yield Tile(slice(0, len(inputs.positions)), len(inputs.positions) // len(tables), tables, inputs.block_starts)
        return
    seq = 0
    for rows_each, run in groupby(end - start for start, end in _bounds(inputs)):
        first, seq = seq, seq + len(list(run))
        if rows_each == 0:
            continue
        columns = _columns(inputs, range(first, seq), block_size)
        if (seq - first) * cost.of(rows_each, columns * block_size) <= at_most:
            yield _tile(inputs, range(first, seq), rows_each, columns)
            continue
        for alone in range(first, seq):
            columns = _columns(inputs, range(alone, alone + 1), block_size)
            num_keys = columns * block_size
            left = at_most - cost.of(0, num_keys)
            step = max(left // max(cost.of(1, num_keys) - cost.of(0, num_keys), 1), 1)
            yield from _pieces(_tile(inputs, range(alone, alone + 1), rows_each, columns), step)


def _bounds(inputs: ForwardInputs) -> Iterator[tuple[int, int]]:
    return zip(inputs.cu_seqlens_q, inputs.cu_seqlens_q[1:], strict=False)


def _columns(inputs: ForwardInputs, seqs: range, block_size: int) -> int:
    """Table columns that the longest of the sequences needs."""
    longest = max(inputs.kv_lens[seqs.start : seqs.stop])
    num_blocks = -(-longest // block_size)
    return min(-(-num_blocks // inputs.table_stride), inputs.block_tables.shape[1])


def _tile(inputs: ForwardInputs, seqs: range, rows_each: int, columns: int) -> Tile:
    rows = slice(inputs.cu_seqlens_q[seqs.start], inputs.cu_seqlens_q[seqs.stop])
    part = slice(seqs.start, seqs.stop)
    return Tile(rows, rows_each, inputs.block_tables[part, :columns], inputs.block_starts[part, :columns])


def _pieces(tile: Tile, step: int) -> Iterator[Tile]:
    """The rows of a tile of one sequence, at most ``step`` at a time."""
    for start in range(tile.rows.start, tile.rows.stop, step):
        end = min(start + step, tile.rows.stop)
        yield Tile(slice(start, end), end - start, tile.block_tables, tile.block_starts)
