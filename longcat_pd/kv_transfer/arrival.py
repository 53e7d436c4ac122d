"""Decode rank: blocks arrive on lanes and are put into the cache of the transfer that they belong to, or nowhere.

Owns the count of what has arrived, the check of digests, and the fence: bytes wait in a buffer of the lane and are copied
into blocks under a lock, only while their transfer is open. Knows no sequences and no steps.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from longcat_pd.kv_cache.layout import BlockSplit
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.kv_transfer.arrival_lane import JOIN_S, ArrivalLane, Message
from longcat_pd.kv_transfer.frames import (
    NO_DIGEST,
    Header,
    MalformedFrame,
    Run,
    Shape,
    block_digest,
    check_body,
    decode_body,
    transfer_key,
    wants_digest,
)
from longcat_pd.kv_transfer.messages import Arrival, TransferClosed
from longcat_pd.kv_transfer.plan import TransferPlan
from longcat_pd.kv_transfer.sides import LaneCounts, LaneOptions, Report
from longcat_pd.kv_transfer.transport import LaneEnd, Listener
from longcat_pd.log import Refusals
from longcat_pd.wire import unpack

_CLOSED_KEPT = 4096  # keys of ended transfers whose late bytes are known and thrown away: more than end within a time-out
_EARLY_BYTES = 64 << 20  # of transfers that are not announced yet; beyond that a lane waits


class _Rejected(Exception):
    """This data breaks its transfer. The text begins with the outcome."""


@dataclass(eq=False)
class _Incoming:
    """One announced transfer. Guarded by the lock of ``ArrivalLanes``."""

    arrival: Arrival
    key: int
    plan: TransferPlan
    local_blocks: list[int]
    missing: dict[int, int]  # source rank -> items that have not arrived
    ended: set[int] = field(default_factory=set)
    arrived: set[tuple[int, int, int]] = field(default_factory=set)  # layer, entry, block
    started: set[int] = field(default_factory=set)  # source ranks that have sent anything
    num_bytes: int = 0
    is_closed: bool = False


class ArrivalLanes:
    """``ArrivalSide`` over any transport.

    Args:
        me: this rank.
        kvp_size: ranks of a group; this rank's group is ``me.rank // kvp_size``.
        cache: where the blocks go; ``cache.spec`` names the entries of each layer.
        listener: tells of lanes that prefill ranks ask for.
        report: is told ``TransferClosed``, from the calling or from a lane thread.
    """

    def __init__(
        self, me: LaneEnd, kvp_size: int, *, cache: KVCache, listener: Listener, options: LaneOptions, report: Report
    ) -> None:
        self.me = me
        self.options = options
        self.changed = threading.Condition()
        self.refusals = Refusals()
        self._kvp_size = kvp_size
        self._cache = cache
        self._listener = listener
        self._report = report
        self._by_id: dict[str, _Incoming] = {}  # until adopted or dropped
        self._by_key: dict[int, _Incoming] = {}  # while open
        self._closed_keys: OrderedDict[int, None] = OrderedDict()
        self._early: dict[int, list[Message]] = {}  # not announced yet
        self._lanes: dict[tuple[str, int], ArrivalLane] = {}
        self._thread = threading.Thread(target=self._accept, name="lanes-accept", daemon=True)
        self._thread.start()

    def announce(self, arrival: Arrival) -> None:
        """These blocks will be filled; those of another group by others."""
        if arrival.group != self.me.rank // self._kvp_size:
            self._close_foreign(arrival)
            return
        block_size = self._cache.block_size
        source = BlockSplit(arrival.source_cp_size, block_size, arrival.source_split_start)
        target = BlockSplit(self._kvp_size, block_size, arrival.split_start)
        first_rank, num_blocks = arrival.group * self._kvp_size, source.num_blocks(arrival.prompt_len)
        plan = TransferPlan(arrival.source_layers, source, target, first_rank, num_blocks, arrival.first_block)
        incoming = _Incoming(
            arrival=arrival,
            key=transfer_key(arrival.transfer_id, arrival.generation),
            plan=plan,
            local_blocks=list(unpack(arrival.blocks)),
            missing={rank: self._num_items(plan, rank) for rank in plan.sources_of(self.me.rank)},
        )
        with self.changed:
            self._by_id[arrival.transfer_id] = self._by_key[incoming.key] = incoming
            self._close_if_done(incoming)
            self._catch_up(incoming)
            self.changed.notify_all()

    def drop(self, transfer_id: str) -> None:
        """Nothing is written into the blocks of this transfer any more."""
        with self.changed:
            incoming = self._by_id.pop(transfer_id, None)
            if incoming is not None:
                self._close(incoming, "aborted: dropped by the decode side")

    def adopt(self, transfer_id: str) -> None:
        """The blocks are live."""
        with self.changed:
            self._by_id.pop(transfer_id, None)

    def counts(self) -> LaneCounts:
        """For the accounts."""
        with self.changed:
            posted = sum(len(i.missing) - len(i.ended) for i in self._by_key.values())
            return LaneCounts(posted=posted, reserved_blocks=sum(self._num_reserved(i) for i in self._by_id.values()))

    def close(self) -> None:
        """End all lanes."""
        self._listener.close()
        self._thread.join(JOIN_S)
        with self.changed:
            for incoming in list(self._by_key.values()):
                self._close(incoming, "aborted: the rank ends")
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.close()

    def bound(self, header: Header) -> None:
        """Before its body is given room: not more than the blocks of a layer. Raises MalformedFrame."""
        if not header.is_end:
            check_body(header, self._shapes(header.layer), self._cache.num_blocks)

    def has_place_for(self, message: Message) -> bool:
        """Whether ``keep_if_early`` and ``deal_with`` may go on with it. With ``changed`` held."""
        if message.header.is_end or self._is_known(message.header.key):
            return True
        waiting = sum(len(m.body) for messages in self._early.values() for m in messages)
        return not waiting or waiting + len(message.body) <= _EARLY_BYTES

    def keep_if_early(self, message: Message) -> bool:
        """Keep a message whose transfer is not announced yet; False if it is. With ``changed`` held.

        The grant may be quicker than the plan with the announcement, which waits for the step before. A transfer that is
        never announced ends with the end that its source sends when it gives up.
        """
        key, header = message.header.key, message.header
        if self._is_known(key):
            return False
        if header.is_end and not header.ok:
            self._forget(key)
        else:
            self._early.setdefault(key, []).append(message)
        return True

    def deal_with(self, message: Message) -> None:
        """A message of a transfer that was announced. Raises MalformedFrame."""
        if message.header.is_end:
            self._ended(message.source, message.header)
        else:
            self._take(message.source, message.header, message.body)

    def _take(self, source: LaneEnd, header: Header, body: torch.Tensor) -> None:
        """A data message: check it, copy it. Of a closed transfer nothing is touched."""
        entries = self._cache.spec.entries_of_layer(header.layer)
        runs = decode_body(header, body, self._shapes(header.layer))
        with self.changed:
            incoming = self._open_from(source, header.key)
        if incoming is None:
            return
        try:
            for run in runs:
                self._check_digests(incoming, run)
            with self.changed:
                if incoming.is_closed:
                    return
                incoming.started.add(source.rank)
                for run in runs:
                    self._count(incoming, source.rank, header.layer, run)
                    local = torch.tensor([incoming.local_blocks[b] for b in run.blocks], dtype=torch.int64)
                    tensor = self._cache.tensor(entries[run.entry].name)
                    tensor.index_copy_(0, local.to(tensor.device), run.data.to(tensor.device))
                incoming.num_bytes += len(body)
        except _Rejected as error:
            with self.changed:
                self._close(incoming, str(error))

    def _shapes(self, layer: int) -> list[Shape]:
        entries = self._cache.spec.entries_of_layer(layer)
        return [((self._cache.block_size, entry.width), entry.dtype) for entry in entries]

    def _ended(self, source: LaneEnd, header: Header) -> None:
        """An end: with ``ok`` everything of this source must be there."""
        with self.changed:
            incoming = self._open_from(source, header.key)
            if incoming is None:
                return
            if not header.ok:
                self._close(incoming, f"peer_aborted: given up by {source.instance} rank {source.rank}")
            elif incoming.missing[source.rank]:
                lost = incoming.missing[source.rank]
                self._close(
                    incoming, f"aborted: incomplete, {lost} blocks of {source.instance} rank {source.rank} are lost"
                )
            else:
                incoming.ended.add(source.rank)
                self._close_if_done(incoming)

    def lost(self, source: LaneEnd, reason: str) -> None:
        """A lane broke: what was under way on it will not be complete."""
        with self.changed:
            for incoming in list(self._by_key.values()):
                arrival = incoming.arrival
                is_from = (arrival.peer, arrival.peer_incarnation) == (source.instance, source.incarnation)
                if is_from and source.rank in incoming.started - incoming.ended:
                    self._close(incoming, reason)
            for key in [k for k, messages in self._early.items() if any(m.source == source for m in messages)]:
                self._forget(key)

    def _catch_up(self, incoming: _Incoming) -> None:
        """What came before the announcement, while no lane can add to it. With ``changed`` held."""
        try:
            for message in self._early.pop(incoming.key, []):
                self.deal_with(message)
        except MalformedFrame as error:
            self._close(incoming, f"aborted: {error}")

    def _is_known(self, key: int) -> bool:
        return key in self._by_key or key in self._closed_keys

    def _accept(self) -> None:
        while (call := self._listener.next_call()) is not None:
            with self.changed:
                lane = ArrivalLane(self, call)
                old = self._lanes.get((call.source.instance, call.source.rank))
                self._lanes[call.source.instance, call.source.rank] = lane
            if old is not None:
                old.close()
            lane.thread.start()

    def _close_foreign(self, arrival: Arrival) -> None:
        """The rank has no part in it: nothing comes for it here, and nothing is kept of it."""
        with self.changed:
            self._forget(transfer_key(arrival.transfer_id, arrival.generation))
        self._report(TransferClosed(transfer_id=arrival.transfer_id, rank=self.me.rank, ok=True))

    def _num_items(self, plan: TransferPlan, source: int) -> int:
        num_entries = sum(len(self._cache.spec.entries_of_layer(layer)) for layer in plan.layers_of(source))
        return num_entries * len(plan.blocks_between(source, self.me.rank, 0, plan.num_blocks))

    def _num_reserved(self, incoming: _Incoming) -> int:
        arrival = incoming.arrival
        numbers = incoming.plan.target_split.blocks_of(self.me.rank % self._kvp_size, len(incoming.local_blocks))
        return sum(number >= arrival.first_block for number in numbers)

    def _open_from(self, source: LaneEnd, key: int) -> _Incoming | None:
        incoming = self._by_key.get(key)
        if incoming is None:
            return None
        arrival = incoming.arrival
        if (arrival.peer, arrival.peer_incarnation) != (source.instance, source.incarnation):
            return None
        if source.rank not in incoming.missing or source.rank in incoming.ended:
            self._close(incoming, f"aborted: rank {source.rank} of {source.instance} has nothing to send here")
            return None
        return incoming

    def _check_digests(self, incoming: _Incoming, run: Run) -> None:
        for i, (block, digest) in enumerate(zip(run.blocks, run.digests, strict=True)):
            if digest == NO_DIGEST and not wants_digest(self.options.digest, incoming.key, run.entry, block):
                continue
            num_tokens = incoming.arrival.prompt_len - block * self._cache.block_size
            if num_tokens <= 0 or block_digest(run.data[i], num_tokens) != digest:
                raise _Rejected(f"digest_mismatch: entry {run.entry}, block {block}")

    def _count(self, incoming: _Incoming, source: int, layer: int, run: Run) -> None:
        """Every (layer, entry, block) exactly once, from the rank and to the rank that the plan names."""
        plan = incoming.plan
        for block in run.blocks:
            item = (layer, run.entry, block)
            is_planned = plan.first_block <= block < plan.num_blocks and 0 <= layer < plan.num_layers
            if not is_planned or plan.source_of(layer, block) != source or plan.target_of(block) != self.me.rank:
                raise _Rejected(f"aborted: rank {source} sent layer {layer}, block {block}, which is not its own")
            if item in incoming.arrived:
                raise _Rejected(f"aborted: layer {layer}, entry {run.entry}, block {block} arrived twice")
            incoming.arrived.add(item)
        incoming.missing[source] -= len(run.blocks)

    def _close_if_done(self, incoming: _Incoming) -> None:
        if len(incoming.ended) == len(incoming.missing):
            self._close(incoming, "")

    def _close(self, incoming: _Incoming, reason: str) -> None:
        """With ``changed`` held."""
        if incoming.is_closed:
            return
        incoming.is_closed = True
        del self._by_key[incoming.key]
        self._forget(incoming.key)
        closed = TransferClosed(
            transfer_id=incoming.arrival.transfer_id,
            rank=self.me.rank,
            ok=not reason,
            reason=reason,
            num_bytes=incoming.num_bytes,
        )
        self._report(closed)
        self.changed.notify_all()

    def _forget(self, key: int) -> None:
        """From now on what comes for this transfer is thrown away."""
        self._early.pop(key, None)
        self._closed_keys[key] = None
        if len(self._closed_keys) > _CLOSED_KEPT:
            self._closed_keys.popitem(last=False)
