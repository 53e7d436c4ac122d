"""The same step on all machines at once, and what a machine says that could not take it.

Knows neither the steps nor how machines are reached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from longcat_pd.cluster.shell import Unreachable
from longcat_pd.cluster.telling import EXIT_FAILED, EXIT_OK, EXIT_REFUSED

T = TypeVar("T")
R = TypeVar("R")


class StepFailed(Exception):
    """A machine was reached, and could not do what was asked."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"{node}: {reason}")
        self.node = node
        self.reason = reason


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """What came back of all machines, in their order."""

    results: Mapping[str, R]
    faults: tuple[Unreachable | StepFailed, ...]

    @property
    def status(self) -> int:
        """Exit status: a machine that is not reached, or is not the one it should be, is a refusal."""
        if any(isinstance(fault, Unreachable) for fault in self.faults):
            return EXIT_REFUSED
        return EXIT_FAILED if self.faults else EXIT_OK


def everywhere(items: Sequence[tuple[str, T]], step: Callable[[T], R]) -> Outcome[R]:
    """Take a step with each item, by the name of its machine, all at once. The step bounds its own time."""
    results: dict[str, R] = {}
    faults: list[Unreachable | StepFailed] = []
    with ThreadPoolExecutor(max_workers=max(len(items), 1)) as pool:
        started = [(node, pool.submit(step, item)) for node, item in items]
        for node, future in started:
            try:
                results[node] = future.result()
            except (Unreachable, StepFailed) as fault:
                faults.append(fault)
    return Outcome(results, tuple(faults))
