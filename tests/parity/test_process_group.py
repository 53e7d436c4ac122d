"""Lanes between real processes over gloo pair groups, and what a killed, stopped or restarted peer does to them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
import torch

from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.kv_transfer import process_group
from longcat_pd.kv_transfer.arrival import ArrivalLanes
from longcat_pd.kv_transfer.device_pair import carriers_of, no_carrier
from longcat_pd.kv_transfer.frames import HEADER_INTS
from longcat_pd.kv_transfer.messages import Arrival, Push
from longcat_pd.kv_transfer.process_group import GlooCaller, GlooListener, LaneMakers
from longcat_pd.kv_transfer.push import PrefillShape, PushLanes
from longcat_pd.kv_transfer.sides import LaneOptions
from longcat_pd.kv_transfer.transport import LaneClosed, LaneEnd
from longcat_pd.parallel.meeting import Signature
from longcat_pd.parallel.platform import platform_of
from longcat_pd.wire import pack, to_json
from tests.pretend import PairedRuntime
from tests.unit.transfer_rig import BLOCK, CPU, Reports, spec

HEADER_BYTES = 8 * HEADER_INTS  # all that is larger is the carrier's
CARRIERS = {False: no_carrier, True: carriers_of(replace(platform_of("cpu"), runtime=PairedRuntime()), 0)}
LAYERS = 2
PROMPT = 6 * BLOCK + 1
BLOCKS = pack(range(1, 8))


def value(entry_name: str, block: int) -> float:
    return float(int(entry_name.split(".")[1]) * 100 + block)


def prefill_rank(pipe: Connection, port: int, incarnation: str, timeout_s: float, is_carried: bool) -> None:
    """A process that pushes transfers by name; ``layers``: how many of them before it waits for the next order."""
    process_group.HOST_BYTES = HEADER_BYTES
    torch.set_num_threads(1)
    me = LaneEnd("p0", incarnation, 0)
    cache = KVCache(spec(range(LAYERS)), 16, BLOCK, CPU)
    for entry in cache.spec.entries:
        for block in range(16):
            cache.tensor(entry.name)[block] = value(entry.name, block)
    reports, caller = Reports(), GlooCaller(me, LaneMakers(CARRIERS[is_carried]))
    shape = PrefillShape(layers_per_stage=(LAYERS,), cp_size=1)
    options = LaneOptions(digest="all", timeout_s=timeout_s, connect_timeout_s=10.0)
    lanes = PushLanes(me, shape, cache=cache, caller=caller, options=options, report=reports)
    seen = 0
    while (order := pipe.recv()) is not None:
        transfer_id, generation, layers = order
        if layers < 0:
            lanes.cancel(transfer_id)
        elif layers == 0:
            push = Push(
                transfer_id=transfer_id,
                peer="d0",
                peer_incarnation="d",
                lane_host="127.0.0.1",
                lane_port=port,
                kvp_size=1,
                first_rank=0,
                blocks=BLOCKS,
                generation=generation,
            )
            lanes.begin(push, prompt_len=PROMPT, blocks=BLOCKS, split_start=0)
        else:
            lanes.push_layer(transfer_id, layers - 1, 0, 7, is_last_chunk=True)
        if layers in (-1, LAYERS):
            closed = reports.wait(seen + 1)[seen]
            seen += 1
            pipe.send((closed.ok, closed.reason, closed.num_bytes))
    lanes.close()


class Prefill:
    """Handle of such a process."""

    def __init__(self, port: int, incarnation: str = "p", timeout_s: float = 10.0, *, is_carried: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=prefill_rank, args=(theirs, port, incarnation, timeout_s, is_carried), daemon=True
        )
        self.process.start()
        theirs.close()

    def order(self, transfer_id: str, layers: int, generation: int = 1) -> None:
        self.pipe.send((transfer_id, generation, layers))

    def push_all(self, transfer_id: str, generation: int = 1) -> None:
        for layers in range(LAYERS + 1):
            self.order(transfer_id, layers, generation)

    def answer(self) -> tuple[bool, str, int]:
        assert self.pipe.poll(150.0), "no answer from the prefill process"
        ok, reason, num_bytes = self.pipe.recv()
        return ok, reason, num_bytes

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(60.0)

    def end(self) -> None:
        if self.process.is_alive():
            self.pipe.send(None)
            self.process.join(60.0)
        assert not self.process.is_alive()


class Decode:
    """The decode rank, in the process of the test. ``is_carried``: large tensors take a group of their own."""

    def __init__(self, timeout_s: float = 10.0, *, is_carried: bool = False) -> None:
        self.is_carried = is_carried
        me = LaneEnd("d0", "d", 0)
        self.cache = KVCache(spec(range(LAYERS)), 16, BLOCK, CPU)
        self.listener = GlooListener(me, ("127.0.0.1", 0), 5.0, makers=LaneMakers(CARRIERS[is_carried]))
        self.reports = Reports()
        options = LaneOptions(digest="all", timeout_s=timeout_s, connect_timeout_s=10.0)
        self.lanes = ArrivalLanes(me, 1, cache=self.cache, listener=self.listener, options=options, report=self.reports)

    @property
    def port(self) -> int:
        return self.listener.address[1]

    def prefill(self, incarnation: str = "p") -> Prefill:
        return Prefill(self.port, incarnation, is_carried=self.is_carried)

    def announce(self, transfer_id: str, incarnation: str = "p", generation: int = 1) -> None:
        arrival = Arrival(
            transfer_id=transfer_id,
            group=0,
            peer="p0",
            peer_incarnation=incarnation,
            source_cp_size=1,
            source_layers=(LAYERS,),
            prompt_len=PROMPT,
            blocks=BLOCKS,
            split_start=0,
            generation=generation,
        )
        self.lanes.announce(arrival)

    def is_complete(self) -> bool:
        return all(
            bool((self.cache.tensor(e.name)[b] == value(e.name, b)).all())
            for e in self.cache.spec.entries
            for b in range(1, 8)
        )

    def wipe(self) -> None:
        for entry in self.cache.spec.entries:
            self.cache.tensor(entry.name).zero_()


@pytest.fixture(params=[False, True], ids=["host", "carrier"])
def decode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Decode]:
    monkeypatch.setattr(process_group, "HOST_BYTES", HEADER_BYTES)
    side = Decode(is_carried=request.param)
    yield side
    side.lanes.close()


def test_transfers_then_kill_then_a_new_life(decode: Decode) -> None:
    prefill = decode.prefill()
    for number in range(3):
        decode.wipe()
        decode.announce(f"t{number}")
        prefill.push_all(f"t{number}")
        ok, reason, num_bytes = prefill.answer()
        assert ok, reason
        closed = decode.reports.wait(number + 1)[number]
        assert closed.ok, closed.reason
        assert closed.num_bytes <= num_bytes
        assert decode.is_complete()
        decode.lanes.adopt(f"t{number}")
    # killed after one layer: noticed on the lane itself
    decode.announce("dead")
    prefill.order("dead", 0)
    prefill.order("dead", 1)
    until = time.monotonic() + 60.0
    while not any(i.started for i in list(decode.lanes._by_key.values())):
        assert time.monotonic() < until, "nothing of it comes"
        time.sleep(0.05)
    prefill.kill()
    closed = decode.reports.wait(4)[3]
    assert not closed.ok
    assert closed.reason.startswith("peer_lost")
    decode.lanes.drop("dead")
    assert decode.lanes.counts().reserved_blocks == 0
    # another life of the same rank
    decode.wipe()
    second = decode.prefill("p-again")
    decode.announce("alive", "p-again")
    second.push_all("alive")
    assert second.answer()[0]
    assert decode.reports.wait(5)[4].ok
    assert decode.is_complete()
    second.end()


def test_cancel_then_another_transfer_on_the_same_lane(decode: Decode) -> None:
    prefill = decode.prefill()
    decode.announce("t")
    prefill.order("t", 0)
    prefill.order("t", 1)
    prefill.order("t", -1)
    ok, reason, _ = prefill.answer()
    assert not ok
    assert reason.startswith("aborted")
    decode.lanes.drop("t")
    assert not decode.reports.wait(1)[0].ok
    decode.wipe()
    decode.announce("t", generation=2)
    prefill.push_all("t", 2)
    assert prefill.answer()[0]
    assert decode.reports.wait(2)[1].ok
    assert decode.is_complete()
    prefill.end()


def test_a_decode_rank_that_takes_nothing_is_a_time_out_and_a_new_lane_heals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an announcement and without room for early bytes the target takes nothing more."""
    monkeypatch.setattr("longcat_pd.kv_transfer.arrival._EARLY_BYTES", 1)
    side = Decode(timeout_s=30.0)
    prefill = Prefill(side.port, timeout_s=4.0)
    prefill.push_all("t")
    ok, reason, _ = prefill.answer()
    assert not ok
    assert reason.startswith("timed_out")
    side.announce("t")
    side.lanes.drop("t")
    side.announce("u", generation=2)
    prefill.push_all("u", 2)
    ok, reason, _ = prefill.answer()
    assert ok, reason
    side.lanes.close()
    prefill.end()


