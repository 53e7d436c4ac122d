"""The memory of an instance and the line for it: blocks of every shard, slots, and the quarantine of unfinished pushes.

Admission takes the worst case of a sequence from every shard at once, first come first served, so nothing that runs is ever
interrupted and a large sequence is not overtaken by small ones. Pure; used by the scheduler only. Knows no plan.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from longcat_pd.config.schema import EngineConfig
from longcat_pd.engine.prefixes import Prefixes
from longcat_pd.engine.request import Request
from longcat_pd.engine.sequence import Sequence, Stage
from longcat_pd.errors import InvalidRequest, Overloaded
from longcat_pd.kv_cache.block_pool import BlockPool, BlockState, GroupPool
from longcat_pd.kv_cache.block_table import BlockTable
from longcat_pd.kv_cache.layout import BlockSplit
from longcat_pd.kv_transfer.messages import TransferClosed


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


class Room:
    """Blocks and slots of one instance, and who waits for them.

    Args:
        num_shards: ranks that the blocks of a sequence are spread over.
        num_ranks: ranks of the instance; rank r keeps shard ``r % num_shards``.
    """

    def __init__(self, config: EngineConfig, *, num_shards: int, num_ranks: int) -> None:
        self._config = config
        self._num_ranks = num_ranks
        self._pool = GroupPool(0, num_shards, config.num_blocks)
        self.prefixes = Prefixes(self._pool, config)
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._waiting: deque[Sequence] = deque()
        self._held: dict[int, Sequence] = {}  # by slot
        self._pushes: dict[str, _OpenPush] = {}

    def enqueue(self, request: Request, num_tokens: int) -> Sequence:
        """Stand in line. Raises InvalidRequest for what an empty instance could not hold, and Overloaded."""
        split = BlockSplit.for_prompt(len(self._pool.shards), self._config.block_size, request.prompt_token_ids)
        seq = Sequence(request=request, num_tokens=num_tokens, split=split)
        if not self._pool.can_ever_hold(split, seq.num_blocks):
            room = sum(shard.num_usable for shard in self._pool.shards) * self._config.block_size
            raise InvalidRequest(
                f"{num_tokens} tokens of prompt and answer do not fit: this instance has room for {room}",
                code="context_length_exceeded",
            )
        if len(self._waiting) >= self._config.max_queued_requests:
            raise self.overloaded(f"{len(self._waiting)} requests are waiting already")
        self.prefixes.name(seq)
        self._waiting.append(seq)
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
        while self._waiting and self._free_slots:
            seq = self._waiting[0]
            keys = self.prefixes.shareable(seq)
            table = self._pool.allocate(seq.split, seq.num_blocks, BlockState.RESERVED, keys)
            if table is None:
                break
            self._waiting.popleft()
            seq.table, seq.slot, seq.stage = table, self._free_slots.pop(), Stage.HELD
            self._held[seq.slot] = seq
            admitted.append(seq)
        return admitted

    def tenant(self, slot: int) -> Sequence:
        """Who has this slot."""
        return self._held[slot]

    def activate(self, seq: Sequence) -> None:
        """The ranks are about to be told of this sequence."""
        assert seq.table is not None
        self._pool.activate(seq.table)
        if seq.push:
            self._pushes[seq.push.transfer_id] = _OpenPush(set(range(self._num_ranks)))

    def has_open_push(self, seq: Sequence) -> bool:
        """Whether lanes may still read the blocks of this sequence."""
        return seq.push is not None and seq.push.transfer_id in self._pushes

    def free(self, seq: Sequence) -> None:
        """Slot and blocks come back; the blocks of an open push when its lanes are quiet."""
        assert seq.table is not None
        del self._held[seq.slot]
        self._free_slots.append(seq.slot)
        push = self._pushes.get(seq.push.transfer_id) if seq.push else None
        if push:
            push.table = seq.table
            self._pool.quarantine(seq.table)
        else:
            self._pool.release(seq.table)

    def closed(self, event: TransferClosed) -> None:
        """A rank's part of a push is over. The last one ends the quarantine. Other transfers are ignored."""
        push = self._pushes.get(event.transfer_id)
        if push is None:
            return
        push.unheard.discard(event.rank)
        if not push.unheard:
            del self._pushes[event.transfer_id]
            if push.table is not None:
                self._pool.release(push.table)

    def figures(self) -> Figures:
        """Counts for gauges and for load."""
        return Figures(
            waiting=len(self._waiting),
            running=len(self._held),
            slots=self._config.max_num_seqs,
            blocks={state.value: self._pool.count(state) for state in BlockState},
        )

    def by_rank(self) -> list[RankFigures]:
        """What each rank holds when all plans so far are executed."""
        live = [s.table for s in self._held.values() if s.table and s.is_admitted]
        reserved = [s.table for s in self._held.values() if s.table and s.is_announced and not s.is_admitted]
        late = [p.table for p in self._pushes.values() if p.table]

        def held(tables: list[BlockTable], shard: int) -> set[int]:
            return {block for table in tables for block in table.shard(shard)}

        def figures(shard: int, pool: BlockPool) -> RankFigures:
            in_use = held(live, shard)
            return RankFigures(
                live=len(in_use),
                reserved=sum(len(table.unshared(shard)) for table in reserved),
                quarantined=len(held(late, shard) - in_use),
                slots=len(live),
                cached=pool.count(BlockState.CACHED),
            )

        by_shard = [figures(shard, pool) for shard, pool in enumerate(self._pool.shards)]
        return [by_shard[rank % len(by_shard)] for rank in range(self._num_ranks)]
