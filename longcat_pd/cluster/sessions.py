"""Agents at work on the machines of a cluster, all at once: what they are told, what they say, and how each ended.

One thread; every wait has a deadline. Knows nothing of what the events mean.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, TypeVar

from longcat_pd.cluster.jobs import STILL_S, Event, Job, LineBuffer, Order, as_line
from longcat_pd.cluster.machines import Machine
from longcat_pd.cluster.shell import MOST_SAID, as_shell_shows, too_much
from longcat_pd.wire import MalformedRecord, from_json

LEAVE_S = 20.0  # for agents to end what they have begun, when they are left alone
R = TypeVar("R")

_MOST_KEPT = 1 << 20  # bytes that are no events
END_S = 5.0  # an agent ends that long after it has closed its output at the latest


class News(NamedTuple):
    """What one agent said; None: its session has ended."""

    session: Session
    event: Event | None


class Session:
    """One agent. ``problem``: why it ended, where that was not as it should; ``refusal``: what it said before."""

    def __init__(self, machine: Machine, command: Sequence[str], job: Job) -> None:
        self.machine = machine
        self.problem: str | None = None
        self.refusal: str | None = None
        self.is_over = False
        self._process = machine.shell.start(command, stdin=as_line(job))
        self._lines = LineBuffer()
        self._said = bytearray()
        self.excess = ""  # why it was cut, if it said too much

    @property
    def streams(self) -> Iterator[int]:
        """Descriptors of what it writes."""
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            yield stream.fileno()

    def send(self, order: Order) -> None:
        """Give an order; nothing happens if it has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(as_line(order))
            self._process.stdin.flush()

    def leave(self) -> None:
        """No more orders will come."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def take(self, fd: int, data: bytes) -> list[Event]:
        """The events in what was read from one of its streams."""
        if fd != next(self.streams):
            self._keep(data)
            return []
        self._lines.add(data)
        events = []
        while line := self._lines.take():
            try:
                events.append(from_json(Event, line))
            except MalformedRecord:  # something that a shell says when it starts
                self._keep(line)
        if self._lines.num_left > MOST_SAID:
            self.excess = too_much(self._lines.take_rest())
            self.cut()
        self.refusal = next((event.refused for event in events if event.refused is not None), self.refusal)
        return events

    def _keep(self, said: bytes) -> None:
        """What comes last says why."""
        self._said += said
        del self._said[:-_MOST_KEPT]

    def end(self) -> None:
        """It has closed its streams: find out how it ended."""
        self.is_over = True
        self.leave()
        try:
            status = as_shell_shows(self._process.wait(END_S))
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = as_shell_shows(self._process.wait())
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
        fault = self.machine.shell.fault(status, bytes(self._said))
        if self.excess:
            self.problem = self.excess
        elif fault is not None:
            self.problem = fault.reason
        elif status:
            said = [line for line in self._said.decode(errors="replace").splitlines() if line.strip()]
            self.problem = said[-1].strip() if said else f"the agent ended with status {status}"

    def cut(self) -> None:
        """End the session by force; what it began on its machine notices that by itself."""
        self._process.kill()


class Sessions:
    """The agents of one verb. Leaving the context leaves no session behind.

    Args:
        jobs: machine, command of its agent, and what that is told.
    """

    def __init__(self, jobs: Sequence[tuple[Machine, Sequence[str], Job]]) -> None:
        self.all = [Session(machine, command, job) for machine, command, job in jobs]
        self._still_at = time.monotonic() + STILL_S
        self._pending: deque[News] = deque()
        self._selector = selectors.DefaultSelector()
        for session in self.all:
            for fd in session.streams:
                self._selector.register(fd, selectors.EVENT_READ, session)

    def __enter__(self) -> Sessions:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for session in self.open:
            session.leave()
        for _ in self.news(time.monotonic() + LEAVE_S):
            pass
        for session in self.open:
            session.cut()
            session.end()
        self._selector.close()

    @property
    def open(self) -> list[Session]:
        """Those that have not ended."""
        return [session for session in self.all if not session.is_over]

    def send(self, order: Order) -> None:
        """Give the same order to all."""
        for session in self.open:
            session.send(order)

    def news(self, deadline: float) -> Iterator[News]:
        """What comes, until all sessions have ended or ``deadline`` (of the monotonic clock) is reached."""
        while True:
            while self._pending:
                yield self._pending.popleft()
            left = deadline - time.monotonic()
            if left <= 0 or not self._selector.get_map():
                return
            self._show_life()
            for key, _ in self._selector.select(min(left, STILL_S)):
                self._read(key.fd, key.data)

    def _read(self, fd: int, session: Session) -> None:
        if data := os.read(fd, 1 << 16):
            self._pending += (News(session, event) for event in session.take(fd, data))
            if not session.excess:
                return
        for done in session.streams if session.excess else (fd,):  # what it began may hold the others open
            if done in self._selector.get_map():
                self._selector.unregister(done)
        if not any(other in self._selector.get_map() for other in session.streams):
            session.end()
            self._pending.append(News(session, None))

    def _show_life(self) -> None:
        if time.monotonic() >= self._still_at:
            self._still_at = time.monotonic() + STILL_S
            self.send(Order(verb="still"))

    def collect(self, pick: Callable[[Event], R | None], *, timeout_s: float) -> dict[Session, R]:
        """One answer of each agent, in their order; a session that gives none in time has a ``problem``."""
        answers: dict[Session, R] = {}
        deadline = time.monotonic() + timeout_s
        for session, event in self.news(deadline):
            if event is not None and (answer := pick(event)) is not None:
                answers[session] = answer
            if all(session in answers or session.is_over for session in self.all):
                break
        for session in self.all:
            if session in answers or session.problem is not None:
                continue
            session.problem = (
                "its session ended without an answer" if session.is_over else f"no answer within {timeout_s:g} s"
            )
        return {session: answers[session] for session in self.all if session in answers}
