"""The agent's ``logs``: the logs of this machine as one, in the order of time. Changes nothing."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta, timezone
from operator import attrgetter
from pathlib import Path

from longcat_pd.cluster.jobs import Event, Gone, Job, LogLine, LogPart, Orders
from longcat_pd.cluster.log_file import Choice, LogFile
from longcat_pd.cluster.record import RunFolder
from longcat_pd.log import as_written

LOOK_S = 0.5  # between two looks at logs that are followed
PART_BYTES = 1 << 18  # are said at once, and a line more

Say = Callable[[Event], None]


def logs(job: Job, orders: Orders, say: Say) -> None:
    """Say the lines that are asked for, and what is added, as long as somebody listens."""
    files = _files(job)

    def tell(lines: Iterable[LogLine], *, is_live: bool) -> None:
        there = sum(file.path.is_file() for file in files)
        say(Event(part=LogPart(lines=tuple(lines), clock_s=time.time(), num_logs=there, is_live=is_live)))

    tell((), is_live=False)  # at once: what time it is here
    for lines in _parts(_merged(_last(file, job.query.lines) for file in files)):
        tell(lines, is_live=False)
    tell((), is_live=True)
    try:
        while job.query.is_followed and orders.next(LOOK_S) is None:
            for lines in _parts(_merged(file.added() for file in files)):
                tell(lines, is_live=True)
    except Gone:
        return


def _files(job: Job) -> list[LogFile]:
    state = RunFolder(Path(job.folder)).read()
    logs = (
        {process.name: Path(process.log) for process in state.processes}
        if state is not None
        else {service.name: Path(job.logs) / f"{service.name}.log" for service in job.services}
    )
    since = job.query.since
    if job.query.ago_s is not None:
        since = as_written(datetime.now(timezone.utc) - timedelta(seconds=job.query.ago_s))
    return [LogFile(name, path, Choice(job.query, since)) for name, path in logs.items()]


def _last(file: LogFile, count: int | None) -> Iterable[LogLine]:
    return file.added() if count is None else deque(file.added(), maxlen=count)


def _merged(logs: Iterable[Iterable[LogLine]]) -> Iterator[LogLine]:
    return heapq.merge(*logs, key=attrgetter("at"))


def _parts(lines: Iterable[LogLine]) -> Iterator[list[LogLine]]:
    """In pieces of about ``PART_BYTES``."""
    part, size = list[LogLine](), 0
    for line in lines:
        part.append(line)
        size += len(line.text)
        if size >= PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part
