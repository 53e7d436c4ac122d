"""The memory of an instance and the line for it: slots and blocks of every group, and the quarantine of unfinished pushes.

Admission takes the worst case of a sequence from every shard of a group at once: the lowest priority first, and of equals
who came first. So nothing that runs is ever interrupted, and a large sequence is not overtaken by small ones that should
not go before it. Who is in front goes to the group that has the most room beside it, and stays there. Pure; used by the
scheduler only. Knows no plan.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from longcat_pd.config.schema import EngineConfig
from longcat_pd.engine.prefixes import Prefixes
from longcat_pd.engine.request import Request
from longcat_pd.engine.sequence import Sequence, Stage
from longcat_pd.errors import InvalidRequest, Overloaded
from longcat_pd.kv_cache.block_pool import BlockState, GroupPool
from longcat_pd.kv_cache.block_table import BlockTable
from longcat_pd.kv_cache.layout import BlockSplit
from longcat_pd.kv_transfer.messages import TransferClosed
from longcat_pd.log import logger


@dataclass(frozen=True, slots=True)
class RankFigures:
    """What a rank must hold once all plans so far are executed."""

    live: int
    reserved: int
    quarantined: int  # at most: lanes fall silent in their own time
    slots: int
    cached: int  # the driver's own knowledge: to a rank these blocks are free


@dataclass(frozen=True, slots=True)
class Figures:
    """Counts for gauges and for load."""

    waiting: int
    running: int
    slots: int
    blocks: dict[str, int]


@dataclass
class _OpenPush:
    """A push that the ranks know of. ``table``: blocks that wait for its end."""

    unheard: set[int]
    table: BlockTable | None = None


@dataclass
class _Group:
    """One group. ``held``: who has a slot of it, by slot."""

    pool: GroupPool
    free_slots: list[int]
    held: dict[int, Sequence] = field(default_factory=dict)

    def room_beside(self, seq: Sequence, keys: list[bytes]) -> int | None:
        """See ``GroupPool.room_beside``; None without a free slot too."""
        return self.pool.room_beside(seq.split, seq.num_blocks, keys) if self.free_slots else None

    def figures(self, shard: int, late: list[BlockTable]) -> RankFigures:
        """Of the ranks that keep this shard. ``late``: blocks in quarantine."""
        tables = [seq.table for seq in self.held.values() if seq.is_admitted and seq.table]
        coming = [seq.table for seq in self.held.values() if seq.is_announced and not seq.is_admitted and seq.table]
        live = {block for table in tables for block in table.shard(shard)}
        leaving = {block for table in late if table.group == self.pool.group for block in table.shard(shard)}
        return RankFigures(
            live=len(live),
            reserved=sum(len(table.unshared(shard)) for table in coming),
            quarantined=len(leaving - live),
            slots=len(tables),
            cached=self.pool.shards[shard].count(BlockState.CACHED),
        )


class Room:
    """Blocks and slots of one instance, and who waits for them.

    Args:
        num_shards: ranks that the blocks of a sequence are spread over.
        num_ranks: ranks of the instance, group after group; rank r keeps shard ``r % num_shards``.
        num_groups: parts of the instance that have sequences of their own, each with ``max_num_seqs / num_groups`` slots:
            group g has the numbers from ``g * max_num_seqs / num_groups`` on.
    """

    def __init__(self, config: EngineConfig, *, num_shards: int, num_ranks: int, num_groups: int = 1) -> None:
        assert config.max_num_seqs % num_groups == num_ranks % num_groups == 0, (config.max_num_seqs, num_ranks, num_groups)
        self._config = config
        self._num_ranks = num_ranks
        self._num_shards = num_shards
        self._num_slots = config.max_num_seqs // num_groups
        self._groups = [
            _Group(
                GroupPool(group, num_shards, config.num_blocks),
                list(range((group + 1) * self._num_slots - 1, group * self._num_slots - 1, -1)),
            )
            for group in range(num_groups)
        ]
        self.prefixes = Prefixes([group.pool for group in self._groups], config)
        self._waiting: list[Sequence] = []  # in the order in which they get room
        self._pushes: dict[str, _OpenPush] = {}

    def enqueue(self, request: Request, num_tokens: int) -> Sequence:
        """Stand in line. Raises InvalidRequest for what an empty group could not hold, and Overloaded."""
        split = BlockSplit.for_prompt(self._num_shards, self._config.block_size, request.prompt_token_ids)
        seq = Sequence(request=request, num_tokens=num_tokens, split=split)
        pool = self._groups[0].pool  # all are alike
        if not pool.can_ever_hold(split, seq.num_blocks):
            room = sum(shard.num_usable for shard in pool.shards) * self._config.block_size
            raise InvalidRequest(
                f"{num_tokens} tokens of prompt and answer do not fit: this instance has room for {room}",
                code="context_length_exceeded",
            )
        if len(self._waiting) >= self._config.max_queued_requests:
            raise self.overloaded(f"{len(self._waiting)} requests are waiting already")
        self.prefixes.name(seq)
        insort(self._waiting, seq, key=lambda waiting: waiting.request.priority)  # behind its equals
        return seq

    def overloaded(self, message: str) -> Overloaded:
        """The refusal; the longer the line, the longer the client should stay away."""
        return Overloaded(message, retry_after_s=1 + len(self._waiting) // self._config.max_num_seqs)

    def leave(self, seq: Sequence) -> None:
        """Step out of the line."""
        self._waiting.remove(seq)

    def admit_waiting(self) -> list[Sequence]:
        """Give room to those in front, as far as it goes."""
        admitted = []
        while self._waiting:
            seq = self._waiting[0]
            keys = self.prefixes.shareable(seq)
            group = self._roomiest(seq, keys)
            if group is None:
                break
            del self._waiting[0]
            seq.table = group.pool.allocate(seq.split, seq.num_blocks, BlockState.RESERVED, keys)
            seq.slot, seq.stage = group.free_slots.pop(), Stage.HELD
            group.held[seq.slot] = seq
            admitted.append(seq)
        return admitted

    def tenant(self, slot: int) -> Sequence:
        """Who has this slot."""
        return self._groups[slot // self._num_slots].held[slot]

    def activate(self, seq: Sequence) -> None:
        """The ranks are about to be told of this sequence."""
        assert seq.table is not None
        self._groups[seq.group].pool.activate(seq.table)
        if seq.push:
            self._pushes[seq.push.transfer_id] = _OpenPush(set(range(self._num_ranks)))

    def has_open_push(self, seq: Sequence) -> bool:
        """Whether lanes may still read the blocks of this sequence."""
        return seq.push is not None and seq.push.transfer_id in self._pushes

    def free(self, seq: Sequence) -> None:
        """Slot and blocks come back; the blocks of an open push when its lanes are quiet."""
        assert seq.table is not None
        group = self._groups[seq.group]
        del group.held[seq.slot]
        group.free_slots.append(seq.slot)
        push = self._pushes.get(seq.push.transfer_id) if seq.push else None
        if push and seq.push:
            push.table = seq.table
            group.pool.quarantine(seq.table)
            logger().warning("blocks_quarantined", transfer=seq.push.transfer_id, blocks=len(seq.table.blocks))
        else:
            group.pool.release(seq.table)

    def closed(self, event: TransferClosed) -> None:
        """A rank's part of a push is over. The last one ends the quarantine. Other transfers are ignored."""
        push = self._pushes.get(event.transfer_id)
        if push is None:
            return
        push.unheard.discard(event.rank)
        if not push.unheard:
            del self._pushes[event.transfer_id]
            if push.table is not None:
                self._groups[push.table.group].pool.release(push.table)

    def figures(self) -> Figures:
        """Counts for gauges and for load."""
        return Figures(
            waiting=len(self._waiting),
            running=sum(len(group.held) for group in self._groups),
            slots=self._config.max_num_seqs,
            blocks={state.value: sum(group.pool.count(state) for group in self._groups) for state in BlockState},
        )

    def cached_by_rank(self) -> list[int]:
        """Blocks of each rank that are kept without a holder: the driver's own knowledge, of now."""
        ranks_each = self._num_ranks // len(self._groups)
        places = ((self._groups[rank // ranks_each], rank % self._num_shards) for rank in range(self._num_ranks))
        return [group.pool.shards[shard].count(BlockState.CACHED) for group, shard in places]

    def by_rank(self) -> list[RankFigures]:
        """What each rank holds when all plans so far are executed."""
        late = [push.table for push in self._pushes.values() if push.table]
        by_shard = [[group.figures(shard, late) for shard in range(self._num_shards)] for group in self._groups]
        ranks_each = self._num_ranks // len(self._groups)
        return [by_shard[rank // ranks_each][rank % self._num_shards] for rank in range(self._num_ranks)]

    def _roomiest(self, seq: Sequence, keys: list[bytes]) -> _Group | None:
        """Where most is left beside this sequence; of equals where fewest run, then the first. None: nowhere is room."""
        rooms = [(group.room_beside(seq, keys), group) for group in self._groups]
        fitting = [(room, -len(group.held), group) for room, group in rooms if room is not None]
        return max(fitting, key=lambda place: place[:2])[2] if fitting else None
