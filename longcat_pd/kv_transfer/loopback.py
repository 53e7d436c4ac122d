"""A transport in memory, for tests and for two pools in one process.

Knows messages as lists of tensors. Its faults are those of the lanes of any transport (``faulty_lanes.py``).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from longcat_pd.kv_transfer.transport import LaneClosed, LaneEnd, LaneTimeout

Message = tuple[torch.Tensor, ...]


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

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire
        self._posted: list[Message] = []

    def send(self, message: Sequence[torch.Tensor]) -> None:
        """Post; delivery happens in ``drain``, in the caller's thread."""
        with self._wire.changed:
            if self._wire.is_closed:
                raise LaneClosed("lane closed")
        self._posted.append(tuple(message))

    def drain(self, timeout_s: float) -> None:
        """Deliver what was posted, and wait until it was taken."""
        end = time.monotonic() + timeout_s
        posted, self._posted = self._posted, []
        with self._wire.changed:
            if self._wire.is_closed:
                raise LaneClosed("lane closed")
            self._wire.tensors.extend(tensor.clone() for message in posted for tensor in message)
            self._wire.changed.notify_all()
            self._wire.wait_for(lambda: not self._wire.tensors, end - time.monotonic())

    def receive_into(self, tensor: torch.Tensor, timeout_s: float | None) -> None:
        """Take the next tensor."""
        with self._wire.changed:
            self._wire.wait_for(lambda: bool(self._wire.tensors), timeout_s)
            if tensor.nbytes != self._wire.tensors[0].nbytes:
                self._wire.is_closed = True
                self._wire.changed.notify_all()
                raise LaneClosed("what came is not as long as what is expected")
            tensor.copy_(self._wire.tensors[0])
            self._wire.tensors.popleft()
            self._wire.changed.notify_all()

    def close(self) -> None:
        """Both ends end."""
        with self._wire.changed:
            self._wire.is_closed = True
            self._wire.tensors.clear()
            self._wire.changed.notify_all()


@dataclass(frozen=True, slots=True)
class LoopbackCall:
    """See ``transport.Call``."""

    source: LaneEnd
    lane: LoopbackLane

    def open(self, timeout_s: float) -> LoopbackLane:
        """This end of the lane."""
        return self.lane


class LoopbackNetwork:
    """The place where callers find listeners."""

    def __init__(self) -> None:
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
        lane = LoopbackLane(wire)
        self._lanes.append(lane)
        listener.offer(LoopbackCall(source, LoopbackLane(wire)))
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
