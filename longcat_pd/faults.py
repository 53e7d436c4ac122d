"""Fault switches: the closed set of faults that a test, or an operator of a CPU cluster, can ask for by name.

A ``Switches`` is handed down like the clock, to the few places where something can go wrong: the steps, collectives, lanes
and outgoing messages of a rank, the control sockets of a driver. What stands there wraps the plain thing; a process that is
given no ``Switches`` (``faults: false``) wraps nothing. Knows names, parameters and when one strikes, not what it does.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

Where = Literal["step", "collective", "outbox", "lane", "control"]

RECORDS = ("Hello", "Beat", "Offer", "Grant", "Refuse", "Commit", "Ack", "Abort")  # of ``kv_transfer/messages.py``
LONGEST_S = 86400.0
MOST = 1_000_000


class FaultRefused(ValueError):
    """No such switch, or not with these parameters: all that is wrong, one finding a line."""


class Switch(NamedTuple):
    """``where``: at what it acts. ``needs``, ``takes``: parameters that it must and may be given."""

    where: Where
    needs: tuple[str, ...]
    takes: tuple[str, ...]
    help: str


_ONCE, _MANY = ("after",), ("after", "times")

SWITCHES: Mapping[str, Switch] = MappingProxyType(
    {
        "slow_step": Switch("step", ("seconds",), _MANY, "a step takes that much longer"),
        "endless_step": Switch("step", (), _ONCE, "a step begins and never ends, without using the processor"),
        "raise_in_step": Switch("step", (), _ONCE, "a step ends with a defect"),
        "spin": Switch("step", (), ("after", "seconds"), "a step computes nothing, with all its might"),
        "skip_collective": Switch("collective", (), _MANY, "goes on without having entered a collective"),
        "endless_collective": Switch("collective", (), _ONCE, "stands before a collective and never enters it"),
        "silent_rank": Switch("outbox", (), ("seconds",), "nothing that the rank says leaves it, heartbeats included"),
        "lane_slow": Switch("lane", ("seconds",), _MANY, "a message with cache leaves that much later"),
        "lane_stall": Switch("lane", (), ("seconds",), "no message leaves"),
        "lane_half": Switch("lane", (), ("seconds",), "of a message only the head leaves"),
        "lane_cut": Switch("lane", (), _MANY, "a lane breaks when a message with cache is to leave"),
        "lane_lose": Switch("lane", (), ("layer", *_MANY), "the first block of a message is lost"),
        "lane_repeat": Switch("lane", (), ("layer", *_MANY), "a message arrives twice"),
        "lane_alter": Switch("lane", (), ("layer", *_MANY), "the last bit of a message is another"),
        "lane_reorder": Switch("lane", (), ("layer", *_MANY), "a message is overtaken by the next one"),
        "mute_control": Switch("control", (), ("seconds",), "nothing that the driver says reaches a peer"),
        "drop_record": Switch("control", ("record",), _MANY, "a record of this kind is lost"),
        "late_record": Switch("control", ("record", "seconds"), _MANY, "a record of this kind leaves that much later"),
    }
)
OF_A_DRIVER: tuple[Where, ...] = ("control",)  # the others are of a rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A switch with its parameters.

    ``rank``: None means all ranks; of no meaning at a driver. ``after``: so many occasions pass first; ``times``: it
    strikes at so many, 0: at all. ``seconds``: how much longer, or how long it stays; 0 there: until it is cleared.
    ``layer``: of the model; None is any. ``record``: one of RECORDS.
    """

    name: str
    rank: int | None = None
    seconds: float = 0.0
    after: int = 0
    times: int = 1
    layer: int | None = None
    record: str = ""

    @property
    def where(self) -> Where:
        """At what it acts."""
        return SWITCHES[self.name].where

    def told(self) -> dict[str, object]:
        """The name, and what is not as it would be unsaid."""
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultOrder:
    """What a rank is told: set ``fault``, or (None) clear those of the name ``clear``, of all names if it is empty."""

    fault: Fault | None = None
    clear: str = ""


def read_fault(told: Mapping[str, object]) -> Fault:
    """The fault that a mapping of parameters describes. Raises FaultRefused."""
    name = told.get("name")
    switch = SWITCHES.get(name) if isinstance(name, str) else None
    if switch is None:
        raise FaultRefused(f"name = {name!r} is no switch; known: {', '.join(SWITCHES)}")
    of_rank = ("rank",) if switch.where not in OF_A_DRIVER else ()
    allowed = ("name", *of_rank, *switch.needs, *switch.takes)
    wrong = [f"{name} needs {key}" for key in switch.needs if key not in told]
    wrong += [f"{key}: {name} takes only {', '.join(allowed[1:])}" for key in told if key not in allowed]
    wrong += [complaint for key in allowed if key in told and (complaint := _complaint(key, told[key]))]
    if told.get("seconds") == 0 and "seconds" in switch.needs:
        wrong.append("seconds = 0: must be above 0")
    if wrong:
        raise FaultRefused("\n".join(wrong))
    return Fault(**dict(told))  # type: ignore[arg-type]  # as was just checked


