"""Lane messages that no prefill rank sends: random, cut, altered and repeated. Refused, told of once, and others go on."""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from longcat_pd import log
from longcat_pd.kv_transfer.frames import (
    HEADER_INTS,
    Header,
    MalformedFrame,
    Run,
    check_body,
    decode_body,
    decode_header,
    encode_body,
    encode_header,
)
from longcat_pd.kv_transfer.loopback import LoopbackLane, LoopbackNetwork
from longcat_pd.kv_transfer.sides import LaneOptions
from longcat_pd.kv_transfer.transport import LaneClosed, LaneEnd
from tests.unit.transfer_rig import BLOCK, Handover, Rig

Message = tuple[torch.Tensor, ...]
NUMBERS = [0, 1, 2, 3, -1, 5, 64, 1 << 20, 1 << 34, (1 << 34) + 1, 1 << 62, (1 << 63) - 1, -(1 << 63)]
SHAPES = [((BLOCK, 6), torch.float32), ((BLOCK, 2), torch.float32), ((BLOCK, 3), torch.bfloat16)]
NUM_BLOCKS = 8
LARGEST = NUM_BLOCKS * sum(24 + shape[0] * shape[1] * dtype.itemsize for shape, dtype in SHAPES)
TARGET = LaneEnd("d0", "d-life", 0)


def altered(tensor: torch.Tensor, pick: random.Random) -> torch.Tensor:
    """One to three of its numbers are others."""
    out = tensor.clone()
    for _ in range(pick.randrange(1, 4)):
        out[pick.randrange(len(out))] = pick.choice(NUMBERS) if pick.random() < 0.7 else pick.getrandbits(63)
    return out


def true_body(pick: random.Random) -> tuple[Header, torch.Tensor]:
    runs = []
    for entry, (shape, dtype) in enumerate(SHAPES):
        blocks = tuple(range(pick.randrange(1, 5)))
        data = torch.randn(len(blocks), *shape).to(dtype)
        runs.append(Run(entry, blocks, tuple(pick.getrandbits(32) for _ in blocks), data))
    body = encode_body(runs)
    return Header(7, is_end=False, num_items=sum(len(run.blocks) for run in runs), body_bytes=len(body)), body


def test_headers_are_refused_or_ask_for_no_more_than_a_layer_of_the_cache() -> None:
    pick, num_refused = random.Random(1), 0
    for _ in range(3000):
        head = encode_header(true_body(pick)[0])
        wild = altered(head, pick) if pick.random() < 0.8 else torch.tensor([pick.getrandbits(63) for _ in head])
        try:
            header = decode_header(wild)
            check_body(header, SHAPES, NUM_BLOCKS)
        except MalformedFrame:
            num_refused += 1
        else:
            assert header.is_end or header.body_bytes <= LARGEST
    assert 1000 < num_refused < 3000


@pytest.mark.parametrize(
    "size", [(1, 1 << 34), (1 << 40, 1 << 34), (-1, 0), (NUM_BLOCKS * 3 + 1, LARGEST), (0, 8)], ids=str
)
def test_a_size_that_cannot_be(size: tuple[int, int]) -> None:
    with pytest.raises(MalformedFrame):
        check_body(Header(7, is_end=False, num_items=size[0], body_bytes=size[1]), SHAPES, NUM_BLOCKS)
    with pytest.raises(MalformedFrame):
        check_body(Header(7, is_end=False, num_items=1, body_bytes=24), [], NUM_BLOCKS)


