"""The start of an engine as whoever runs the command sees it: bars in a terminal, while weights come and graphs are made.

Owns when they are shown. How they look is ``progress``; what ranks tell comes from the service, or from a rank here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn, TextIO

from longcat_pd.clock import Clock
from longcat_pd.progress.bars import Bars
from longcat_pd.progress.steps import Part, Step, Tell, heard, stages, untold
from longcat_pd.standalone.service import StandaloneService

_NAME = "ranks"  # in front of each bar
_SHOWN_EVERY_S = 1.0  # at least: the seconds of a step go on where nobody tells of it


class ShownStart:
    """Of one engine, over rank processes (``start``) or in this process (``inline``).

    Args:
        stream: a terminal, where lines move; to anything else nothing is written, or ``with_lines`` two lines a step.
        clock: the service's.
    """

    def __init__(self, stream: TextIO, clock: Clock, *, with_lines: bool = False) -> None:
        self._stream = stream
        self._clock = clock
        self._is_seen = with_lines or stream.isatty()
        self._show: Callable[[], None] = lambda: None

    def progressed(self) -> None:
        """For ``make_parts``: a rank has told of its start."""
        self._show()

    async def start(self, service: StandaloneService) -> None:
        """Start it; raises what its ``start`` raises."""
        if not self._is_seen:
            await service.start()
            return
        with Bars(self._stream, now=self._clock.now) as bars:
            self._show = lambda: bars.show(_NAME, service.readiness().start(self._clock.now()))
            going_on = asyncio.ensure_future(self._go_on())
            try:
                await service.start()
            finally:
                going_on.cancel()
                self._show = lambda: None
                await asyncio.gather(going_on, return_exceptions=True)

    @contextmanager
    def inline(self) -> Iterator[Tell]:
        """While an engine's one rank is made in this process: where it tells of that."""
        if not self._is_seen:
            yield untold
            return
        parts: Mapping[Step, Part] = {}
        with Bars(self._stream, now=self._clock.now) as bars:

            def tell(step: Step, done: int, total: int) -> None:
                nonlocal parts
                now = self._clock.now()
                parts = heard(parts, step, done=done, total=total, now=now)
                bars.show(_NAME, stages([parts.values()], now))

            yield tell

    async def _go_on(self) -> None:
        while True:
            await self._clock.sleep(_SHOWN_EVERY_S)
            self._show()


class ShownInstance:
    """What a process serves, its start shown (``server.run.Instance``)."""

    def __init__(self, service: StandaloneService, shown: ShownStart) -> None:
        self._service = service
        self._shown = shown

    async def start(self) -> None:
        """See ``StandaloneService``."""
        await self._shown.start(self._service)

    async def failed(self) -> NoReturn:
        """See ``StandaloneService``."""
        await self._service.failed()

    async def close(self) -> None:
        """See ``StandaloneService``."""
        await self._service.close()
