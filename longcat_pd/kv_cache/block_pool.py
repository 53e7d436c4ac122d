"""Which blocks are whose: one ``BlockPool`` per cache shard, and the shards of a group taken together.

Book-keeping of the driver; it never touches cache contents. Written by the engine's room only. Sequences differ in length
but a reservation takes all it needs from every shard of its group at once, or nothing.

A block whose content is known by the key of its prefix (``prefix.py``) is found by whoever begins with the same tokens, and
stays so when nobody holds it, until its place is needed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum

from longcat_pd.kv_cache.block_table import BlockTable
from longcat_pd.kv_cache.layout import BlockSplit


class BlockState(str, Enum):
    """Where a block is in its life. Lanes write into reserved blocks, the model into live ones, nobody into the others.

    Cached: nobody holds it, its content can be found. Quarantined: no longer wanted by its sequence, but a lane may still
    read or write it. Of a block that several hold, the state is the one that comes first here.
    """

    LIVE = "live"
    RESERVED = "reserved"
    QUARANTINED = "quarantined"
    CACHED = "cached"
    FREE = "free"


_ALLOWED = {
    (BlockState.RESERVED, BlockState.LIVE),
    (BlockState.RESERVED, BlockState.QUARANTINED),
    (BlockState.LIVE, BlockState.QUARANTINED),
}
_HELD = (BlockState.LIVE, BlockState.RESERVED, BlockState.QUARANTINED)


class BlockPool:
    """The blocks of one shard: each in exactly one state, held by as many as share it.

    Block 0 is never handed out: padded rows and tokens that another rank keeps are written there.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, num_blocks
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the first is the first to be given away
        self._holds: dict[int, list[BlockState]] = {}  # of each held block, as what it is held
        self._keys: dict[int, bytes] = {}
        self._by_key: dict[bytes, int] = {}
        self._counts = Counter({BlockState.FREE: num_blocks - 1})

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be handed out."""
        return self.num_blocks - 1

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free) + len(self._cached)

    def count(self, state: BlockState) -> int:
        """Blocks in ``state``, block 0 not counted."""
        return self._counts[state]

    def state_of(self, block: int) -> BlockState:
        """The state of one block."""
        holds = self._holds.get(block)
        if holds:
            return next(state for state in _HELD if state in holds)
        return BlockState.CACHED if block in self._cached else BlockState.FREE

    def find(self, key: bytes) -> int | None:
        """The block with the content of this key."""
        return self._by_key.get(key)

    def allocate(self, num_blocks: int, state: BlockState) -> list[int]:
        """Takes free blocks, then cached ones; the caller has looked at ``num_available``. ``state``: RESERVED or LIVE."""
        assert num_blocks <= self.num_available, f"{num_blocks} blocks of {self.num_available}"
        assert state in (BlockState.RESERVED, BlockState.LIVE)
        taken = []
        for _ in range(num_blocks):
            if self._free:
                block = self._free.pop()
                self._counts[BlockState.FREE] -= 1
            else:
                block, _ = self._cached.popitem(last=False)
                del self._by_key[self._keys.pop(block)]
                self._counts[BlockState.CACHED] -= 1
            self._holds[block] = [state]
            taken.append(block)
        self._counts[state] += num_blocks
        return taken

    def share(self, block: int) -> None:
        """One more holds a block that was found; nobody writes there."""
        assert block in self._keys, f"block {block} is known by no key"
        before = self.state_of(block)
        self._cached.pop(block, None)
        self._holds.setdefault(block, []).append(BlockState.LIVE)
        self._count(before, BlockState.LIVE)

    def move(self, block: int, old: BlockState, state: BlockState) -> None:
        """One of those who hold a block holds it as something else from now on."""
        assert (old, state) in _ALLOWED, f"block {block}: {old.value} -> {state.value}"
        before = self.state_of(block)
        self._holds[block].remove(old)
        self._holds[block].append(state)
        self._count(before, self.state_of(block))

    def give_back(self, block: int, held_as: BlockState) -> None:
        """One fewer holds it. Without holders it is cached if its content can be found, else free."""
        before, holds = self.state_of(block), self._holds[block]
        holds.remove(held_as)
        if not holds:
            del self._holds[block]
            if block in self._keys:
                self._cached[block] = None
            else:
                self._free.append(block)
        self._count(before, self.state_of(block))

    def publish(self, block: int, key: bytes) -> None:
        """The content of a held block is final and is that of ``key``. What is known already stays known where it is."""
        assert block in self._holds, f"block {block} is held by nobody"
        if key not in self._by_key and block not in self._keys:
            self._by_key[key], self._keys[block] = block, key

    def forget_all(self) -> None:
        """No content is found any more; what nobody holds is free."""
        self._keys.clear()
        self._by_key.clear()
        self._free += self._cached
        self._cached.clear()
        self._counts[BlockState.FREE] += self._counts.pop(BlockState.CACHED, 0)

    def _count(self, before: BlockState, after: BlockState) -> None:
        self._counts[before] -= 1
        self._counts[after] += 1


class GroupPool:
    """The shards of one group (the CP ranks of a prefill instance, the KVP ranks of a decode group)."""

    def __init__(self, group: int, num_shards: int, num_blocks: int) -> None:
        self.group = group
        self.shards = tuple(BlockPool(num_blocks) for _ in range(num_shards))
        self._generation = 0
        self._tables: dict[int, BlockState] = {}  # by generation: how a table holds what it does not share

    def can_ever_hold(self, split: BlockSplit, num_blocks: int) -> bool:
        """Whether an empty group has room for a sequence of so many blocks."""
        return all(len(split.blocks_of(r, num_blocks)) <= shard.num_usable for r, shard in enumerate(self.shards))

    def room_beside(self, split: BlockSplit, num_blocks: int, keys: Sequence[bytes] = ()) -> int | None:
        """Blocks of all shards that ``allocate`` would leave, what it finds not counted as taken; None: it has no room."""
        found = self._found(split, keys)
        if not self._has_room(split, num_blocks, found):
            return None
        return sum(shard.num_available for shard in self.shards) - (num_blocks - len(found))

    def allocate(
        self, split: BlockSplit, num_blocks: int, state: BlockState = BlockState.LIVE, keys: Sequence[bytes] = ()
    ) -> BlockTable | None:
        """Blocks 0 ... num_blocks - 1 of one sequence, from every shard at once; None (and nothing taken) without room.

        The leading blocks are those that hold the content of the leading ``keys``, as far as they are found.
        """
        assert split.num_ranks == len(self.shards), (split.num_ranks, len(self.shards))
        assert len(keys) < num_blocks or not keys, "the last block is the sequence's own"
        found = self._found(split, keys)
        if not self._has_room(split, num_blocks, found):
            return None
        self._generation += 1
        self._tables[self._generation] = state
        for number, block in enumerate(found):
            self._shard(split, number).share(block)
        blocks = [*found, *[0] * (num_blocks - len(found))]
        for rank, shard in enumerate(self.shards):
            numbers = [n for n in split.blocks_of(rank, num_blocks) if n >= len(found)]
            for number, block in zip(numbers, shard.allocate(len(numbers), state), strict=True):
                blocks[number] = block
        return BlockTable(split, tuple(blocks), self.group, self._generation, num_shared=len(found))

    def share_more(self, table: BlockTable, keys: Sequence[bytes]) -> BlockTable:
        """What was found since takes the place of blocks that nothing was written to; the table of the same reservation."""
        state = self._state(table)
        assert state is BlockState.RESERVED, f"generation {table.generation} is {state.value}"
        first = table.num_shared
        found = self._found(table.split, keys, first)
        if not found:
            return table
        for number, block in enumerate(found, start=first):
            shard = self._shard(table.split, number)
            shard.share(block)
            shard.give_back(table.blocks[number], state)
        end = first + len(found)
        return replace(table, blocks=(*table.blocks[:first], *found, *table.blocks[end:]), num_shared=end)

    def publish(self, table: BlockTable, first: int, keys: Iterable[bytes]) -> None:
        """Block numbers ``first`` ... hold what ``keys`` name, for good: whoever begins so may share them."""
        self._state(table)
        for number, key in enumerate(keys, start=first):
            self._shard(table.split, number).publish(table.blocks[number], key)

    def activate(self, table: BlockTable) -> None:
        """Reserved blocks become live: the hand-over is complete."""
        self._move(table, BlockState.LIVE)

    def quarantine(self, table: BlockTable) -> None:
        """The sequence is over but a lane may still touch its blocks; ``release`` them when it is quiet."""
        self._move(table, BlockState.QUARANTINED)

    def release(self, table: BlockTable) -> None:
        """All blocks go back. A table that was released before is a mistake and fails."""
        state = self._state(table)
        for number in range(len(table.blocks) - 1, -1, -1):  # so that of a chain the end is given away first
            self._shard(table.split, number).give_back(table.blocks[number], _held_as(table, number, state))
        del self._tables[table.generation]

    def forget_all(self) -> None:
        """No content is found any more; what sequences hold stays theirs."""
        for shard in self.shards:
            shard.forget_all()

    def count(self, state: BlockState) -> int:
        """Blocks of all shards in ``state``."""
        return sum(shard.count(state) for shard in self.shards)

    def _found(self, split: BlockSplit, keys: Sequence[bytes], first: int = 0) -> list[int]:
        """Blocks that hold the content of ``keys[first]`` and those behind it, as far as they are found."""
        found: list[int] = []
        for number in range(first, len(keys)):
            block = self._shard(split, number).find(keys[number])
            if block is None:
                break
            found.append(block)
        return found

    def _has_room(self, split: BlockSplit, num_blocks: int, found: Sequence[int]) -> bool:
        shared = Counter(split.rank_of(number) for number in range(len(found)))
        states = ((split.rank_of(n), self._shard(split, n).state_of(block)) for n, block in enumerate(found))
        woken = Counter(rank for rank, state in states if state is BlockState.CACHED)
        return all(
            len(split.blocks_of(rank, num_blocks)) - shared[rank] <= shard.num_available - woken[rank]
            for rank, shard in enumerate(self.shards)
        )

    def _move(self, table: BlockTable, state: BlockState) -> None:
        old = self._state(table)
        for number, block in enumerate(table.blocks):
            held_as = _held_as(table, number, old)
            if held_as is not state:
                self._shard(table.split, number).move(block, held_as, state)
        self._tables[table.generation] = state

    def _state(self, table: BlockTable) -> BlockState:
        assert table.group == self.group, (table.group, self.group)
        assert table.generation in self._tables, f"generation {table.generation} holds nothing (any more)"
        return self._tables[table.generation]

    def _shard(self, split: BlockSplit, number: int) -> BlockPool:
        return self.shards[split.rank_of(number)]


def _held_as(table: BlockTable, number: int, state: BlockState) -> BlockState:
    """What a table shares is never written: it is live before the rest is."""
    return BlockState.LIVE if number < table.num_shared and state is BlockState.RESERVED else state
