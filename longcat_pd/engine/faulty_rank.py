"""A rank that has a fault (``faults.py``): in its steps, or on the way of what it says.

Knows plans by whether they compute; knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from longcat_pd.engine.plan import StepOutput, StepPlan
from longcat_pd.faults import Fault, Switches, spin, stand_still
from longcat_pd.log import logger

Execute = Callable[[StepPlan], StepOutput]


class StepFault(RuntimeError):
    """The defect that ``raise_in_step`` shows."""


class Outgoing(Protocol):
    """What is needed of ``wire.BlockingSocket``."""

    def send(self, frames: Sequence[bytes]) -> None:
        """Send one message."""
        ...

    def close(self) -> None:
        """Close."""
        ...


def rank_switches(rank: int) -> Switches:
    """Those of a rank process; what strikes stands in its log."""

    def tell(fault: Fault) -> None:
        logger().warning("fault_struck", rank=rank, fault=fault.name)

    return Switches(tell)


def faulty_steps(execute: Execute, switches: Switches) -> Execute:
    """What executes plans, with the faults of steps. A plan without segments is no step."""

    def step(plan: StepPlan) -> StepOutput:
        if plan.segments:
            _strike(switches)
        return execute(plan)

    return step


def _strike(switches: Switches) -> None:
    slow, busy = switches.strike("slow_step"), switches.strike("spin")
    if slow is not None:
        stand_still(slow.seconds)
    if busy is not None:
        spin(busy.seconds)
    if switches.strike("endless_step") is not None:
        stand_still(math.inf)
    if switches.strike("raise_in_step") is not None:
        raise StepFault("a fault was asked for: raise_in_step")


class FaultySocket:
    """The way of what a rank says. A message that is held up holds up those behind it."""

    def __init__(self, inner: Outgoing, switches: Switches) -> None:
        self._inner = inner
        self._switches = switches

    def send(self, frames: Sequence[bytes]) -> None:
        """Send, once the rank is not silent any more."""
        self._switches.wait_while("silent_rank", math.inf)
        self._inner.send(frames)

    def close(self) -> None:
        """As it is."""
        self._inner.close()
