"""Several sources of one answer at once, with one limit of time for all of them.

Each source runs to its end, closing included, in a task of its own, so that its context managers are entered and left in
the same task. Closing the merged generator cancels them and waits until they have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

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
    queue: asyncio.Queue[T | asyncio.Task[None] | LongcatError] = asyncio.Queue()

    async def pump(source: AsyncGenerator[T, None]) -> None:
        async with aclosing(source):
            async for item in source:
                queue.put_nowait(item)

    unread: list[LongcatError] = []

    def cut(error: LongcatError) -> None:
        if not unread:
            unread.append(error)
            _empty(queue)
            queue.put_nowait(error)
            on_cut()

    def expire() -> None:
        cut(DeadlineExceeded("the time limit of the request is over"))

    def start(source: AsyncGenerator[T, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(pump(source))
        task.add_done_callback(queue.put_nowait)
        return task

    tasks = [start(source) for source in sources]
    timer = asyncio.get_running_loop().call_later(max(time_left_s, 0.0), expire)
    num_running = len(tasks)
    cuts.append(cut)
    item: T | asyncio.Task[None] | LongcatError | None = None
    try:
        while num_running:
            item = await queue.get()
            if isinstance(item, asyncio.Task):
                item.result()
                num_running -= 1
            elif isinstance(item, LongcatError):
                unread.clear()
                raise item
            else:
                yield item
    finally:
        on_leaving(unread[0] if unread else None)
        timer.cancel()
        await _end(tasks)
        # exceptions hold the frames that they went through: what knows them here would never be freed by itself
        item = None
        tasks.clear()
        _empty(queue)


def _empty(queue: asyncio.Queue[Any]) -> None:
    while not queue.empty():
        queue.get_nowait()


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
