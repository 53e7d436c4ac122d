"""A transport in memory, for tests and for two pools in one process; and the faults that it can be told to show.

Knows messages as lists of tensors. ``lose_block`` and its siblings know their form (``frames.py``) so that a fault can
name one block of one layer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from longcat_pd.kv_transfer.frames import HEADER_INTS, Header, decode_header, encode_header
from longcat_pd.kv_transfer.transport import LaneClosed, LaneEnd, LaneTimeout

Message = tuple[torch.Tensor, ...]
Tamper = Callable[[Message], list[Message]]


def _untouched(message: Message) -> list[Message]:
    return [message]


@dataclass
class LoopbackFaults:
    """What the wire does wrong. May be changed while lanes run.

    ``delay_s``: before each message. ``flowing``: cleared, no message passes. ``tamper``: what is delivered in place of a
    message.
    """

    delay_s: float = 0.0
    tamper: Tamper = _untouched
    flowing: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.flowing.set()


class _Wire:
    """The queue between two ends. An item is taken when the target has copied it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.tensors: deque[torch.Tensor] = deque()
        self.is_closed = False

    def wait_for(self, condition: Callable[[], bool], timeout_s: float | None) -> None:
        """Call with ``changed`` held."""
        if not self.changed.wait_for(lambda: condition() or self.is_closed, timeout_s):
            self.is_closed = True
            self.changed.notify_all()
            raise LaneTimeout(f"nothing moved for {timeout_s} s")
        if self.is_closed and not condition():
            raise LaneClosed("lane closed")


class LoopbackLane:
    """One end; see ``transport.Lane``."""

    def __init__(self, wire: _Wire, faults: LoopbackFaults) -> None:
        self._wire = wire
        self._faults = faults
        self._posted: list[Message] = []

    def send(self, message: Sequence[torch.Tensor]) -> None:
        """Post; delivery happens in ``drain``, in the caller's thread."""
        with self._wire.changed:
            if self._wire.is_closed:
                raise LaneClosed("lane closed")
        self._posted.append(tuple(message))

    def drain(self, timeout_s: float) -> None:
        """Deliver what was posted, with the faults of the wire, and wait until it was taken."""
        end = time.monotonic() + timeout_s
        posted, self._posted = self._posted, []
        for message in posted:
            if self._faults.delay_s and self._closes_within(self._faults.delay_s):
                raise LaneClosed("lane closed")
            if not self._faults.flowing.wait(end - time.monotonic()):
                self.close()
                raise LaneTimeout(f"nothing moved for {timeout_s} s")
            with self._wire.changed:
                if self._wire.is_closed:
                    raise LaneClosed("lane closed")
                self._wire.tensors.extend(t.clone() for m in self._faults.tamper(message) for t in m)
                self._wire.changed.notify_all()
        with self._wire.changed:
            self._wire.wait_for(lambda: not self._wire.tensors, end - time.monotonic())

    def receive_into(self, tensor: torch.Tensor, timeout_s: float | None) -> None:
        """Take the next tensor."""
        with self._wire.changed:
            self._wire.wait_for(lambda: bool(self._wire.tensors), timeout_s)
            tensor.copy_(self._wire.tensors[0])
            self._wire.tensors.popleft()
            self._wire.changed.notify_all()

    def close(self) -> None:
        """Both ends end."""
        with self._wire.changed:
            self._wire.is_closed = True
            self._wire.tensors.clear()
            self._wire.changed.notify_all()

    def _closes_within(self, seconds: float) -> bool:
        with self._wire.changed:
            return self._wire.changed.wait_for(lambda: self._wire.is_closed, seconds)


@dataclass(frozen=True, slots=True)
class LoopbackCall:
    """See ``transport.Call``."""

    source: LaneEnd
    lane: LoopbackLane

    def open(self, timeout_s: float) -> LoopbackLane:
        """This end of the lane."""
        return self.lane


