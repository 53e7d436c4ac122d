"""A serving process from its first signal to its exit status: HTTP beside the start, ready, drain, end.

Owns uvicorn and the signals of the process. Knows an instance only as something to start, to lose and to close.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import uvicorn

from longcat_pd.clock import Clock
from longcat_pd.errors import ConfigError, LongcatError, WorkerUnavailable
from longcat_pd.log import logger
from longcat_pd.server.gate import Gate
from longcat_pd.server.http_heads import BoundedHeads

READY = "The server is fired up and ready to roll!"  # scripts wait for these words

STATUS_OK, STATUS_FAULT, STATUS_REFUSED, STATUS_CUT = 0, 1, 2, 3

LAST_BYTES_S = 2.0  # for errors on their way to clients, when everything else has ended
_BACKLOG = 2048
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Instance(Protocol):
    """What is served."""

    async def start(self) -> None:
        """Until it can serve. Raises ConfigError for what is refused, another LongcatError for a fault."""
        ...

    async def failed(self) -> NoReturn:
        """Wait until it cannot go on; raises the reason, a LongcatError, which is what open requests end with."""
        ...

    async def close(self) -> None:
        """End it; requests that are open end with an error."""
        ...


def listen(host: str, port: int) -> socket.socket:
    """The socket of the HTTP face, before anything else starts. Raises ConfigError when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # with its protocol named, or asyncio leaves the delay on (Nagle) that costs 40 ms where head and body meet
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"http_port={port}: cannot listen on {host}: {error.strerror}", param="http_port") from error
    listener.setblocking(False)
    return listener


async def serve_app(
    app: Any,
    listener: socket.socket,
    instance: Instance,
    *,
    gate: Gate,
    drain_timeout_s: float,
    clock: Clock,
    told_to_end: asyncio.Event | None = None,
) -> int:
    """Serve until a signal or a fault; the exit status of the process.

    ``told_to_end``: drains too, but is no signal: it may come beside the first, and ends in STATUS_FAULT.
    """
    config = uvicorn.Config(
        app,
        http=BoundedHeads,
        ws="none",
        log_config=None,
        lifespan="off",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(LAST_BYTES_S),
    )
    asyncio.get_running_loop().set_exception_handler(Unaccepted())
    with Signals() as signals:
        face = _Face(config)
        serving = asyncio.get_running_loop().create_task(face.serve(sockets=[listener]))
        told = told_to_end or asyncio.Event()
        life = _Life(
            instance, gate, serving, signals=signals, told_to_end=told, drain_timeout_s=drain_timeout_s, clock=clock
        )
        status = await life.run()
        face.should_exit = True
        await serving
    logger().info("stopped", exit_status=status)
    return status


class _Face(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are not uvicorn's."""
        yield


class Unaccepted:
    """The event loop's handler of exceptions: a connection that cannot be taken, as all files of the process are in use, is
    told of the 1st, 2nd, 4th, 8th ... time; asyncio would write a trace for each, thousands a second. It tells of the rest.
    """

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """As ``loop.set_exception_handler`` has it."""
        error = context.get("exception")
        if "socket" not in context or not isinstance(error, OSError) or error.errno not in _NO_ROOM:
            loop.default_exception_handler(context)
            return
        self._count += 1
        if self._count & (self._count - 1) == 0:
            logger().warning("connection_not_taken", reason=error.strerror, count=self._count)


class Signals:
    """SIGTERM and SIGINT: ``first`` asks to drain, ``second`` to end at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def __enter__(self) -> Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._arrived)
        return self

    def __exit__(self, *_exception: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _arrived(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


class _Life:
    def __init__(
        self,
        instance: Instance,
        gate: Gate,
        serving: asyncio.Task[None],
        *,
        signals: Signals,
        told_to_end: asyncio.Event,
        drain_timeout_s: float,
        clock: Clock,
    ) -> None:
        self._instance = instance
        self._serving = serving
        self._gate = gate
        self._signals = signals
        self._told_to_end = told_to_end
        self._drain_timeout_s = drain_timeout_s
        self._clock = clock
        self._reason: LongcatError = WorkerUnavailable("the server ended before the answer was complete", code="draining")

    async def run(self) -> int:
        """Start, serve, end; the exit status. Whatever happens, the instance is closed."""
        began = self._clock.now()
        try:
            started = await _first(self._instance.start(), self._told())
            status = await self._serve(began) if started == 0 else self._ended_as_told(STATUS_OK)
        except ConfigError as error:
            status = refuse(error)
        except LongcatError as error:
            logger().error("start_failed", code=error.code, reason=error.message)
            status = STATUS_FAULT
        finally:
            self._gate.close()
            self._gate.cut(self._reason)
            await self._instance.close()
        await _first(self._gate.empty(), self._clock.sleep(LAST_BYTES_S))
        return status

    async def _told(self) -> None:
        await _first(self._signals.first.wait(), self._told_to_end.wait())

    async def _failed(self) -> None:
        try:
            await self._instance.failed()
        except LongcatError as error:
            self._reason = error

    async def _serve(self, began: float) -> int:
        logger().info("ready", seconds=self._clock.now() - began)
        logger().info(READY)
        ended = await _first(self._failed(), _end_of(self._serving), self._told())
        return await self._drain() if ended == 2 else STATUS_FAULT

    async def _drain(self) -> int:
        self._gate.close()
        began, num_open = self._clock.now(), self._gate.num_open
        logger().info("drain_started", open=num_open)
        ended = await _first(
            self._failed(),
            self._gate.empty(),
            self._signals.second.wait(),
            self._clock.sleep(self._drain_timeout_s),
        )
        num_cut = self._gate.num_open
        logger().info("drain_finished", open=num_open, cut=num_cut, seconds=self._clock.now() - began)
        if ended == 0:
            return STATUS_FAULT
        return self._ended_as_told(STATUS_CUT if num_cut else STATUS_OK)

    def _ended_as_told(self, status: int) -> int:
        """Without a signal of its own a process was not meant to end, and whoever watches over it starts it again."""
        return status if self._signals.first.is_set() else STATUS_FAULT


def refuse(error: ConfigError) -> int:
    """Say on standard error and in the log why there is no start; the exit status."""
    for line in error.message.splitlines():
        sys.stderr.write(f"error: {line}\n")
    logger().error("start_refused", reason=error.message)
    return STATUS_REFUSED


async def _end_of(task: asyncio.Task[None]) -> None:
    """Wait for a task without taking its part in errors or cancellation."""
    await asyncio.wait({task})


async def _first(*waits: Coroutine[Any, Any, Any]) -> int:
    """Wait for one of several; its place, the lowest if several end at once. Its error is raised, the others cancelled."""
    tasks = [asyncio.ensure_future(w) for w in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        place = next(i for i, task in enumerate(tasks) if task.done())
        tasks[place].result()
        return place
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
