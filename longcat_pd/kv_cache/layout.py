"""Which rank of a group holds which block of a sequence: the one rule that prefill, decode and the hand-over share.

Pure arithmetic on block numbers. Knows nothing of pools, tensors, or of what ranks do with their blocks.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockSplit:
    """Serpentine distribution of one sequence's blocks over the ranks of its group.

    Blocks are numbered from 0 within their sequence. Round r holds the numbers ``r * num_ranks`` ... and gives each rank
    exactly one block; even rounds run ``start, start + 1, ...`` (mod num_ranks), odd rounds backwards, so that causal work,
    which grows with the position, is level. The split of a block never depends on the length of the sequence.
    """

    num_ranks: int
    block_size: int
    start: int = 0

    def __post_init__(self) -> None:
        assert self.num_ranks >= 1 and self.block_size >= 1, (self.num_ranks, self.block_size)
        assert 0 <= self.start < self.num_ranks, (self.start, self.num_ranks)

    @classmethod
    def for_prompt(cls, num_ranks: int, block_size: int, token_ids: Sequence[int]) -> BlockSplit:
        """The split of a sequence that begins with ``token_ids``: equal first blocks start on equal ranks."""
        return cls(num_ranks, block_size, first_block_digest(token_ids[:block_size]) % num_ranks)

    def rank_of(self, block: int) -> int:
        """The rank that holds block number ``block``."""
        turn, place = divmod(block, self.num_ranks)
        if turn % 2:
            place = self.num_ranks - 1 - place
        return (self.start + place) % self.num_ranks

    def local_index(self, block: int) -> int:
        """The round of ``block``: its place among the blocks that its rank holds."""
        return block // self.num_ranks

    def block_at(self, rank: int, local_index: int) -> int:
        """Inverse of ``rank_of`` and ``local_index``."""
        place = (rank - self.start) % self.num_ranks
        if local_index % 2:
            place = self.num_ranks - 1 - place
        return local_index * self.num_ranks + place

    def blocks_of(self, rank: int, num_blocks: int) -> list[int]:
        """The numbers below ``num_blocks`` that ``rank`` holds, ascending."""
        rounds = range(self.num_rounds(num_blocks))
        return [block for r in rounds if (block := self.block_at(rank, r)) < num_blocks]

    def num_rounds(self, num_blocks: int) -> int:
        """Most blocks that one rank holds of a sequence with ``num_blocks`` blocks."""
        return -(-num_blocks // self.num_ranks)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` positions need, on all ranks together."""
        return -(-num_tokens // self.block_size)


def first_block_digest(token_ids: Sequence[int]) -> int:
    """Stable digest of the ids of a sequence's first block (of the whole prompt if it is shorter)."""
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return zlib.crc32(ids.tobytes())