class LoopbackNetwork:
    """The place where callers find listeners, and the faults of all wires."""

    def __init__(self, faults: LoopbackFaults | None = None) -> None:
        self.faults = faults or LoopbackFaults()
        self._listeners: dict[LaneEnd, LoopbackListener] = {}
        self._lanes: list[LoopbackLane] = []

    def listen(self, end: LaneEnd) -> LoopbackListener:
        """The listener of this rank."""
        return self._listeners.setdefault(end, LoopbackListener())

    def caller(self, end: LaneEnd) -> LoopbackCaller:
        """The caller of this rank."""
        return LoopbackCaller(self, end)

    def connect(self, source: LaneEnd, target: LaneEnd) -> LoopbackLane:
        """A new wire. Raises LaneClosed if nobody listens there."""
        listener = self._listeners.get(target)
        if listener is None:
            raise LaneClosed(f"nobody listens at {target}")
        wire = _Wire()
        lane = LoopbackLane(wire, self.faults)
        self._lanes.append(lane)
        listener.offer(LoopbackCall(source, LoopbackLane(wire, self.faults)))
        return lane

    def lose_peers(self) -> None:
        """All lanes break, as when a process dies."""
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()


class LoopbackCaller:
    """See ``transport.Caller``."""

    def __init__(self, network: LoopbackNetwork, end: LaneEnd) -> None:
        self._network = network
        self._end = end

    def open(self, target: LaneEnd, address: tuple[str, int], timeout_s: float) -> LoopbackLane:
        """A new lane; ``address`` has no meaning here."""
        return self._network.connect(self._end, target)

    def close(self) -> None:
        """Nothing is shared."""


class LoopbackListener:
    """See ``transport.Listener``."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: deque[LoopbackCall] = deque()
        self._is_closed = False

    def offer(self, call: LoopbackCall) -> None:
        """A source asks for a lane."""
        with self._changed:
            self._calls.append(call)
            self._changed.notify_all()

    def next_call(self) -> LoopbackCall | None:
        """The next call, or None after ``close``."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._calls) or self._is_closed)
            return None if self._is_closed else self._calls.popleft()

    def close(self) -> None:
        """End ``next_call``."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def _first_item(message: Message, layer: int) -> tuple[Header, list[torch.Tensor], torch.Tensor] | None:
    """Header, table rows and payload of a data message of ``layer``."""
    if message[0].numel() != HEADER_INTS or len(message) != 2:
        return None
    header = decode_header(message[0])
    if header.is_end or header.layer != layer:
        return None
    table = message[1][: header.num_items * 24].view(torch.int64).view(-1, 3)
    return header, list(table), message[1][header.num_items * 24 :]


def _rebuilt(header: Header, rows: list[torch.Tensor], payload: torch.Tensor) -> Message:
    body = torch.cat([torch.cat(rows).view(torch.uint8) if rows else payload[:0], payload])
    return encode_header(replace(header, num_items=len(rows), body_bytes=len(body))), body


class BlockFault:
    """A ``tamper`` that meets the first data message of one layer, once.

    Args:
        kind: ``lose`` its first item, ``repeat`` the message, ``alter`` one bit of its last byte, or ``reorder``: let
            the next message overtake it.
        layer: the layer.
        item_bytes: bytes of a block of the first entry; for ``lose``.
    """

    def __init__(self, kind: str, layer: int, item_bytes: int = 0) -> None:
        self._kind = kind
        self._layer = layer
        self._item_bytes = item_bytes
        self._is_done = False
        self._held: Message | None = None

    def __call__(self, message: Message) -> list[Message]:
        """What is delivered in place of ``message``."""
        if self._held is not None:
            held, self._held = self._held, None
            return [message, held]
        found = None if self._is_done else _first_item(message, self._layer)
        if found is None:
            return [message]
        self._is_done = True
        header, rows, payload = found
        if self._kind == "lose":
            return [_rebuilt(header, rows[1:], payload[self._item_bytes :])]
        if self._kind == "alter":
            altered = payload.clone()
            altered[-1] ^= 1
            return [_rebuilt(header, rows, altered)]
        if self._kind == "reorder":
            self._held = message
            return []
        return [message, message]
