"""What travels between the machine that an operator works on and the agents on the machines of a cluster.

Down an agent's standard input: one ``Job``, then ``Order``s; up its standard output: ``Event``s; each one line of JSON.
Knows of both sides only how they wait for a line.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from longcat_pd import wire
from longcat_pd.config.checks import PortUse
from longcat_pd.config.services import Service
from longcat_pd.log import Level
from longcat_pd.progress.steps import Stage

STILL_S = 5.0  # between two signs of life of whoever gave the job
SILENCE_S = 30.0  # after so long without one it is gone

Group = Literal["balancer", "driver", "ranks"]
GROUPS: tuple[Group, ...] = ("balancer", "driver", "ranks")  # in the order in which they are ended


@dataclass(frozen=True, kw_only=True)
class LogQuery:
    """Which lines of the logs are wanted.

    ``lines``: the last so many of each log that pass the rest; None: all. ``since``: a time as logs write it, or empty;
    ``ago_s``: seconds before now by the clock of the machine that has the log, or None. ``request``: an id, or empty.
    ``level``: this one and above. ``is_followed``: what is added too.
    """

    lines: int | None = None
    since: str = ""
    ago_s: float | None = None
    request: str = ""
    level: Level = "debug"
    is_followed: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is asked of one machine. Paths are that machine's.

    ``config``: the file as the operator named it; ``text``: what it says, overrides laid over. ``nodes``: the addresses of
    the machine. ``services``, ``ports``: those of this machine that the verb is about. ``is_part``: others run beside them
    and are left as they are. ``drain_s``: how long the services may take to end. ``query``: of ``logs``.
    """

    config: str
    text: str
    folder: str
    logs: str
    url: str
    nodes: tuple[str, ...]
    services: tuple[Service, ...]
    ports: tuple[PortUse, ...]
    setup_files: tuple[str, ...] = ()
    is_part: bool = False
    drain_s: float = 0.0
    query: LogQuery = LogQuery()


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to be done next. ``end`` takes a group and a time, ``finish`` kills what is left; ``still`` means nothing."""

    verb: Literal["go", "keep", "end", "finish", "still"]
    group: Group = "balancer"
    within_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Found:
    """First answer of ``start`` and ``stop``: what runs, as ``name (pid n)``, and what stands against a start.

    ``code``: the release that services would run.
    """

    is_recorded: bool
    alive: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    drain_s: float = 0.0
    code: str = ""


@dataclass(frozen=True, kw_only=True)
class Started:
    """A service has been started."""

    service: str
    pid: int
    log: str


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A service has ended though nobody told it to. ``lines``: the end of its log."""

    service: str
    status: int
    log: str
    lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the balancer says to ``/ready``, when that has changed."""

    is_ready: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the start of a service is, when that has changed."""

    service: str
    stages: tuple[Stage, ...]


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """Last answer of what ended services: how many processes had to be killed, which services, which ports are taken.

    ``left``: ids of processes that were killed and have not ended; then the services stay recorded.
    """

    num_killed: int
    late: tuple[str, ...]
    findings: tuple[str, ...]
    left: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One service as ``status`` shows it."""

    service: str
    pid: int
    is_alive: bool
    is_ready: bool
    condition: str
    ready_lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Answer of ``status``; not ``is_recorded``: nothing was started here."""

    is_recorded: bool
    config: str = ""
    url: str = ""
    rows: tuple[Row, ...] = ()
    others: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """One line of a log. ``at``: when it was written as its log says, never before the line before it; of a line without
    a time that of the line which it stands behind, empty if there is none.
    """

    service: str
    at: str
    text: str


@dataclass(frozen=True, kw_only=True)
class LogPart:
    """Lines of all logs of a machine in the order of their times.

    ``clock_s``: the time of that machine, seconds since 1970, when it said this. ``num_logs``: that are there.
    ``is_live``: all that was there when the job came has been said; what comes now was added.
    """

    lines: tuple[LogLine, ...]
    clock_s: float
    num_logs: int
    is_live: bool = False


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of an agent: exactly one of these. ``ready``: the service whose log says that it serves; ``settled``: the
    group that has ended, or for which the time is over; ``refused``: the job cannot be done.
    """

    found: Found | None = None
    started: Started | None = None
    ready: str | None = None
    progress: Progress | None = None
    ended: Ended | None = None
    answer: Answer | None = None
    settled: Group | None = None
    stopped: Stopped | None = None
    seen: Seen | None = None
    part: LogPart | None = None
    refused: str | None = None


class Gone(Exception):
    """Whoever gave the job has ended, or has not been heard for ``SILENCE_S``."""


class Orders:
    """The job and the orders that follow it, from a descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._lines = LineBuffer()
        self._heard = time.monotonic()
        self._is_closed = False

    def job(self) -> Job:
        """The first line. Raises Gone and MalformedRecord."""
        return wire.from_json(Job, self._line(time.monotonic() + SILENCE_S))

    def next(self, timeout_s: float) -> Order | None:
        """The next order but ``still``; None: time is over. Raises Gone and MalformedRecord."""
        deadline = time.monotonic() + timeout_s
        while line := self._line(deadline):
            order = wire.from_json(Order, line)
            if order.verb != "still":
                return order
        return None

    def _line(self, deadline: float) -> bytes:
        """Nothing when time is over."""
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        while True:
            if line := self._lines.take():
                return line
            if self._is_closed:
                raise Gone
            lost = self._heard + SILENCE_S
            if not poller.poll(max(min(deadline, lost) - time.monotonic(), 0.0) * 1000):
                if time.monotonic() >= lost:
                    raise Gone
                return b""
            data = os.read(self.fd, 1 << 16)
            self._heard = time.monotonic()
            self._is_closed = not data
            self._lines.add(data)


class LineBuffer:
    """Bytes as they come, lines as they are whole."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        """What has come."""
        self._data += data

    def take(self) -> bytes:
        """The next whole line with its end; nothing if there is none."""
        end = self._data.find(b"\n") + 1
        line = bytes(self._data[:end])
        del self._data[:end]
        return line

    @property
    def num_left(self) -> int:
        """Bytes that wait for the end of their line."""
        return len(self._data)

    def take_rest(self) -> bytes:
        """All that is left, which is no whole line."""
        rest, self._data = bytes(self._data), bytearray()
        return rest


def as_line(record: Job | Order | Event) -> bytes:
    """A record as it travels."""
    return wire.to_json(record).encode() + b"\n"


def named(names: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Services with their process ids, as an operator reads them."""
    return tuple(f"{name} (pid {pid})" for name, pid in names)
