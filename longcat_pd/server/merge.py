"""Several sources of one answer at once, with one limit of time for all of them.

Each source runs to its end, closing included, in a task of its own, so that its context managers are entered and left in
the same task. Closing the merged generator cancels them and waits until they have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

from longcat_pd.errors import DeadlineExceeded, LongcatError
from longcat_pd.server.gate import Cut

T = TypeVar("T")


async def merged(
    sources: Sequence[AsyncGenerator[T, None]],
    *,
    time_left_s: float,
    cuts: list[Cut],
    on_cut: Callable[[], None],
    on_leaving: Callable[[LongcatError | None], None],
) -> AsyncGenerator[T, None]:
    """The items of all sources as they come.

    Args:
        sources: one that raises ends all of them with its exception.
        time_left_s: DeadlineExceeded afterwards.
        cuts: gets a function by which another part of the process ends the whole with an error.
        on_cut: told when one of these two is the next thing to be read: what was not read before it is dropped.
        on_leaving: told of the end, whatever it is, before what is still open is closed; and of the error of a cut that
            was not read.
    """
    coming: _Coming[T] = _Coming(on_cut)

    def start(source: AsyncGenerator[T, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(coming.take(source))
        task.add_done_callback(coming.end)
        return task

    tasks = [start(source) for source in sources]
    timer = asyncio.get_running_loop().call_later(max(time_left_s, 0.0), coming.expire)
    num_running = len(tasks)
    cuts.append(coming.cut)
    item: T | asyncio.Task[None] | LongcatError | None = None
    try:
        while num_running:
            item = await coming.get()
            if isinstance(item, asyncio.Task):
                item.result()
                num_running -= 1
            elif isinstance(item, LongcatError):
                coming.unread = None
                raise item
            else:
                yield item
    finally:
        on_leaving(coming.unread)
        timer.cancel()
        await _end(tasks)
        # exceptions hold the frames that they went through: what knows them here would never be freed by itself
        item = None
        tasks.clear()
        coming.clear()


class _Coming(Generic[T]):
    """What has come and was not read: items, sources that are at their end, and a cut, which drops what is in front of it.

    ``unread``: the error of the cut, until it is read.
    """

    def __init__(self, on_cut: Callable[[], None]) -> None:
        self.unread: LongcatError | None = None
        self._on_cut = on_cut
        self._queue: asyncio.Queue[T | asyncio.Task[None] | LongcatError] = asyncio.Queue()

    async def take(self, source: AsyncGenerator[T, None]) -> None:
        """All that comes of a source, which is closed."""
        async with aclosing(source):
            async for item in source:
                self._queue.put_nowait(item)

    def end(self, task: asyncio.Task[None]) -> None:
        """A source is at its end."""
        self._queue.put_nowait(task)

    def cut(self, error: LongcatError) -> None:
        """The next to be read is this."""
        if self.unread is None:
            self.clear()
            self.unread = error
            self._queue.put_nowait(error)
            self._on_cut()

    def expire(self) -> None:
        """The time is over."""
        self.cut(DeadlineExceeded("the time limit of the request is over"))

    async def get(self) -> T | asyncio.Task[None] | LongcatError:
        """The next, once there is one."""
        return await self._queue.get()

    def clear(self) -> None:
        """Drop all."""
        while not self._queue.empty():
            self._queue.get_nowait()


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
