"""The real clock: a wait with a limit keeps to it, and never hides a cancellation."""

from __future__ import annotations

import asyncio

import pytest

from longcat_pd.clock import MonotonicClock


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
