"""Two small pools in one process: caches with distinct contents, lanes over a loopback that can fail, reports in lists."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from longcat_pd.faults import Switches
from longcat_pd.kv_cache.layout import BlockSplit
from longcat_pd.kv_cache.spec import CacheEntry, CacheSpec
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.kv_transfer.arrival import ArrivalLanes
from longcat_pd.kv_transfer.faulty_lanes import FaultyCaller
from longcat_pd.kv_transfer.frames import Header, decode_header
from longcat_pd.kv_transfer.loopback import LoopbackCaller, LoopbackLane, LoopbackNetwork
from longcat_pd.kv_transfer.messages import Arrival, Push, TransferClosed
from longcat_pd.kv_transfer.plan import TransferPlan
from longcat_pd.kv_transfer.push import PrefillShape, PushLanes
from longcat_pd.kv_transfer.sides import LaneOptions
from longcat_pd.kv_transfer.transport import LaneEnd
from longcat_pd.wire import pack

BLOCK = 4
CPU = torch.device("cpu")


def spec(layers: range) -> CacheSpec:
    entries = []
    for layer in layers:
        for attention in (2 * layer, 2 * layer + 1):
            entries.append(CacheEntry(f"latent.{attention}", attention, 6, torch.float32))
            entries.append(CacheEntry(f"rope.{attention}", attention, 2, torch.float32))
        entries.append(CacheEntry(f"index.{2 * layer}", 2 * layer, 3, torch.float32))
    return CacheSpec(tuple(entries))


class Reports:
    """Collects TransferClosed; waits for a number of them."""

    def __init__(self) -> None:
        self.all: list[TransferClosed] = []
        self._changed = threading.Condition()

    def __call__(self, closed: TransferClosed) -> None:
        with self._changed:
            self.all.append(closed)
            self._changed.notify_all()

    def wait(self, count: int, timeout_s: float = 60.0) -> list[TransferClosed]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.all) >= count, timeout_s), self.all
            return list(self.all)


@dataclass
class WatchedCaller:
    """Tells the rig of each message that leaves."""

    rig: Rig
    inner: LoopbackCaller

    def open(self, target: LaneEnd, address: tuple[str, int], timeout_s: float) -> WatchedLane:
        return WatchedLane(self.rig, self.inner.open(target, address, timeout_s))

    def close(self) -> None:
        self.inner.close()


@dataclass
class WatchedLane:
    rig: Rig
    inner: LoopbackLane

    def send(self, message: Sequence[torch.Tensor]) -> None:
        if message[0].dtype == torch.int64:
            self.rig.on_message(decode_header(message[0]))
        self.inner.send(message)

    def drain(self, timeout_s: float) -> None:
        self.inner.drain(timeout_s)

    def receive_into(self, tensor: torch.Tensor, timeout_s: float | None) -> None:
        self.inner.receive_into(tensor, timeout_s)

    def close(self) -> None:
        self.inner.close()


@dataclass
class Rig:
    """P (stages x cp) and D (groups x kvp)."""

    stages: tuple[int, ...] = (2,)
    cp: int = 1
    kvp: int = 1
    groups: int = 1
    num_blocks: int = 64
    options: LaneOptions = field(default_factory=lambda: LaneOptions(timeout_s=30.0))
    network: LoopbackNetwork = field(default_factory=LoopbackNetwork)
    switches: Switches = field(default_factory=Switches)
    on_message: Callable[[Header], None] = lambda _header: None  # each that is about to leave

    def __post_init__(self) -> None:
        self.pushed, self.arrived = Reports(), Reports()
        self.push: list[PushLanes] = []
        self.arrival: list[ArrivalLanes] = []
        self.source_caches: list[KVCache] = []
        self.target_caches: list[KVCache] = []
        for rank in range(self.groups * self.kvp):
            end = LaneEnd("d0", "d-life", rank)
            cache = KVCache(spec(range(sum(self.stages))), self.num_blocks, BLOCK, CPU)
            self.target_caches.append(cache)
            self.arrival.append(
                ArrivalLanes(
                    end,
                    self.kvp,
                    cache=cache,
                    listener=self.network.listen(end),
                    options=self.options,
                    report=self.arrived,
                )
            )
        shape = PrefillShape(layers_per_stage=self.stages, cp_size=self.cp)
        for rank in range(len(self.stages) * self.cp):
            end = LaneEnd("p0", "p-life", rank)
            stage = rank // self.cp
            first = sum(self.stages[:stage])
            cache = KVCache(spec(range(first, first + self.stages[stage])), self.num_blocks, BLOCK, CPU)
            for entry in cache.spec.entries:
                cache.tensor(entry.name).copy_(torch.randn(cache.tensor(entry.name).shape))
            self.source_caches.append(cache)
            self.push.append(
                PushLanes(
                    end,
                    shape,
                    cache=cache,
                    caller=FaultyCaller(WatchedCaller(self, self.network.caller(end)), self.switches, cache),
                    options=self.options,
                    report=self.pushed,
                )
            )

    def close(self) -> None:
        for lanes in [*self.push, *self.arrival]:
            lanes.close()


@dataclass
class Handover:
    """One transfer in a rig. ``source_blocks``, ``target_blocks``: local ids by block number.

    ``num_held``: blocks that the target has already; nothing may come for them.
    """

    rig: Rig
    transfer_id: str
    prompt_len: int
    source_start: int = 0
    target_start: int = 0
    group: int = 0
    generation: int = 1
    first_block_id: int = 1
    num_held: int = 0

    def __post_init__(self) -> None:
        self.source_split = BlockSplit(self.rig.cp, BLOCK, self.source_start)
        self.target_split = BlockSplit(self.rig.kvp, BLOCK, self.target_start)
        self.num_blocks = -(-self.prompt_len // BLOCK)
        # one block more than the prompt needs, as a reservation for the answer has; ids differ on both sides
        self.source_blocks = [1 + self.source_split.local_index(b) for b in range(self.num_blocks)]
        self.target_blocks = [
            self.first_block_id + 2 * self.target_split.local_index(b) for b in range(self.num_blocks + 1)
        ]
        self.plan = TransferPlan(
            self.rig.stages, self.source_split, self.target_split, self.group * self.rig.kvp, self.num_blocks, self.num_held
        )

    def announce(self) -> None:
        arrival = Arrival(
            transfer_id=self.transfer_id,
            group=self.group,
            peer="p0",
            peer_incarnation="p-life",
            source_cp_size=self.rig.cp,
            source_layers=self.rig.stages,
            prompt_len=self.prompt_len,
            blocks=pack(self.target_blocks),
            split_start=self.target_start,
            source_split_start=self.source_start,
            generation=self.generation,
            first_block=self.num_held,
        )
        for lanes in self.rig.arrival:
            lanes.announce(arrival)

    def begin(self) -> None:
        push = Push(
            transfer_id=self.transfer_id,
            peer="d0",
            peer_incarnation="d-life",
            lane_host="",
            lane_port=0,
            kvp_size=self.rig.kvp,
            first_rank=self.group * self.rig.kvp,
            blocks=pack(self.target_blocks),
            split_start=self.target_start,
            generation=self.generation,
            first_block=self.num_held,
        )
        for lanes in self.rig.push:
            lanes.begin(push, prompt_len=self.prompt_len, blocks=pack(self.source_blocks), split_start=self.source_start)

    def compute(self, *, chunk_blocks: int = 1 << 20, num_found: int = 0) -> None:
        """``num_found``: blocks that the source had already; they go with the first chunk."""
        for begin in range(num_found, self.num_blocks, chunk_blocks):
            first, end = 0 if begin == num_found else begin, min(begin + chunk_blocks, self.num_blocks)
            for rank, lanes in enumerate(self.rig.push):
                for layer in self.plan.layers_of(rank):
                    lanes.push_layer(self.transfer_id, layer, first, end, is_last_chunk=end == self.num_blocks)

    def mismatches(self, first_block: int = 0) -> list[str]:
        """Blocks of the target caches from ``first_block`` on that are not those of the source."""
        wrong = []
        for layer in range(self.plan.num_layers):
            for block in range(first_block, self.num_blocks):
                source, target = self.plan.source_of(layer, block), self.plan.target_of(block)
                for entry in self.rig.source_caches[source].spec.entries_of_layer(layer):
                    ours = self.rig.source_caches[source].tensor(entry.name)[self.source_blocks[block]]
                    theirs = self.rig.target_caches[target].tensor(entry.name)[self.target_blocks[block]]
                    if not torch.equal(ours, theirs):
                        wrong.append(f"{entry.name} block {block}")
        return wrong