def _complaint(key: str, value: object) -> str:
    """What is wrong with the value of a parameter; empty if nothing is."""
    if key == "name":
        return ""
    if key == "record":
        return "" if value in RECORDS else f"record = {value!r} is not one of {', '.join(RECORDS)}"
    if key == "seconds":
        is_good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LONGEST_S
        return "" if is_good else f"seconds = {value!r} is not a number from 0 to {LONGEST_S:g}"
    is_good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST
    return "" if is_good else f"{key} = {value!r} is not a number from 0 to {MOST}"


@dataclass(eq=False)
class _Set:
    """A fault that is set, with what is left of it."""

    fault: Fault
    until: float  # for one that stays
    after: int
    times: float


class Switches:
    """The faults that are set in one process. From any thread.

    Args:
        on_strike: is told each time that one strikes, for the log.
    """

    def __init__(self, on_strike: Callable[[Fault], None] = lambda _fault: None) -> None:
        self._on_strike = on_strike
        self._changed = threading.Condition()
        self._set: list[_Set] = []

    def obey(self, order: FaultOrder) -> None:
        """Set or clear."""
        if order.fault is not None:
            self.set(order.fault)
        else:
            self.clear(order.clear)

    def set(self, fault: Fault) -> None:
        """From now on."""
        until = time.monotonic() + fault.seconds if fault.seconds else math.inf
        times = fault.times or math.inf
        with self._changed:
            self._set.append(_Set(fault, until, fault.after, times))
            self._changed.notify_all()

    def clear(self, name: str = "") -> None:
        """Those of this name, or all. Whoever waits for it goes on."""
        with self._changed:
            self._set = [entry for entry in self._set if name and entry.fault.name != name]
            self._changed.notify_all()

    def listed(self) -> tuple[Fault, ...]:
        """What is set and has not struck its last time."""
        with self._changed:
            now = time.monotonic()
            return tuple(entry.fault for entry in self._set if entry.fault.name not in _STAYING or entry.until > now)

    def strike(self, name: str, *, layer: int | None = None, record: str = "") -> Fault | None:
        """An occasion for this switch has come: the fault if it strikes. Each occasion counts once."""
        with self._changed:
            for entry in self._set:
                fault = entry.fault
                if fault.name != name or fault.record != record or (fault.layer not in (None, layer)):
                    continue
                if entry.after:
                    entry.after -= 1
                    continue
                entry.times -= 1
                if entry.times <= 0:
                    self._set.remove(entry)
                break
            else:
                return None
        self._on_strike(fault)
        return fault

    def is_on(self, name: str) -> bool:
        """Whether a switch that stays is set and its time is not over."""
        with self._changed:
            return self._left_s(name) > 0

    def wait_while(self, name: str, limit_s: float, *, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait as long as a switch that stays is on, or ``until`` says so (after ``notify``). False: the limit is over."""
        end = time.monotonic() + limit_s
        with self._changed:
            while not until() and (left_s := self._left_s(name)) > 0:
                wait_s = min(left_s, end - time.monotonic())
                if wait_s <= 0:
                    return False
                self._changed.wait(min(wait_s, threading.TIMEOUT_MAX))
        return True

    def notify(self) -> None:
        """Something that ``wait_while`` looks at has changed."""
        with self._changed:
            self._changed.notify_all()

    def _left_s(self, name: str) -> float:
        """How long it stays. With ``_changed`` held."""
        ends = [entry.until for entry in self._set if entry.fault.name == name]
        return max(ends, default=0.0) - time.monotonic() if ends else 0.0


_STAYING = frozenset(name for name, switch in SWITCHES.items() if "seconds" in switch.takes and "after" not in switch.takes)


def stand_still(seconds: float) -> None:
    """Of a thread that a fault holds up."""
    threading.Event().wait(min(seconds, threading.TIMEOUT_MAX))


def spin(seconds: float) -> None:
    """Of a thread that is busy with nothing; for ever if it is 0."""
    end = time.monotonic() + seconds
    while not seconds or time.monotonic() < end:
        pass
