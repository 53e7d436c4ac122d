"""Sequences over a cache in pages, for tests of the table: who holds which keys, and rows that see some of them."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

NOWHERE = 1 << 40
BLOCK = 16


@dataclass
class Paged:
    """Tables of sequences that hold all their blocks, or one rank's of several; the last sequence is padding."""

    tables: Tensor
    starts: Tensor
    positions: Tensor  # [B, Q]
    num_blocks: int


def paged(lengths: list[int], rows_each: int, *, ranks: int = 1, rank: int = 0, seed: int = 0) -> Paged:
    """Rows of a sequence are its last ones. Of several ranks each holds one block of every round, in turn."""
    draw = random.Random(seed)
    columns = max(-(-length // BLOCK // ranks) + 1 for length in lengths) + 1
    num_blocks = 2 + columns * len(lengths)
    free = list(range(1, num_blocks))
    draw.shuffle(free)
    tables = torch.zeros(len(lengths) + 1, columns, dtype=torch.int64)
    starts = torch.full_like(tables, NOWHERE)
    positions = torch.zeros(len(lengths) + 1, rows_each, dtype=torch.int64)
    for seq, length in enumerate(lengths):
        held = [b for b in range(-(-length // BLOCK)) if b % ranks == (rank if b // ranks % 2 == 0 else ranks - 1 - rank)]
        for column, block in enumerate(held):
            tables[seq, column], starts[seq, column] = free.pop(), block * BLOCK
        positions[seq] = torch.arange(length - rows_each, length)
    return Paged(tables, starts, positions, num_blocks)


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Of a generator of its own."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
