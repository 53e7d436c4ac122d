"""Block tables as operators of an NPU read them: row by row, with lengths. Nothing is looked at on the host."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_MOST_ENTRIES = 1 << 22  # of the tables of one call: 32 MiB in int64


def pieces(num_rows: int, columns: int, *, at_most: int) -> Iterator[range]:
    """Rows in calls of at most so many, fewer where tables are wide."""
    step = max(min(at_most, _MOST_ENTRIES // max(columns, 1)), 1)
    for start in range(0, num_rows, step):
        yield range(start, min(start + step, num_rows))


def rows_of(table: Tensor, rows: range, rows_each: int) -> Tensor:
    """[B, M] -> [rows, M]: the line of each row's sequence."""
    if rows_each == 1:
        return table[rows.start : rows.stop]
    if len(table) == 1 or len(rows) == len(table) * rows_each:
        return table.unsqueeze(1).expand(-1, len(rows) // len(table), -1).flatten(0, 1)
    return table[torch.arange(rows.start, rows.stop, device=table.device) // rows_each]


def visible(starts: Tensor, ends: Tensor, block_size: int) -> Tensor:
    """How many visible keys stand below the position ``ends`` [T]: a prefix of what ``starts`` [T, M] has."""
    return (ends.unsqueeze(-1) - starts).clamp(0, block_size).sum(-1)


def visible_slots(keys: Tensor, block_tables: Tensor, block_size: int) -> Tensor:
    """Slots (block * block_size + offset) of the visible keys ``keys`` [B, n]; of -1 that of key 0."""
    keys = keys.clamp_min(0)
    return block_tables.gather(1, keys // block_size) * block_size + keys % block_size
