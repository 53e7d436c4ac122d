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
    if len(table) == 1:
        return table.expand(len(rows), -1).contiguous()
    return table[torch.arange(rows.start, rows.stop, device=table.device) // rows_each]


def visible(starts: Tensor, ends: Tensor, block_size: int) -> Tensor:
    """How many visible keys stand below the position ``ends`` [T]: a prefix of what ``starts`` [T, M] has."""
    return (ends.unsqueeze(-1) - starts).clamp(0, block_size).sum(-1)


def visible_slots(keys: Tensor, block_tables: Tensor, rows_each: int, block_size: int) -> Tensor:
    """Slots (block * block_size + offset) of the visible keys ``keys`` [T, K]; -1 for -1."""
    lines = keys.clamp_min(0).view(len(block_tables), -1)
    blocks = block_tables.gather(1, (lines // block_size).long())
    slots = (blocks * block_size + lines % block_size).view(keys.shape)
    return torch.where(keys >= 0, slots, -1)
