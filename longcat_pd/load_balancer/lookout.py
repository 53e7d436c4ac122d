"""Snapshots for those who look, and for nobody else: one a second at most, the same for all, none while no page is open.

Owns who looks, how many may, and when a snapshot is made. Does not know what one holds, or how it travels.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

from longcat_pd.clock import Clock
from longcat_pd.errors import TooManyRequests

SNAPSHOT_S = 1.0  # between two of them
MAX_VIEWERS = 16
VIEW_S = 900.0  # then a page calls again: one whose end nobody saw does not hold its place for ever
PATIENCE_S = 5.0  # a viewer hears something after so long


class Lookout:
    """Makes snapshots while somebody looks.

    Args:
        make: one snapshot, encoded. Takes no longer than a second or two, whatever state the cluster is in.
    """

    def __init__(self, make: Callable[[], Awaitable[bytes]], clock: Clock) -> None:
        self._make = make
        self._clock = clock
        self._viewers = 0
        self._latest = b""
        self._made_at: float | None = None
        self._making: asyncio.Task[bytes] | None = None
        self._going_on: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._is_closed = False

    @property
    def num_viewers(self) -> int:
        """How many look."""
        return self._viewers

    async def now(self) -> bytes:
        """A snapshot that is not older than a second; those who ask at the same time share one."""
        if self._made_at is not None and self._clock.now() - self._made_at < SNAPSHOT_S:
            return self._latest
        if self._making is None or self._making.done():
            self._making = asyncio.ensure_future(self._snapshot())
        return await asyncio.shield(self._making)  # who leaves early does not take it from the others

    @contextmanager
    def looking(self) -> Iterator[AsyncGenerator[bytes, None]]:
        """Snapshots as they are made, and nothing (``b""``) when there has been none for a while; ends after a time.

        Raises TooManyRequests.
        """
        if self._viewers >= MAX_VIEWERS:
            raise TooManyRequests(f"{MAX_VIEWERS} status pages are open already")
        self._viewers += 1
        if self._going_on is None or self._going_on.done():
            self._going_on = asyncio.ensure_future(self._go_on())
        try:
            yield self._views()
        finally:
            self._viewers -= 1
            if not self._viewers and self._going_on is not None:
                self._going_on.cancel()
                self._going_on = None

    async def close(self) -> None:
        """Everybody is sent away."""
        self._is_closed = True
        self._tell()
        tasks = [task for task in (self._going_on, self._making) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _views(self) -> AsyncGenerator[bytes, None]:
        until, seen = self._clock.now() + VIEW_S, None
        while self._clock.now() < until and not self._is_closed:
            news = self._news
            if self._made_at != seen:
                seen = self._made_at
                yield self._latest
                continue
            with suppress(TimeoutError):
                await self._clock.within(PATIENCE_S, news.wait())
                continue
            if self._going_on is not None and self._going_on.done():
                self._going_on.result()  # raises the defect that ended it
            yield b""

    async def _go_on(self) -> None:
        while True:
            await self.now()
            await self._clock.sleep(SNAPSHOT_S)

    async def _snapshot(self) -> bytes:
        self._latest = await self._make()
        self._made_at = self._clock.now()
        self._tell()
        return self._latest

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
