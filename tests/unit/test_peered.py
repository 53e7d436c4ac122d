"""The start and the end of an instance with peers: who must be there, who is refused, what ends it."""

from __future__ import annotations

import asyncio

import pytest

from longcat_pd.errors import ConfigError, EngineFault, RankLost
from longcat_pd.server.peered import PeeredInstance
from tests.manual_clock import settle
from tests.unit.control_rig import Pair, hello


async def start(pair: Pair, *, both: bool = True) -> tuple[PeeredInstance, asyncio.Task[None]]:
    """P's instance on its way up; D's links run if ``both``."""
    if both:
        pair.tasks.append(asyncio.ensure_future(pair.offers.run()))
    instance = PeeredInstance(pair.p_engine, pair.offering, pair.clock)
    starting = asyncio.ensure_future(instance.start())
    await settle()
    return instance, starting


async def end(pair: Pair, instance: PeeredInstance) -> None:
    await instance.close()
    for task in pair.tasks:
        task.cancel()
    await asyncio.gather(*pair.tasks, return_exceptions=True)


async def test_a_peer_that_is_there_is_greeted_before_the_ranks_start_and_nobody_waits() -> None:
    pair = Pair()
    instance, starting = await start(pair)
    await starting
    assert pair.offering.states() == {"d0": "up"}
    await end(pair, instance)


async def test_a_peer_that_is_not_there_is_not_waited_for() -> None:
    pair = Pair()
    instance, starting = await start(pair, both=False)
    assert not starting.done()
    await pair.clock.advance(0.6)
    await starting
    assert pair.offering.states() == {"d0": "down"}
    pair.tasks.append(asyncio.ensure_future(pair.offers.run()))
    await pair.clock.advance(1.1)
    assert pair.offering.states() == {"d0": "up"}
    await end(pair, instance)


async def test_a_peer_that_does_not_fit_ends_a_start() -> None:
    pair = Pair(decode=hello("d0", "decode", block_size=8))
    instance, starting = await start(pair)
    with pytest.raises(ConfigError, match="peer d0: block_size differs: prefill 4, decode 8"):
        await starting
    assert not pair.p_pencil.is_started, "before weights are loaded"
    await end(pair, instance)


async def test_a_peer_that_does_not_fit_does_not_disturb_one_that_serves() -> None:
    pair = Pair(decode=hello("d0", "decode", block_size=8))
    instance, starting = await start(pair, both=False)
    await pair.clock.advance(0.6)
    await starting
    failed = asyncio.ensure_future(instance.failed())
    pair.tasks.append(asyncio.ensure_future(pair.offers.run()))
    await pair.clock.advance(3.0)
    assert pair.offering.states() == {"d0": "mismatch"}
    assert not failed.done()
    failed.cancel()
    await end(pair, instance)


async def test_a_link_task_that_breaks_ends_the_instance() -> None:
    pair = Pair()
    instance, starting = await start(pair)
    await starting
    pair.dealer.inbox.put_nowait(None)  # type: ignore[arg-type]
    with pytest.raises(EngineFault):
        await asyncio.wait_for(instance.failed(), 60.0)
    await end(pair, instance)


async def test_an_instance_that_lost_a_rank_has_time_to_say_so() -> None:
    pair = Pair()
    instance, starting = await start(pair)
    await starting
    pair.p_pencil.lose(RankLost("rank 0 ended with status -9"))
    closing = asyncio.ensure_future(end(pair, instance))
    await pair.clock.advance(1.0)  # a poll of a balancer falls into this time
    assert not closing.done()
    await pair.clock.advance(0.3)
    await asyncio.wait_for(closing, 60.0)
