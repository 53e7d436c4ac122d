"""The clock that a test can own, and the fixed intervals between the processes.

Everything that measures a duration or waits takes a ``Clock``. ``MonotonicClock`` is the real one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Protocol, TypeVar

T = TypeVar("T")

READY_POLL_S = 1.0  # the balancer asks each instance for /ready
HEARTBEAT_S = 1.0  # driver to driver, rank to driver
LINK_SILENT_S = 5.0  # no heartbeat for so long: the link is down
RANK_SILENT_S = 5.0  # no heartbeat of a rank for so long: rank_silent
BREAKER_FAILURES = 5  # failures of cause self in a row that open a breaker
BREAKER_OPEN_S = 10.0
ECHO_HOLD_S = 0.2  # how long an error of cause peer waits for the other leg's own cause
FAILOVER_WAIT_S = 5.0  # how long an answer that broke waits for a pair that can go on with it
CONNECT_TIMEOUT_S = 2.0  # balancer to worker
KEEPALIVE_IDLE_S, KEEPALIVE_PROBE_S, KEEPALIVE_PROBES = 5, 2, 3  # of a connection to a worker, whose machine may be gone
PROBE_TIMEOUT_S = 20.0  # /health_generate
PROBE_FRESH_S = 5.0  # traffic within this time counts as a probe


class Clock(Protocol):
    """Time for everything that waits or measures. Seconds; monotonic."""

    def now(self) -> float:
        """Seconds on a monotonic scale."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task."""
        ...

    async def within(self, seconds: float, awaitable: Awaitable[T]) -> T:
        """Await with a limit. Raises TimeoutError when ``seconds`` are over first; the awaitable is cancelled then."""
        ...


class MonotonicClock:
    """The real clock."""

    def now(self) -> float:
        """Seconds on the process's monotonic scale."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task."""
        await asyncio.sleep(seconds)

    async def within(self, seconds: float, awaitable: Awaitable[T]) -> T:
        """Await with a limit; TimeoutError afterwards.

        Not ``asyncio.wait_for``: before Python 3.12 that swallows a cancellation that comes in the turn of the result.
        """
        task = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait({task}, timeout=max(seconds, 0.0))
            if task.done():
                return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            elif not task.cancelled():
                task.exception()  # of which nobody else hears if a cancellation comes in its turn
        raise TimeoutError(f"not within {seconds:.3f} s")
