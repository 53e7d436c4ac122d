"""Coroutines that run beside whoever owns them, until it ends. A defect in one of them is told, not lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine


class Background:
    """Work of an owner on the event loop.

    Args:
        on_defect: called with the exception of work that has raised one; it does nothing when work ends or is cancelled.
    """

    def __init__(self, on_defect: Callable[[BaseException], None]) -> None:
        self._on_defect = on_defect
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, work: Coroutine[None, None, None]) -> None:
        """Begin it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def cancel(self) -> None:
        """End all of it, and wait for that."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_defect(error)