def test_a_caller_that_dies_at_its_call_leaves_no_gap() -> None:
    """Killed right after the one step that takes a number; and who counts without writing has taken nothing."""
    side, dead, me = Decode(), LaneEnd("p0", "p-dead", 0), LaneEnd("d0", "d", 0)
    store = process_group._connect(side.listener.address, 5.0)
    store.add("calls/0", 1)
    store.compare_set(process_group._call_key(me, 1), "", to_json(process_group._CallRecord(dead, me, "w")))
    side.announce("t")
    prefill = Prefill(side.port)
    prefill.push_all("t")
    ok, reason, _ = prefill.answer()
    assert ok, reason
    assert side.is_complete()
    prefill.end()
    side.lanes.close()


def test_calls_are_heard_once_and_in_order_however_many_are_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_TAKEN_KEPT", 4)
    target = LaneEnd("d0", "d", 0)
    listener = GlooListener(target, ("127.0.0.1", 0), 5.0)
    for first in (0, 20):
        for number in range(first, first + 20):
            store = process_group._connect(listener.address, 5.0)
            record = process_group._CallRecord(LaneEnd("p0", "p", number), target, "w")
            process_group._write_call(store, target, to_json(record), Signature(b""), 20.0)
        for number in range(first, first + 20):
            call = listener.next_call()
            assert call is not None and call.source.rank == number
    listener.close()
    assert listener.next_call() is None


