"""The start of an engine as a terminal shows it, and that nothing is written to what is none."""

from __future__ import annotations

import asyncio
import io
from types import SimpleNamespace
from typing import Any, cast

import pytest

from longcat_pd.errors import EngineFault
from longcat_pd.progress.steps import Stage
from longcat_pd.standalone.service import StandaloneService
from longcat_pd.standalone.start import ShownStart
from tests.manual_clock import ManualClock, settle
from tests.terminal import screen_of, terminal


class Service:
    """Of which a test says how far it is, and when it has started, or that it fails."""

    def __init__(self, clock: ManualClock) -> None:
        self._began = clock.now()
        self.graphs = 0
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        await self.started

    def readiness(self) -> Any:
        return SimpleNamespace(start=self._stages)

    def _stages(self, now: float) -> tuple[Stage, ...]:
        has_ended = self.graphs == 4
        return (Stage(step="compile", done=self.graphs, total=4, seconds=now - self._began, has_ended=has_ended),)


def begun(shown: ShownStart, service: Service) -> asyncio.Task[None]:
    return asyncio.create_task(shown.start(cast(StandaloneService, service)))


async def test_a_terminal_sees_how_far_it_is_and_that_time_goes_on() -> None:
    clock = ManualClock()
    service = Service(clock)
    with terminal(columns=100) as seen:
        shown = ShownStart(seen.stream, clock)
        starting = begun(shown, service)
        await settle()
        service.graphs = 1
        shown.progressed()
        first = seen.seen()
        await clock.advance(3.0)  # nobody tells of anything
        waited = first + seen.seen()
        service.graphs = 4
        shown.progressed()
        service.started.set_result(None)
        await starting
        whole = waited + seen.seen()
        shown.progressed()
        await clock.advance(5.0)
        assert seen.seen() == "", "the start is over"
    assert screen_of(first)[1].startswith("ranks compile: [#####...............]  25%  1 of 4 graphs, 0 s")
    assert screen_of(waited)[1].endswith("1 of 4 graphs, 3 s")
    assert screen_of(whole) == ["ranks compile: 4 graphs in 3.0 s", ""]


async def test_a_start_that_fails_leaves_no_bar() -> None:
    clock = ManualClock()
    service = Service(clock)
    with terminal(columns=100) as seen:
        shown = ShownStart(seen.stream, clock)
        starting = begun(shown, service)
        await settle()
        shown.progressed()
        service.started.set_exception(EngineFault("a rank said no"))
        with pytest.raises(EngineFault):
            await starting
        assert seen.screen() == [""]
        await clock.advance(5.0)
        shown.progressed()
        assert seen.seen() == ""


@pytest.mark.parametrize("with_lines", [False, True])
async def test_what_is_no_terminal_gets_nothing_or_two_lines_a_step(with_lines: bool) -> None:
    clock, out = ManualClock(), io.StringIO()
    service = Service(clock)
    shown = ShownStart(out, clock, with_lines=with_lines)
    starting = begun(shown, service)
    await settle()
    for service.graphs in range(5):
        shown.progressed()
        await clock.advance(2.0)
    service.started.set_result(None)
    await starting
    with shown.inline() as tell:
        tell("weights", 0, 8)
        tell("weights", 8, 8)
    lines = [
        "ranks compile: begins",
        "ranks compile: 4 graphs in 8.0 s",
        "ranks weights: begins",
        "ranks weights: 8 B in 0.0 s",
    ]
    assert out.getvalue().splitlines() == (lines if with_lines else [])


def test_a_rank_in_this_process_tells_of_itself() -> None:
    clock = ManualClock()
    with terminal(columns=100) as seen:
        with ShownStart(seen.stream, clock).inline() as tell:
            tell("weights", 0, 4_000_000)
            tell("weights", 1_000_000, 4_000_000)
            tell("weights", 4_000_000, 4_000_000)
            tell("compile", 0, 2)
            going_on = seen.seen()
        whole = going_on + seen.seen()
    assert screen_of(going_on) == ["ranks weights: 4.0 MB in 0.0 s", "", screen_of(going_on)[2], ""]
    assert screen_of(going_on)[2].startswith("ranks compile: [....................]   0%  0 of 2 graphs")
    assert screen_of(whole) == ["ranks weights: 4.0 MB in 0.0 s", ""]
