"""A clock that a test owns: time passes when the test says so, and everything that waits wakes in order."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def settle(turns: int = 60) -> None:
    """Let every task run until it waits for something."""
    for _ in range(turns):
        await asyncio.sleep(0)


class ManualClock:
    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + max(seconds, 0.0), next(self._order), woken))
        await woken

    async def within(self, seconds: float, awaitable: Awaitable[T]) -> T:
        work = asyncio.ensure_future(awaitable)
        limit = asyncio.ensure_future(self.sleep(seconds))
        try:
            await asyncio.wait((work, limit), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise TimeoutError
        finally:
            for task in (work, limit):
                task.cancel()
            await asyncio.gather(work, limit, return_exceptions=True)

    async def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        until = self._now + seconds
        await settle()
        while self._sleepers and self._sleepers[0][0] <= until:
            at, _, woken = heapq.heappop(self._sleepers)
            self._now = max(self._now, at)
            if not woken.done():
                woken.set_result(None)
                await settle()
        self._now = until
        await settle()
