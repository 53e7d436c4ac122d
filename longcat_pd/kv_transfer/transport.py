"""What lanes need of a transport: five calls, each with a deadline.

A *lane* carries tensors one way between one prefill rank and one decode rank. The source opens it by naming the target;
the target hears of it from its listener and opens its end. Knows nothing of blocks, transfers or threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class LaneClosed(ConnectionError):
    """The lane is gone: closed here, closed by the peer, or the peer died. It is not usable again; open a new one."""


class LaneTimeout(TimeoutError):
    """Nothing moved before the deadline. The lane is closed for good: half a message may be on the way."""


@dataclass(frozen=True, slots=True)
class LaneEnd:
    """One rank of one instance, in one life of it."""

    instance: str
    incarnation: str
    rank: int


class Lane(Protocol):
    """One end of an open lane. Messages keep their order. One thread uses it; ``close`` may come from any thread."""

    def send(self, message: Sequence[torch.Tensor]) -> None:
        """Post the tensors of one message, in order. They must not change until ``drain`` has returned. LaneClosed."""
        ...

    def receive_into(self, tensor: torch.Tensor, timeout_s: float | None) -> None:
        """Fill ``tensor`` with the next tensor sent. None: wait until the lane ends. LaneClosed, LaneTimeout."""
        ...

    def drain(self, timeout_s: float) -> None:
        """Wait until everything posted has been taken by the other end. LaneClosed, LaneTimeout."""
        ...

    def close(self) -> None:
        """End the lane; waits on it end with LaneClosed, and nothing is written into a tensor after that."""
        ...


class Caller(Protocol):
    """The source's side of opening."""

    def open(self, target: LaneEnd, address: tuple[str, int], timeout_s: float) -> Lane:
        """A new lane to ``target``, whose instance serves lanes at ``address``. LaneClosed, LaneTimeout."""
        ...

    def close(self) -> None:
        """Let go of what is shared by lanes; lanes are closed by their owners."""
        ...


class Call(Protocol):
    """A lane that a source asks for."""

    @property
    def source(self) -> LaneEnd:
        """Who asks."""
        ...

    def open(self, timeout_s: float) -> Lane:
        """This end of the lane. LaneClosed, LaneTimeout."""
        ...


class Listener(Protocol):
    """The target's side of opening."""

    def next_call(self) -> Call | None:
        """Wait for the next call; None once the listener is closed. One thread calls it."""
        ...

    def close(self) -> None:
        """End ``next_call``; from any thread."""
        ...
