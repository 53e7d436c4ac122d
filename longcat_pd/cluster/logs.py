"""``run_pd.sh logs``: what all processes of a cluster have written, on all machines, as one log in the order of time."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone

from longcat_pd.cluster.jobs import LogLine, LogPart, LogQuery
from longcat_pd.cluster.log_file import LEVELS
from longcat_pd.cluster.log_order import HOLD_S, Held, Past
from longcat_pd.cluster.machines import Cluster, Machine, running_cluster_of
from longcat_pd.cluster.sessions import Session, Sessions
from longcat_pd.cluster.telling import EXIT_FAILED, EXIT_NOT_RUNNING, EXIT_OK, complain, say
from longcat_pd.errors import ConfigError
from longcat_pd.log import as_written

ANSWER_S = 60.0  # for a machine to read its logs, once it is connected, and between two of its answers
APART_S = 1.0  # clocks that are further apart are told of
LINES = 20

_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_LONGEST_AGO_S = 1e9  # thirty years, before every log: a machine that counts back further leaves the calendar
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def arguments(parser: argparse.ArgumentParser) -> None:
    """What logs takes."""
    parser.add_argument(
        "--lines", type=int, metavar="N", help=f"the last N of each log; {LINES}, or all with --since or --request"
    )
    parser.add_argument("--follow", action="store_true", help="go on until interrupted")
    parser.add_argument("--since", metavar="TIME", help="2026-01-31T10:00:00Z, or how long ago: 90s, 15m, 2h, 1d")
    parser.add_argument("--request", metavar="ID", default="", help="only lines about this request, from all processes")
    parser.add_argument("--level", choices=LEVELS, default="debug", help="only lines of this level and above")
    parser.add_argument("--node", metavar="ADDRESS", help="of this machine only")


def main(options: argparse.Namespace) -> int:
    """Tell them. Exit status: 0, 3 there are no logs, 1 not all machines could be asked."""
    query = _query(options)
    cluster = running_cluster_of(options)
    machines = [machine for machine in cluster.machines if options.node in (None, *machine.nodes)]
    if not machines:
        known = ", ".join(node for machine in cluster.machines for node in machine.nodes)
        raise ConfigError(f"--node {options.node}: not a machine of {cluster.name}; known: {known}")
    with Sessions([(machine, cluster.agent("logs"), cluster.job(machine, query)) for machine in machines]) as sessions:
        teller = _Teller(sessions, cluster)
        with contextlib.suppress(KeyboardInterrupt):
            teller.tell_past()
            if query.is_followed:
                teller.tell_what_comes()
    problems = list(teller.problems())
    for machine, problem in problems:
        complain(f"error: {machine.name}: {problem}")
    if not teller.num_logs and not problems:
        say(f"{cluster.name} has no logs in {cluster.job(machines[0]).logs}")
        return EXIT_NOT_RUNNING
    return EXIT_FAILED if problems else EXIT_OK


def _query(options: argparse.Namespace) -> LogQuery:
    """Raises ConfigError."""
    since, ago_s = _since(options.since)
    is_narrowed = bool(options.since or options.request)
    lines: int | None = options.lines if options.lines is not None or is_narrowed else LINES
    if lines is not None and lines < 0:
        raise ConfigError(f"--lines {lines}: must be at least 0")
    return LogQuery(
        lines=lines, since=since, ago_s=ago_s, request=options.request, level=options.level, is_followed=options.follow
    )


def _since(text: str | None) -> tuple[str, float | None]:
    """A time, or how long ago. Without a zone it is UTC, as in the logs. Raises ConfigError."""
    if text is None:
        return "", None
    if ago := _AGO.fullmatch(text):
        return "", min(float(ago[1]) * _UNITS[ago[2]], _LONGEST_AGO_S)
    try:
        time_given = datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text))  # Python 3.10 knows no Z
        return as_written(time_given if time_given.tzinfo is not None else time_given.replace(tzinfo=timezone.utc)), None
    except (ValueError, OverflowError):  # the latter: before the year 1 in UTC, or after 9999
        raise ConfigError(f"--since {text}: neither a time as 2026-01-31T10:00:00Z nor 90s, 15m, 2h, 1d") from None


class _Teller:
    """Puts in order what the agents say, and says it."""

    def __init__(self, sessions: Sessions, cluster: Cluster) -> None:
        self._sessions = sessions
        self._answer_s = cluster.config.hosts.connect_timeout_s + ANSWER_S
        self._past = Past(sessions.all)
        self._held = Held()
        self._ahead: dict[Session, float] = {}  # of this machine's clock, in seconds
        self._late: list[Session] = []
        self._num_logs: dict[Session, int] = {}

    @property
    def num_logs(self) -> int:
        """That were seen."""
        return sum(self._num_logs.values())

    def problems(self) -> Iterator[tuple[Machine, str]]:
        """Machines that could not be asked, and why."""
        for session in self._sessions.all:
            if session.problem is not None:
                yield session.machine, session.refusal or session.problem
            elif session in self._late:
                yield session.machine, f"no answer within {self._answer_s:g} s"

    def tell_past(self) -> None:
        """All that was there. A machine that says nothing for too long is not waited for."""
        deadline = time.monotonic() + self._answer_s
        while self._past.waits_for and time.monotonic() < deadline:
            for session, event in self._sessions.news(deadline):
                if event is None:
                    self._past.close(session)
                elif event.part is not None:
                    self._take(session, event.part)
                deadline = time.monotonic() + self._answer_s
                _say_all(self._past.ready())
                break  # with the new deadline
        self._late = self._past.waits_for
        for session in self._late:
            self._past.close(session)
        _say_all(self._past.ready())
        self._tell_clocks()

    def tell_what_comes(self) -> None:
        """Until all sessions have ended."""
        while self._sessions.open:
            for session, event in self._sessions.news(min(self._held.due, time.monotonic() + HOLD_S)):
                if event is not None and event.part is not None:
                    self._take(session, event.part)
            _say_all(self._held.ready(time.monotonic()))
        _say_all(self._held.ready(math.inf))

    def _take(self, session: Session, part: LogPart) -> None:
        self._num_logs[session] = part.num_logs
        if session not in self._ahead:
            self._ahead[session] = part.clock_s - time.time()
        if session in self._past.waits_for:
            self._past.add(session, part.lines)
            if part.is_live:
                self._past.close(session)
        else:
            self._held.add(part.lines, time.monotonic())

    def _tell_clocks(self) -> None:
        """On standard error, where it is no line of the log."""
        by_clock = sorted(self._ahead, key=lambda session: self._ahead[session])
        if not by_clock:
            return
        behind, ahead = by_clock[0], by_clock[-1]
        apart_s = self._ahead[ahead] - self._ahead[behind]
        if apart_s > APART_S:
            text = f"the clock of {ahead.machine.name} is {apart_s:.1f} s ahead of that of {behind.machine.name}"
            complain(f"note: {text}; lines stand in the order of what each machine's clock says")


def _say_all(lines: Sequence[LogLine]) -> None:
    if lines:
        say("\n".join(f"{line.service:<12} | {line.text}" for line in lines))
