"""Which blocks are whose: one ``BlockPool`` per cache shard, and the shards of a group taken together.

Book-keeping of the driver; it never touches cache contents. Written by the scheduler only. Sequences differ in length but a
reservation takes all it needs from every shard of its group at once, or nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum

from longcat_pd.kv_cache.block_table import BlockTable
from longcat_pd.kv_cache.layout import BlockSplit


class BlockState(str, Enum):
    """Where a block is in its life. Lanes write into reserved blocks, the model into live ones, nobody into the others.

    Quarantined: no longer wanted by its sequence, but a lane may still read or write it.
    """

    FREE = "free"
    RESERVED = "reserved"
    LIVE = "live"
    QUARANTINED = "quarantined"


_NOBODY = 0

_ALLOWED = {
    (BlockState.RESERVED, BlockState.LIVE),
    (BlockState.RESERVED, BlockState.QUARANTINED),
    (BlockState.LIVE, BlockState.QUARANTINED),
    (BlockState.RESERVED, BlockState.FREE),
    (BlockState.LIVE, BlockState.FREE),
    (BlockState.QUARANTINED, BlockState.FREE),
}


class BlockPool:
    """The blocks of one shard: each in exactly one state, each stamped with the generation that holds it.

    Block 0 is never handed out: padded rows and tokens that another rank keeps are written there.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, num_blocks
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._states = [BlockState.FREE] * num_blocks
        self._generations = [_NOBODY] * num_blocks
        self._counts = Counter({BlockState.FREE: num_blocks - 1})

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be handed out."""
        return self.num_blocks - 1

    def count(self, state: BlockState) -> int:
        """Blocks in ``state``, block 0 not counted."""
        return self._counts[state]

    def state_of(self, block: int) -> BlockState:
        """The state of one block."""
        return self._states[block]

    def allocate(self, num_blocks: int, generation: int, state: BlockState) -> list[int]:
        """Takes free blocks; the caller has looked at ``count(FREE)``. ``state`` is RESERVED or LIVE."""
        assert num_blocks <= len(self._free), f"{num_blocks} blocks of {len(self._free)}"
        assert state in (BlockState.RESERVED, BlockState.LIVE) and generation > _NOBODY
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block in taken:
            self._states[block] = state
            self._generations[block] = generation
        self._counts[BlockState.FREE] -= num_blocks
        self._counts[state] += num_blocks
        return taken

    def move(self, blocks: Iterable[int], generation: int, state: BlockState) -> None:
        """Changes the state of blocks that ``generation`` holds; FREE gives them back."""
        for block in blocks:
            old = self._states[block]
            assert self._generations[block] == generation, f"block {block} is not held by generation {generation}"
            assert (old, state) in _ALLOWED, f"block {block}: {old.value} -> {state.value}"
            self._states[block] = state
            self._counts[old] -= 1
            self._counts[state] += 1
            if state is BlockState.FREE:
                self._generations[block] = _NOBODY
                self._free.append(block)


class GroupPool:
    """The shards of one group (the CP ranks of a prefill instance, the KVP ranks of a decode group)."""

    def __init__(self, group: int, num_shards: int, num_blocks: int) -> None:
        self.group = group
        self.shards = tuple(BlockPool(num_blocks) for _ in range(num_shards))
        self._generation = _NOBODY

    def can_ever_hold(self, split: BlockSplit, num_blocks: int) -> bool:
        """Whether an empty group has room for a sequence of so many blocks."""
        return all(len(split.blocks_of(r, num_blocks)) <= shard.num_usable for r, shard in enumerate(self.shards))

    def can_allocate(self, split: BlockSplit, num_blocks: int) -> bool:
        """Whether every shard has room now."""
        need = ((len(split.blocks_of(r, num_blocks)), shard) for r, shard in enumerate(self.shards))
        return all(count <= shard.count(BlockState.FREE) for count, shard in need)

    def allocate(self, split: BlockSplit, num_blocks: int, state: BlockState = BlockState.LIVE) -> BlockTable | None:
        """Blocks 0 ... num_blocks - 1 of one sequence, from every shard at once; None (and nothing taken) without room."""
        assert split.num_ranks == len(self.shards), (split.num_ranks, len(self.shards))
        if not self.can_allocate(split, num_blocks):
            return None
        self._generation += 1
        blocks = [0] * num_blocks
        for rank, shard in enumerate(self.shards):
            numbers = split.blocks_of(rank, num_blocks)
            for number, block in zip(numbers, shard.allocate(len(numbers), self._generation, state), strict=True):
                blocks[number] = block
        return BlockTable(split, tuple(blocks), self.group, self._generation)

    def activate(self, table: BlockTable) -> None:
        """Reserved blocks become live: the hand-over is complete."""
        self._move(table, BlockState.LIVE)

    def quarantine(self, table: BlockTable) -> None:
        """The sequence is over but a lane may still touch its blocks; ``release`` them when it is quiet."""
        self._move(table, BlockState.QUARANTINED)

    def release(self, table: BlockTable) -> None:
        """All blocks go back. A table that was released before is a mistake and fails."""
        self._move(table, BlockState.FREE)

    def count(self, state: BlockState) -> int:
        """Blocks of all shards in ``state``."""
        return sum(shard.count(state) for shard in self.shards)

    def _move(self, table: BlockTable, state: BlockState) -> None:
        assert table.group == self.group, (table.group, self.group)
        for rank, shard in enumerate(self.shards):
            shard.move(table.shard(rank), table.generation, state)
