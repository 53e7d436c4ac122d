"""How far a start is: the steps that ranks take before they can serve, each rank's part of one, and all of them together.

Owns the steps' names and how often one is told of. Knows neither who takes them nor who looks. Times are seconds on the
clock of whoever listens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol, get_args

Step = Literal["processes", "warm-up", "weights", "compile"]
STEPS: tuple[Step, ...] = get_args(Step)  # in their order
UNITS: Mapping[Step, str] = MappingProxyType(
    {"processes": "processes", "warm-up": "communicators", "weights": "bytes", "compile": "graphs"}
)
TOLD_S = 0.2  # between two words about a step that goes on


class Tell(Protocol):
    """Where a step is told of, by whoever takes it."""

    def __call__(self, step: Step, done: int, total: int) -> None:
        """``done`` of ``total`` units of the step are done; the step has ended when they are equal. Must not wait."""
        ...


def untold(step: Step, done: int, total: int) -> None:
    """Nobody looks."""


class Paced:
    """Passes on the beginning and the end of each step, and between them no more than one word in ``TOLD_S``."""

    def __init__(self, tell: Tell, now: Callable[[], float]) -> None:
        self._tell = tell
        self._now = now
        self._step: Step | None = None
        self._told_at = 0.0

    def __call__(self, step: Step, done: int, total: int) -> None:
        """See ``Tell``."""
        now = self._now()
        if step == self._step and done < total and now - self._told_at < TOLD_S:
            return
        self._step, self._told_at = step, now
        self._tell(step, done, total)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One rank's part of a step. ``began``, ``at``: when it was first and last heard of."""

    step: Step
    done: int
    total: int
    began: float
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A step of an instance: what all of its ranks have done. ``total``: estimated until all of them have told theirs."""

    step: Step
    done: int
    total: int
    seconds: float
    has_ended: bool

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Stage | None:
        """What ``as_json`` has made; None for something else."""
        step, done, total, seconds = (told.get(key) for key in ("step", "done", "total", "seconds"))
        known = next((name for name in STEPS if name == step), None)
        if known is None or type(done) is not int or type(total) is not int or not isinstance(seconds, (int, float)):
            return None
        return cls(step=known, done=done, total=total, seconds=float(seconds), has_ended=told.get("ended") is True)

    def as_json(self) -> dict[str, Any]:
        """As ``/ready`` says it."""
        return {
            "step": self.step,
            "unit": UNITS[self.step],
            "done": self.done,
            "total": self.total,
            "seconds": round(self.seconds, 3),
            "ended": self.has_ended,
        }


def heard(parts: Mapping[Step, Part], step: Step, *, done: int, total: int, now: float) -> dict[Step, Part]:
    """The parts of a rank after one more word of it."""
    began = parts[step].began if step in parts else now
    return {**parts, step: Part(step=step, done=done, total=total, began=began, at=now)}


def stages(ranks: Sequence[Iterable[Part]], now: float) -> tuple[Stage, ...]:
    """What all ranks of an instance have done, step by step; those that none has begun are not there."""
    found: dict[Step, list[Part]] = {}
    for parts in ranks:
        for part in parts:
            found.setdefault(part.step, []).append(part)
    return tuple(_together(found[step], len(ranks), now) for step in STEPS if step in found)


def _together(parts: Sequence[Part], num_ranks: int, now: float) -> Stage:
    has_ended = len(parts) == num_ranks and all(part.done >= part.total for part in parts)
    until = max(part.at for part in parts) if has_ended else now
    return Stage(
        step=parts[0].step,
        done=sum(part.done for part in parts),
        total=math.ceil(sum(part.total for part in parts) * num_ranks / len(parts)),
        seconds=until - min(part.began for part in parts),
        has_ended=has_ended,
    )
