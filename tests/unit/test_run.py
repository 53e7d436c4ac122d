"""server/run.py: from the first signal to the exit status, with an instance that does what it is told.

The face listens on a port of its own; the signals are this process's own.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pytest

from longcat_pd import log
from longcat_pd.clock import MonotonicClock
from longcat_pd.errors import ConfigError, EngineFault, LongcatError, RankLost, WorkerUnavailable
from longcat_pd.server import run
from longcat_pd.server.gate import Gate


@dataclass
class Instance:
    """Starts, fails and closes as told."""

    refusal: Exception | None = None
    loss: LongcatError | None = None
    is_lost: asyncio.Event = field(default_factory=asyncio.Event)
    is_up: asyncio.Event = field(default_factory=asyncio.Event)
    is_closed: bool = False

    async def start(self) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.is_up.set()

    async def failed(self) -> NoReturn:
        await self.is_lost.wait()
        assert self.loss is not None
        raise self.loss

    async def close(self) -> None:
        self.is_closed = True


async def no_app(_scope: Any, _receive: Any, _send: Any) -> None:
    raise AssertionError("nobody calls")


class Served:
    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.gate = Gate()
        self.ends: list[LongcatError] = []
        self.told_to_end = asyncio.Event()
        self.process: asyncio.Task[int]

    def open_request(self) -> asyncio.Task[None]:
        """Stays until it is cut or told to end."""
        return asyncio.ensure_future(self._request())

    async def _request(self) -> None:
        cut: asyncio.Future[LongcatError] = asyncio.get_running_loop().create_future()
        with self.gate.enter() as cuts:
            cuts.append(cut.set_result)
            self.ends.append(await cut)

    async def drains(self) -> None:
        """Wait until it has heard that it is to end."""
        async with asyncio.timeout(60.0):
            while not self.gate.is_draining:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def status(self) -> int:
        return await asyncio.wait_for(self.process, 60.0)


@asynccontextmanager
async def served(instance: Instance, *, drain_timeout_s: float = 30.0) -> AsyncIterator[Served]:
    made = Served(instance)
    with run.listen("127.0.0.1", 0) as listener:
        made.process = asyncio.ensure_future(
            run.serve_app(
                no_app,
                listener,
                instance,
                gate=made.gate,
                drain_timeout_s=drain_timeout_s,
                clock=MonotonicClock(),
                told_to_end=made.told_to_end,
            )
        )
        yield made
        made.process.cancel()
        await asyncio.gather(made.process, return_exceptions=True)


def send(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("loss", [RankLost("rank 1 ended with status -9"), EngineFault("rank 0 failed")])
async def test_open_requests_end_with_what_ended_the_instance(loss: LongcatError) -> None:
    async with served(Instance(loss=loss)) as s:
        await s.instance.is_up.wait()
        requests = [s.open_request() for _ in range(3)]
        await asyncio.sleep(0)
        s.instance.is_lost.set()
        assert await s.status() == run.STATUS_FAULT
        await asyncio.gather(*requests)
        assert [(type(e), e.code, e.message) for e in s.ends] == 3 * [(type(loss), loss.code, loss.message)]
        assert len({id(e) for e in s.ends}) == 3, "each its own: a traceback belongs to one raise"
        assert s.instance.is_closed and s.gate.is_draining


async def test_a_rank_lost_while_draining_is_a_fault() -> None:
    async with served(Instance(loss=RankLost("rank 0 ended with status -9"))) as s:
        await s.instance.is_up.wait()
        request = s.open_request()
        await asyncio.sleep(0)
        send()
        await s.drains()
        s.instance.is_lost.set()
        assert await s.status() == run.STATUS_FAULT
        await request
        assert s.ends[0].code == "rank_lost"


async def test_a_server_that_is_told_to_end_cannot_be_undrained() -> None:
    async with served(Instance()) as s:
        await s.instance.is_up.wait()
        s.gate.drain()
        s.gate.undrain()
        request = s.open_request()
        await asyncio.sleep(0)
        send()
        await s.drains()
        s.gate.undrain()
        with pytest.raises(WorkerUnavailable) as refused:
            s.gate.check()
        assert refused.value.code == "draining"
        send()
        assert await s.status() == run.STATUS_CUT
        await request


async def _twice(s: Served) -> None:
    send()
    await s.drains()
    send(signal.SIGINT)


async def _once(_: Served) -> None:
    send()


async def _from_elsewhere(s: Served) -> None:
    s.told_to_end.set()


async def _from_elsewhere_too(s: Served) -> None:
    s.told_to_end.set()
    await s.drains()
    send()


@pytest.mark.parametrize(
    "end, drain_timeout_s, num_open, status",
    [
        (_once, 30.0, 0, run.STATUS_OK),
        (_once, 0.1, 2, run.STATUS_CUT),
        (_twice, 30.0, 1, run.STATUS_CUT),
        (_from_elsewhere, 30.0, 0, run.STATUS_FAULT),
        (_from_elsewhere_too, 0.3, 1, run.STATUS_CUT),
    ],
)
async def test_a_drain(end: Callable[[Served], Any], drain_timeout_s: float, num_open: int, status: int) -> None:
    async with served(Instance(), drain_timeout_s=drain_timeout_s) as s:
        await s.instance.is_up.wait()
        requests = [s.open_request() for _ in range(num_open)]
        await asyncio.sleep(0)
        await end(s)
        assert await s.status() == status
        await asyncio.gather(*requests)
        assert [e.code for e in s.ends] == num_open * ["draining"]
        assert s.instance.is_closed


@pytest.mark.parametrize(
    "refusal, status",
    [(ConfigError("block_size differs"), run.STATUS_REFUSED), (RankLost("rank 0 ended"), run.STATUS_FAULT)],
)
async def test_a_start_that_fails(refusal: LongcatError, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    async with served(Instance(refusal=refusal)) as s:
        assert await s.status() == status
        assert s.instance.is_closed
        assert ("error: block_size differs" in capsys.readouterr().err) == (status == run.STATUS_REFUSED)


async def test_the_instance_is_closed_also_after_a_defect() -> None:
    async with served(Instance(refusal=OSError("no more processes"))) as s:
        with pytest.raises(OSError, match="no more processes"):
            await s.status()
        assert s.instance.is_closed, "or its ranks would hold up the end of the process for ever"


class Full(socket.socket):
    """Of a process whose files are all in use."""

    def __init__(self) -> None:
        super().__init__()
        self.was_tried = asyncio.Event()

    def accept(self) -> NoReturn:
        self.was_tried.set()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_connections_that_cannot_be_taken_do_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """asyncio tries 2048 times in a row, with a trace for each."""
    out = io.StringIO()
    log.set_up(stream=out)
    with Full() as listener, socket.socket() as stranger:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        serving = asyncio.ensure_future(
            run.serve_app(no_app, listener, Instance(), gate=Gate(), drain_timeout_s=1.0, clock=MonotonicClock())
        )
        stranger.connect(listener.getsockname())
        await asyncio.wait_for(listener.was_tried.wait(), 60)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await serving == run.STATUS_OK
    lines = [line for line in out.getvalue().splitlines() if "connection_not_taken" in line]
    assert lines[0].endswith('reason="Too many open files" count=1') and 1 < len(lines) < 20
    assert "Traceback" not in out.getvalue() and not caplog.records


async def test_what_else_goes_wrong_in_the_loop_is_told_by_asyncio(caplog: pytest.LogCaptureFixture) -> None:
    run.Unaccepted()(asyncio.get_running_loop(), {"message": "a task", "exception": ValueError("a defect")})
    assert "a defect" in caplog.text
