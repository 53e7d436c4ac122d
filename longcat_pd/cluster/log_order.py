"""Lines of several sources put in one order of time: those that are there already, and those that come.

Knows no files and no machines. Sources are told apart by anything that can be a key.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from longcat_pd.cluster.jobs import LogLine

HOLD_S = 1.5  # a line that comes is held so long for older ones; agents look at their logs every half second

K = TypeVar("K", bound=Hashable)


class Past(Generic[K]):
    """Merges sources each of which is in order. A line is ready when every source that is open has a later one."""

    def __init__(self, sources: Iterable[K]) -> None:
        self._lines: dict[K, deque[LogLine]] = {source: deque() for source in sources}
        self._open = set(self._lines)

    @property
    def waits_for(self) -> list[K]:
        """Sources that are open."""
        return [source for source in self._lines if source in self._open]

    def add(self, source: K, lines: Iterable[LogLine]) -> None:
        """The next lines of a source."""
        self._lines[source].extend(lines)

    def close(self, source: K) -> None:
        """Nothing more comes of it."""
        self._open.discard(source)

    def ready(self) -> Sequence[LogLine]:
        """Those that nothing can come before any more; each once."""
        found = []
        while all(self._lines[source] for source in self._open):
            waiting = [lines for lines in self._lines.values() if lines]
            if not waiting:
                break
            found.append(min(waiting, key=lambda lines: lines[0].at).popleft())
        return found


class Held:
    """Sorts lines as they come, by holding each for ``HOLD_S``; what comes later than that stands where it comes."""

    def __init__(self) -> None:
        self._heap: list[tuple[str, int, float, LogLine]] = []
        self._order = itertools.count()  # lines of one time keep theirs

    def add(self, lines: Iterable[LogLine], now: float) -> None:
        """Lines that have come."""
        for line in lines:
            heapq.heappush(self._heap, (line.at, next(self._order), now + HOLD_S, line))

    @property
    def due(self) -> float:
        """When something is ready; infinity: nothing is held."""
        return min((until for _, _, until, _ in self._heap), default=math.inf)

    def ready(self, now: float) -> Sequence[LogLine]:
        """What has been held for long enough, and all that is older; each once."""
        ripe = [(at, order) for at, order, until, _ in self._heap if until <= now]
        last = max(ripe, default=("", -1))
        found = []
        while self._heap and self._heap[0][:2] <= last:
            found.append(heapq.heappop(self._heap)[-1])
        return found
