"""Prefill rank: finished layers of granted sequences leave on lanes, one thread for each lane.

Owns the queues, the staging of blocks and the count of what has left. Knows which block goes where from ``TransferPlan``;
knows no sequences, steps or decode slots.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from longcat_pd.kv_cache.layout import BlockSplit
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.kv_transfer.frames import (
    NO_DIGEST,
    Header,
    Run,
    block_digest,
    encode_body,
    encode_header,
    transfer_key,
    wants_digest,
)
from longcat_pd.kv_transfer.messages import Push, TransferClosed
from longcat_pd.kv_transfer.plan import TransferPlan
from longcat_pd.kv_transfer.sides import LaneCounts, LaneOptions, Report
from longcat_pd.kv_transfer.transport import Caller, Lane, LaneClosed, LaneEnd, LaneTimeout
from longcat_pd.wire import unpack

_JOIN_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillShape:
    """Layout of the prefill pool, as far as a rank needs it for the hand-over."""

    layers_per_stage: tuple[int, ...]  # with the draft layer if it travels
    cp_size: int


@dataclass(eq=False)
class _Transfer:
    """One push in progress. Everything is guarded by the lock of ``PushLanes``."""

    push: Push
    key: int
    plan: TransferPlan
    prompt_len: int
    local_blocks: list[int]
    lanes: dict[int, _PushLane]
    ended: set[int] = field(default_factory=set)
    num_bytes: int = 0
    bytes_before_last_layer: int = 0
    reading: int = 0  # lane threads that are copying from its blocks
    is_retired: bool = False  # its sequence has left
    reason: str | None = None  # set: given up

    def sent_from(self, cp_rank: int) -> list[int]:
        """Local ids of the blocks that lanes read on this rank."""
        numbers = self.plan.source_split.blocks_of(cp_rank, self.plan.num_blocks)
        return [self.local_blocks[number] for number in numbers if number >= self.plan.first_block]


@dataclass(frozen=True, slots=True)
class _Item:
    """What a lane thread has to do: blocks of a layer, or (no blocks) the end of a transfer."""

    transfer: _Transfer
    layer: int = 0
    blocks: tuple[int, ...] = ()


class PushLanes:
    """``PushSide`` over any transport.

    Args:
        me: this rank.
        shape: layout of the own pool.
        cache: where the blocks are; ``cache.spec`` names the entries of each layer.
        caller: opens lanes.
        report: is told ``TransferClosed``, from the calling or from a lane thread.
    """

    def __init__(
        self, me: LaneEnd, shape: PrefillShape, *, cache: KVCache, caller: Caller, options: LaneOptions, report: Report
    ) -> None:
        self.me = me
        self.cache = cache
        self.caller = caller
        self.options = options
        self.changed = threading.Condition()
        self._shape = shape
        self._report = report
        self._transfers: dict[str, _Transfer] = {}
        self._lanes: dict[LaneEnd, _PushLane] = {}

    def begin(self, push: Push, *, prompt_len: int, blocks: bytes, split_start: int) -> None:
        """A sequence with a grant was admitted."""
        block_size = self.cache.block_size
        target_split = BlockSplit(push.kvp_size, block_size, push.split_start)
        source_split = BlockSplit(self._shape.cp_size, block_size, split_start)
        num_blocks = source_split.num_blocks(prompt_len)
        plan = TransferPlan(
            self._shape.layers_per_stage, source_split, target_split, push.first_rank, num_blocks, push.first_block
        )
        with self.changed:
            assert push.transfer_id not in self._transfers, push.transfer_id
            lanes = {rank: self._lane(push, rank) for rank in plan.targets_of(self.me.rank)}
            key = transfer_key(push.transfer_id, push.generation)
            transfer = _Transfer(push, key, plan, prompt_len, list(unpack(blocks)), lanes)
            self._transfers[push.transfer_id] = transfer
            self._close_if_done(transfer)

    def push_layer(self, transfer_id: str, layer: int, first_block: int, end_block: int, *, is_last_chunk: bool) -> None:
        """Layer ``layer`` of these block numbers is final."""
        with self.changed:
            transfer = self._transfers.get(transfer_id)
            if transfer is None or transfer.reason is not None:  # given up, though a lane may still read its blocks
                return
            plan, me = transfer.plan, self.me.rank
            is_end = is_last_chunk and layer == plan.layers_of(me)[-1]
            if is_end:
                transfer.bytes_before_last_layer = transfer.num_bytes
            for rank, lane in transfer.lanes.items():
                blocks = tuple(plan.blocks_between(me, rank, first_block, end_block))
                if blocks:
                    lane.queue.append(_Item(transfer, layer, blocks))
                if is_end:
                    lane.queue.append(_Item(transfer))
            self.changed.notify_all()

    def retire(self, transfer_id: str) -> None:
        """Its sequence has left its slot."""
        with self.changed:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None:
                transfer.is_retired = True

    def cancel(self, transfer_id: str) -> None:
        """Give up what is not sent yet."""
        with self.changed:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None:
                self.give_up(transfer, "aborted: cancelled on the prefill side")

    def counts(self) -> LaneCounts:
        """For the accounts."""
        with self.changed:
            unsent = sum(lane.num_unsent() for lane in self._lanes.values())
            late = [transfer for transfer in self._transfers.values() if transfer.is_retired]
            cp_rank = self.me.rank % self._shape.cp_size
            return LaneCounts(unsent=unsent, quarantined=frozenset(b for t in late for b in t.sent_from(cp_rank)))

    def open_through(self, wrap: Callable[[Caller], Caller]) -> None:
        """See ``PushSide``."""
        self.caller = wrap(self.caller)

    def close(self) -> None:
        """End all lanes; what is open is given up."""
        with self.changed:
            for transfer in list(self._transfers.values()):
                self.give_up(transfer, "aborted: the rank ends")
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.close()
        self.caller.close()

    def give_up(self, transfer: _Transfer, reason: str) -> None:
        """Take back what is queued and tell the targets. With ``changed`` held; also called by lanes."""
        if transfer.reason is not None:
            return
        transfer.reason = reason
        for lane in transfer.lanes.values():
            lane.forget(transfer)
        self._close_if_done(transfer)
        self.changed.notify_all()

    def open_with(self, keys: set[int]) -> list[_Transfer]:
        """The open transfers with these keys. With ``changed`` held."""
        return [t for t in self._transfers.values() if t.key in keys]

    def note_sent(self, transfer: _Transfer, num_bytes: int) -> None:
        """Bytes of a data message have left. With ``changed`` held."""
        transfer.num_bytes += num_bytes

    def note_read(self, transfer: _Transfer) -> None:
        """A lane thread has copied what it needs from the blocks. With ``changed`` held."""
        transfer.reading -= 1
        self._close_if_done(transfer)

    def note_ended(self, transfer: _Transfer, rank: int) -> None:
        """All messages to one target have left, the end included. With ``changed`` held."""
        transfer.ended.add(rank)
        self._close_if_done(transfer)

    def _lane(self, push: Push, rank: int) -> _PushLane:
        target = LaneEnd(push.peer, push.peer_incarnation, rank)
        lane = self._lanes.get(target)
        if lane is None:
            self._end_old_lives(target)
            lane = self._lanes[target] = _PushLane(self, target, (push.lane_host, push.lane_port))
            lane.thread.start()
        return lane

    def _end_old_lives(self, target: LaneEnd) -> None:
        for other in [o for o in self._lanes if o.instance == target.instance and o.incarnation != target.incarnation]:
            self._lanes.pop(other).end_soon()

    def _close_if_done(self, transfer: _Transfer) -> None:
        is_sent = len(transfer.ended) == len(transfer.lanes)
        is_quiet = transfer.reason is not None and transfer.reading == 0
        if not (is_sent or is_quiet) or self._transfers.get(transfer.push.transfer_id) is not transfer:
            return
        del self._transfers[transfer.push.transfer_id]
        closed = TransferClosed(
            transfer_id=transfer.push.transfer_id,
            rank=self.me.rank,
            ok=transfer.reason is None,
            reason=transfer.reason or "",
            num_bytes=transfer.num_bytes,
            bytes_before_last_layer=transfer.bytes_before_last_layer,
        )
        self._report(closed)


class _PushLane:
    """The queue and the thread of one lane. ``queue`` and ``started`` are guarded by ``owner.changed``."""

    def __init__(self, owner: PushLanes, target: LaneEnd, address: tuple[str, int]) -> None:
        self.queue: deque[_Item] = deque()
        self.thread = threading.Thread(target=self._run, name=f"push-{target.instance}.{target.rank}", daemon=True)
        self._owner = owner
        self._target = target
        self._address = address
        self._in_work: _Item | None = None
        self._started: set[int] = set()  # keys of which something has been sent here
        self._aborts: deque[int] = deque()  # keys whose end (not ok) the target must hear
        self._lane: Lane | None = None
        self._is_ending = False

    def num_unsent(self) -> int:
        """Messages of living transfers that have not left."""
        is_busy = self._in_work is not None and self._in_work.transfer.reason is None
        return len(self.queue) + int(is_busy)

    def forget(self, transfer: _Transfer) -> None:
        """Drop what is queued of a transfer that was given up."""
        self.queue = deque(item for item in self.queue if item.transfer is not transfer)
        if transfer.key in self._started:
            self._aborts.append(transfer.key)

    def end_soon(self) -> None:
        """Let the thread end, without waiting for it. With ``owner.changed`` held."""
        self._is_ending = True
        if self._lane is not None:
            self._lane.close()
        self._owner.changed.notify_all()

    def close(self) -> None:
        """End the thread."""
        with self._owner.changed:
            self.end_soon()
        self.thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                if isinstance(work, int):
                    self._send_abort(work)
                else:
                    self._work_on(work)
        finally:  # also when a defect of ours ends the thread: no transfer waits for a lane that nobody serves
            self._break(None, "aborted: the lane ends")

    def _work_on(self, item: _Item) -> None:
        to = f"{self._target.instance} rank {self._target.rank}"
        try:
            self._send_item(item)
        except LaneTimeout as error:
            self._break(item.transfer, f"timed_out: lane to {to}: {error}")
        except LaneClosed as error:
            self._break(item.transfer, f"peer_lost: lane to {to}: {error}")
        with self._owner.changed:
            self._in_work = None

    def _next(self) -> _Item | int | None:
        with self._owner.changed:
            self._owner.changed.wait_for(lambda: self._is_ending or self._aborts or self.queue)
            if self._is_ending:
                return None
            if self._aborts:
                return self._aborts.popleft()
            self._in_work = item = self.queue.popleft()
            if item.blocks:
                item.transfer.reading += 1
            return item

    def _send_item(self, item: _Item) -> None:
        transfer = item.transfer
        if not item.blocks:
            with self._owner.changed:
                is_first = self._note_start(transfer)
            self._send(transfer, [encode_header(Header(transfer.key, is_end=True, ok=True))], is_first=is_first)
            with self._owner.changed:
                self._started.discard(transfer.key)
                self._owner.note_ended(transfer, self._target.rank)
            return
        message = self._stage(item)
        with self._owner.changed:
            self._owner.note_read(transfer)
            if transfer.reason is not None:
                return
            is_first = self._note_start(transfer)  # in this turn: who gives it up from now on tells the target
        self._send(transfer, message, is_first=is_first)
        with self._owner.changed:
            self._owner.note_sent(transfer, sum(t.nbytes for t in message))

    def _stage(self, item: _Item) -> list[torch.Tensor]:
        """Copy the blocks, so that the lane never reads from cache that may have another owner by then."""
        transfer, cache, mode = item.transfer, self._owner.cache, self._owner.options.digest
        local = torch.tensor([transfer.local_blocks[b] for b in item.blocks], dtype=torch.int64)
        runs = []
        for number, entry in enumerate(cache.spec.entries_of_layer(item.layer)):
            data = cache.tensor(entry.name).index_select(0, local.to(cache.tensor(entry.name).device)).cpu()
            digests = [NO_DIGEST] * len(item.blocks)
            for i, block in enumerate(item.blocks):
                if wants_digest(mode, transfer.key, number, block):
                    digests[i] = block_digest(data[i], transfer.prompt_len - block * cache.block_size)
            runs.append(Run(number, item.blocks, tuple(digests), data))
        body = encode_body(runs)
        num_items = len(runs) * len(item.blocks)
        header = Header(transfer.key, is_end=False, layer=item.layer, num_items=num_items, body_bytes=len(body))
        return [encode_header(header), body]

    def _note_start(self, transfer: _Transfer) -> bool:
        """Whether nothing of this transfer was sent here before. With ``owner.changed`` held."""
        is_first = transfer.key not in self._started
        self._started.add(transfer.key)
        return is_first

    def _send(self, transfer: _Transfer, message: list[torch.Tensor], *, is_first: bool) -> None:
        """Send on the open lane, or on a new one if nothing of this transfer is on the old one."""
        is_first_on_old = is_first and self._lane is not None
        try:
            self._send_now(message)
        except LaneClosed:
            if not is_first_on_old:
                raise
            self._break(None, "peer_lost: the lane broke", spare=transfer.key)
            self._send_now(message)

    def _send_now(self, message: list[torch.Tensor]) -> None:
        options = self._owner.options
        lane = self._lane
        if lane is None:
            lane = self._owner.caller.open(self._target, self._address, min(options.connect_timeout_s, options.timeout_s))
            with self._owner.changed:
                self._lane = lane
                if self._is_ending:
                    lane.close()
        lane.send(message)
        lane.drain(options.timeout_s)

    def _send_abort(self, key: int) -> None:
        with self._owner.changed:
            self._started.discard(key)
        try:
            if self._lane is not None:
                self._send_now([encode_header(Header(key, is_end=True, ok=False))])
        except (LaneClosed, LaneTimeout):
            self._break(None, "peer_lost: the lane broke")

    def _break(self, culprit: _Transfer | None, reason: str, *, spare: int | None = None) -> None:
        """The lane is gone: every transfer that has something on it has failed, but ``spare``."""
        self._drop_lane()
        with self._owner.changed:
            keys = self._started - {spare}
            self._started -= keys
            self._aborts.clear()
            failed = self._owner.open_with(keys)
            for transfer in failed if culprit is None else [culprit, *failed]:
                self._owner.give_up(transfer, reason)

    def _drop_lane(self) -> None:
        with self._owner.changed:
            lane, self._lane = self._lane, None
        if lane is not None:
            lane.close()