def test_nobody_serves_lanes() -> None:
    caller = GlooCaller(LaneEnd("p0", "p", 0))
    with pytest.raises(LaneClosed, match="no lane store"):
        caller.open(LaneEnd("d0", "d", 0), ("127.0.0.1", 1), 0.5)


def test_close_ends_every_thread() -> None:
    before = set(threading.enumerate())
    side = Decode()
    prefill = Prefill(side.port)
    side.announce("t")
    prefill.push_all("t")
    assert prefill.answer()[0]
    side.lanes.close()
    assert set(threading.enumerate()) <= before
    prefill.end()


def _serve(port: Connection) -> None:
    listener = GlooListener(LaneEnd("d0", "d", 0), ("127.0.0.1", 0), 5.0)
    port.send(listener.address)
    threading.Event().wait()


def test_a_listener_ends_at_once_when_the_store_is_gone() -> None:
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("forkserver").Process(target=_serve, args=(theirs,))
    server.start()
    assert ours.poll(150.0)
    listener = GlooListener(LaneEnd("d0", "d", 1), ours.recv(), 60.0)
    calls: list[object] = []
    waiting = threading.Thread(target=lambda: calls.append(listener.next_call()))
    waiting.start()
    server.kill()
    waiting.join(20.0)
    assert calls == [None]
    began = time.monotonic()
    listener.close()
    assert time.monotonic() - began < 20.0
    server.join()
