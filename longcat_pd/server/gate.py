"""Who is inside: open generation requests, refusing new ones, cutting the old ones at the end.

Owns the drain state of one face. Does not know what the requests do.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from longcat_pd.errors import LongcatError, TooManyRequests, WorkerUnavailable

Cut = Callable[[LongcatError], None]


class Gate:
    """Counts the open requests of a face.

    Args:
        max_inflight: more than so many are refused with 429; None: no limit of its own.
    """

    def __init__(self, max_inflight: int | None = None) -> None:
        self._max_inflight = max_inflight
        self._open: dict[object, list[Cut]] = {}
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._is_drained = False
        self._is_ending = False

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused: an operator wants it, or this process ends."""
        return self._is_drained or self._is_ending

    @property
    def num_open(self) -> int:
        """Requests that have no end yet."""
        return len(self._open)

    def drain(self) -> None:
        """Refuse new requests until ``undrain``."""
        self._is_drained = True

    def undrain(self) -> None:
        """Take requests again, unless this process ends."""
        self._is_drained = False

    def close(self) -> None:
        """Refuse new requests for good: this process ends."""
        self._is_ending = True

    def check(self) -> None:
        """Raise what a new request would be refused with now: draining, or too many."""
        if self.is_draining:
            raise WorkerUnavailable("this server is draining", code="draining")
        if self._max_inflight is not None and self.num_open >= self._max_inflight:
            raise TooManyRequests(f"{self.num_open} requests are open, the limit")

    @contextmanager
    def enter(self) -> Iterator[list[Cut]]:
        """One open request. Yields the list of those who are told when it is cut; the request adds itself."""
        self.check()
        ticket = object()
        self._open[ticket] = []
        self._is_empty.clear()
        try:
            yield self._open[ticket]
        finally:
            del self._open[ticket]
            if not self._open:
                self._is_empty.set()

    def cut(self, reason: LongcatError) -> int:
        """End all open requests, each with an error of its own like ``reason``; how many they were."""
        for cuts in self._open.values():
            for cut in cuts:
                cut(copy.copy(reason))
        return self.num_open

    async def empty(self) -> None:
        """Wait until no request is open."""
        await self._is_empty.wait()
