"""Where a serving process is in its life, and how many requests it has open. Knows no HTTP and no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from longcat_pd.errors import WorkerUnavailable


class Lifecycle:
    """Starting, serving, draining (by an operator or for good). New requests are taken while serving only."""

    def __init__(self) -> None:
        self._is_started = False
        self._is_drained = False
        self._is_ending = False
        self._num_open = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @property
    def num_open(self) -> int:
        """Requests that have no end yet."""
        return self._num_open

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused, for good or until ``undrain``."""
        return self._is_drained or self._is_ending

    def started(self) -> None:
        """The instance can serve."""
        self._is_started = True

    def drain(self) -> None:
        """Take nothing new."""
        self._is_drained = True

    def undrain(self) -> None:
        """Take requests again, unless the process is about to end."""
        self._is_drained = False

    def end(self) -> None:
        """Take nothing new, for good."""
        self._is_ending = True

    async def empty(self) -> None:
        """Wait until no request is open."""
        await self._is_empty.wait()

    @contextmanager
    def request(self) -> Iterator[None]:
        """The life of one request. Raises WorkerUnavailable (starting, draining)."""
        for reason in self.reasons():
            raise WorkerUnavailable(f"this instance is {reason['code']}", code=reason["code"])
        self._num_open += 1
        self._is_empty.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._is_empty.set()

    def reasons(self) -> tuple[dict[str, Any], ...]:
        """Why new requests are refused, in the words of ``/ready``; nothing while serving."""
        if self.is_draining:
            return ({"code": "draining", "detail": f"{self._num_open} requests are open", "rank": None},)
        if not self._is_started:
            return ({"code": "starting", "detail": "weights are not loaded yet", "rank": None},)
        return ()
