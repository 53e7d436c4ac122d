"""The real clock: a wait with a limit keeps to it, and never hides a cancellation."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from longcat_pd.clock import MonotonicClock
from longcat_pd.errors import TransferFailed
from longcat_pd.kv_transfer.control import OpenTransfer


async def test_a_wait_gives_its_result_or_ends_in_time_with_what_it_waited_for_cancelled() -> None:
    clock = MonotonicClock()
    assert await clock.within(5.0, asyncio.sleep(0, "done")) == "done"
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with pytest.raises(TimeoutError):
        await clock.within(0.01, never)
    assert never.cancelled()
    with pytest.raises(TimeoutError):
        await clock.within(-1.0, asyncio.sleep(5.0))


async def test_an_error_of_what_is_waited_for_is_raised() -> None:
    async def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await MonotonicClock().within(5.0, fails())


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_a_cancellation_in_the_turn_of_the_result_is_a_cancellation(cancel_first: bool) -> None:
    result: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(MonotonicClock().within(5.0, result))
    await asyncio.sleep(0)
    if cancel_first:
        waiting.cancel()
        result.set_result("late")
    else:
        result.set_result("early")
        waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_what_is_waited_for_has_ended_when_the_wait_is_cancelled() -> None:
    ended = False

    async def work() -> None:
        nonlocal ended
        try:
            await asyncio.sleep(5.0)
        finally:
            await asyncio.sleep(0)
            ended = True

    waiting = asyncio.create_task(MonotonicClock().within(5.0, work()))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended


Wait = Callable[[Awaitable[None]], Awaitable[None]]


def _transfer() -> OpenTransfer:
    return OpenTransfer("t", "d0", deadline=1e9, clock=MonotonicClock())


WAITS: dict[str, Wait] = {
    "of the clock": lambda work: MonotonicClock().within(5.0, work),
    "of a transfer": lambda work: _transfer().during(work),
    "of a transfer for so long": lambda work: _transfer().within(5.0, work, "nothing"),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4])
async def test_a_cancellation_in_the_turns_of_an_error_leaves_no_trace(wait: Wait, turns: int) -> None:
    """asyncio writes one for an error that nobody has looked at; but this one is expected, and told elsewhere."""
    told: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context))
    failure: asyncio.Future[None] = loop.create_future()

    async def work() -> None:
        await failure

    waiting: asyncio.Future[None] = asyncio.ensure_future(wait(work()))
    for _ in range(5):
        await asyncio.sleep(0)
    failure.set_exception(TransferFailed("no"))
    for _ in range(turns):
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled() or isinstance(waiting.exception(), TransferFailed)
    del waiting
    gc.collect()
    await asyncio.sleep(0)
    assert told == []
