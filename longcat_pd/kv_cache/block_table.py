"""The blocks of one sequence. Plain data; the pool that handed the blocks out is ``block_pool.py``'s."""

from __future__ import annotations

from dataclasses import dataclass

from longcat_pd.kv_cache.layout import BlockSplit


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Blocks of one reservation by block number.

    ``blocks[b]`` is the id of block number b in the shard ``split.rank_of(b)``. ``group`` names the group whose shards they
    lie in; ``generation`` is unique among all reservations that this group ever made. The first ``num_shared`` blocks were
    found with their content; others may hold them too, and nobody writes there.
    """

    split: BlockSplit
    blocks: tuple[int, ...]
    group: int
    generation: int
    num_shared: int = 0

    @property
    def num_tokens(self) -> int:
        """Positions that these blocks have room for."""
        return len(self.blocks) * self.split.block_size

    def shard(self, rank: int) -> list[int]:
        """Ids of the blocks that ``rank`` holds, by round."""
        return [self.blocks[number] for number in self.split.blocks_of(rank, len(self.blocks))]

    def unshared(self, rank: int) -> list[int]:
        """Those of them that the sequence does not share."""
        return [self.blocks[n] for n in self.split.blocks_of(rank, len(self.blocks)) if n >= self.num_shared]

    def slot(self, position: int) -> tuple[int, int]:
        """Where the token at ``position`` is cached: rank, and token place there (block * block_size + offset)."""
        number, offset = divmod(position, self.split.block_size)
        return self.split.rank_of(number), self.blocks[number] * self.split.block_size + offset
