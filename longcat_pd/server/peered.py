"""An instance with peers, from its start to its end: greet who is there, start the ranks, refuse a peer that does not fit.

What a prefill and a decode worker have in common; ``server/run.py`` drives it. Knows no role.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, Protocol

from longcat_pd.clock import READY_POLL_S, Clock
from longcat_pd.config.schema import Role
from longcat_pd.engine.driver import Engine
from longcat_pd.errors import ConfigError, EngineFault
from longcat_pd.kv_transfer.control import Link
from longcat_pd.log import logger
from longcat_pd.server.parts import Parts
from longcat_pd.server.service import Service

LAST_WORDS_S = 1.2 * READY_POLL_S  # a balancer has asked by then, and knows which rank was lost
GREETING_S = 0.5  # peers that are there have answered by then; others greet when they come


class Control(Protocol):
    """``Offering`` or ``Offers``."""

    news: asyncio.Event

    async def run(self) -> None:
        """Until cancelled."""
        ...

    def links(self) -> list[Link]:
        """One for each peer."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRole:
    """What makes a worker a prefill or a decode worker.

    ``rank_entry``: module:function of its rank processes. ``build``: its service, and its side of the control sockets;
    raises OSError for a port that cannot be had.
    """

    name: Role
    rank_entry: str
    build: Callable[[Parts], tuple[Service, Control]]


class PeeredInstance:
    """``run.Instance`` of a worker."""

    def __init__(self, engine: Engine, control: Control, clock: Clock) -> None:
        self._engine = engine
        self._control = control
        self._clock = clock
        self._links: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Greet, then bring the ranks up. Raises ConfigError when a peer does not fit, RankLost, EngineFault."""
        self._links = asyncio.get_running_loop().create_task(self._control.run())
        with suppress(TimeoutError):
            await self._clock.within(GREETING_S, self._all_have_greeted())
        self._raise_misfits()
        misfit = asyncio.ensure_future(self._first_misfit())
        ranks = asyncio.ensure_future(self._engine.start())
        try:
            await asyncio.wait({misfit, ranks}, return_when=asyncio.FIRST_COMPLETED)
            if misfit.done():
                misfit.result()
            await ranks
        finally:
            misfit.cancel()
            ranks.cancel()
            await asyncio.gather(misfit, ranks, return_exceptions=True)

    async def failed(self) -> NoReturn:
        """Wait until it cannot go on; raises the reason."""
        assert self._links is not None
        engine = asyncio.ensure_future(self._engine.failed())
        try:
            await asyncio.wait({engine, self._links}, return_when=asyncio.FIRST_COMPLETED)
            if engine.done():
                engine.result()
            logger().error("links_failed", exc_info=self._links.exception())
            raise EngineFault("the links to the peers failed")
        finally:
            engine.cancel()

    async def close(self) -> None:
        """Ranks first: what they say last still reaches the peers. Of a failure ``/ready`` is given time to tell."""
        last_words = [self._clock.sleep(LAST_WORDS_S)] if self._engine.health().is_lost else []
        await asyncio.gather(self._engine.close(), *last_words)
        if self._links is not None:
            self._links.cancel()
            await asyncio.gather(self._links, return_exceptions=True)

    async def _all_have_greeted(self) -> None:
        while any(link.theirs is None for link in self._control.links()):
            await self._next_news()

    async def _first_misfit(self) -> None:
        while True:
            await self._next_news()
            self._raise_misfits()

    def _raise_misfits(self) -> None:
        lines = [
            f"peer {link.name}: {m.field} differs: prefill {m.prefill}, decode {m.decode}"
            for link in self._control.links()
            for m in link.mismatch
        ]
        if lines:
            raise ConfigError("\n".join(lines))

    async def _next_news(self) -> None:
        await self._control.news.wait()
        self._control.news.clear()