def test_tables_are_refused_or_name_exactly_what_is_there() -> None:
    pick, num_refused = random.Random(2), 0
    for _ in range(2000):
        header, body = true_body(pick)
        kind = pick.randrange(3)
        if kind == 0:
            table = altered(body[: header.num_items * 24].view(torch.int64), pick)
            body = torch.cat([table.view(torch.uint8), body[header.num_items * 24 :]])
        elif kind == 1:
            body = body[: pick.randrange(header.num_items * 24, len(body))]
        else:
            count = pick.randrange(header.num_items + 2)
            header = Header(7, is_end=False, num_items=min(count, len(body) // 24), body_bytes=len(body))
        try:
            runs = decode_body(header, body, SHAPES)
        except MalformedFrame:
            num_refused += 1
            continue
        assert sum(len(run.blocks) for run in runs) == header.num_items
        for run in runs:
            shape, dtype = SHAPES[run.entry]
            assert run.data.shape == (len(run.blocks), *shape) and run.data.dtype == dtype
    assert num_refused > 1000


class Tampered(LoopbackLane):
    """The source's end of a lane that sends what it is told in place of each message."""

    def __init__(self, lane: LoopbackLane, wires: Wires) -> None:
        super().__init__(lane._wire)
        self._wires = wires

    def send(self, message: Sequence[torch.Tensor]) -> None:
        for each in self._wires.tamper(tuple(message)):
            super().send(each)


class Wires(LoopbackNetwork):
    """``tamper``: what is sent in place of a message."""

    def __init__(self) -> None:
        super().__init__()
        self.tamper: Callable[[Message], list[Message]] = lambda message: [message]

    def connect(self, source: LaneEnd, target: LaneEnd) -> LoopbackLane:
        return Tampered(super().connect(source, target), self)


@dataclass
class TamperedRig(Rig):
    network: Wires = field(default_factory=Wires)


class Once:
    """A ``tamper`` that alters the message with this number, and keeps all."""

    def __init__(self, number: int, change: Callable[[Message], Message]) -> None:
        self.all: list[Message] = []
        self._number, self._change = number, change

    def __call__(self, message: Message) -> list[Message]:
        self.all.append(message)
        return [self._change(message) if len(self.all) == self._number + 1 else message]


def broken(message: Message, pick: random.Random) -> Message:
    """Of the same length on the wire, for a wire has no other."""
    head, body = message[0], message[-1]
    if len(message) == 1 or pick.random() < 0.5:
        return (altered(head, pick), *message[1:])
    num_items = int(head[4])
    if pick.random() < 0.7:
        table = altered(body[: num_items * 24].view(torch.int64), pick)
        return head, torch.cat([table.view(torch.uint8), body[num_items * 24 :]])
    at = pick.randrange(len(body))
    flipped = body.clone()
    flipped[at] ^= 1 << pick.randrange(8)
    return head, flipped


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    text = io.StringIO()
    log.set_up(stream=text)
    yield text
    log.set_up()


@pytest.fixture
def rig() -> Iterator[TamperedRig]:
    made = TamperedRig(network=Wires(), options=LaneOptions(digest="all", timeout_s=10.0))
    yield made
    made.close()


def hand_over(rig: Rig, name: str, generation: int, *, is_sound: bool = True) -> bool:
    """Whether a transfer arrived. One that lost its end is given up, as the drivers do; ``is_sound``: none of these."""
    before = len(rig.arrived.all), len(rig.pushed.all)
    transfer = Handover(rig, name, 3 * BLOCK + 1, generation=generation)
    transfer.announce()
    transfer.begin()
    transfer.compute()
    rig.pushed.wait(before[1] + 1)
    if is_sound:
        rig.arrived.wait(before[0] + 1)
    for _ in range(20):
        if len(rig.arrived.all) > before[0]:
            break
        threading.Event().wait(0.02)
    for lanes in rig.arrival:
        lanes.drop(name)
    (closed,) = rig.arrived.wait(before[0] + 1)[before[0] :]
    for lanes in rig.push:
        lanes.cancel(name)
    if closed.ok:
        assert transfer.mismatches() == []
    return closed.ok


def untouched(rig: Rig, name: str) -> list[str]:
    """Entries of which a block that no transfer has was written to."""
    mine = {0, *Handover(rig, name, 3 * BLOCK + 1).target_blocks}
    others = [block for block in range(rig.num_blocks) if block not in mine]
    cache = rig.target_caches[0]
    return [entry.name for entry in cache.spec.entries if bool(cache.tensor(entry.name)[others].any())]


@pytest.mark.parametrize("seed", range(24))
def test_a_message_that_is_not_what_was_sent_costs_its_own_transfer(
    rig: TamperedRig, seed: int, written: io.StringIO
) -> None:
    pick = random.Random(seed)
    assert hand_over(rig, "before", 1)
    for cache in rig.target_caches:
        for entry in cache.spec.entries:
            cache.tensor(entry.name).zero_()
    rig.network.tamper = Once(pick.randrange(3), lambda message: broken(message, pick))
    hand_over(rig, "altered", 2, is_sound=False)
    assert untouched(rig, "altered") == []
    rig.network.tamper = lambda message: [message]
    rig.network.lose_peers()  # as a lane whose messages do not fit ends
    assert hand_over(rig, "after", 3)
    assert written.getvalue().count("malformed_record") <= 1


def test_what_was_heard_on_a_wire_and_is_said_again_changes_nothing(rig: TamperedRig) -> None:
    heard = Once(-1, lambda message: message)
    rig.network.tamper = heard
    assert hand_over(rig, "first", 1)
    rig.network.tamper = lambda message: [message]
    kept = {entry.name: rig.target_caches[0].tensor(entry.name).clone() for entry in rig.target_caches[0].spec.entries}
    stranger = rig.network.connect(LaneEnd("p9", "life", 0), TARGET)
    for message in [*heard.all, *reversed(heard.all)]:
        stranger.send(message)
    stranger.drain(30.0)
    assert all(torch.equal(rig.target_caches[0].tensor(name), tensor) for name, tensor in kept.items())
    assert hand_over(rig, "second", 2)


def test_strangers_fill_neither_the_memory_nor_the_log(rig: Rig, written: io.StringIO) -> None:
    head = encode_header(Header(7, is_end=False, num_items=1, body_bytes=1 << 34))
    for number in range(40):
        lane = rig.network.connect(LaneEnd("p9", f"life-{number}", 0), TARGET)
        lane.send([head if number % 2 else torch.tensor([number] * HEADER_INTS)])
        lane.drain(30.0)
        with pytest.raises(LaneClosed):
            for _ in range(1000):
                threading.Event().wait(0.02)
                lane.send([head])
    assert hand_over(rig, "t", 1)
    lines = [line for line in written.getvalue().splitlines() if "malformed_record" in line]
    assert 1 <= len(lines) <= 6
    assert "layer 0" in written.getvalue() or "header begins" in written.getvalue()
