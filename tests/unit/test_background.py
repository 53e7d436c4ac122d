"""Work beside its owner: a defect is told once, an end or a cancel is none, and nothing outlives the owner."""

from __future__ import annotations

import asyncio

from longcat_pd.engine.background import Background


async def test_a_defect_is_told_and_an_end_is_not() -> None:
    told: list[BaseException] = []
    background = Background(told.append)

    async def fail() -> None:
        raise KeyError("rank")

    async def end() -> None:
        await asyncio.sleep(0)

    background.keep(fail())
    background.keep(end())
    for _ in range(4):
        await asyncio.sleep(0)
    assert [type(error) for error in told] == [KeyError]


async def test_what_is_cancelled_has_ended_and_is_no_defect() -> None:
    told: list[BaseException] = []
    ended: list[str] = []
    background = Background(told.append)

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            ended.append("wait")

    background.keep(wait())
    await asyncio.sleep(0)
    await asyncio.wait_for(background.cancel(), 60.0)
    assert (ended, told) == (["wait"], [])
