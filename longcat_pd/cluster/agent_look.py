"""The agent's ``status`` and ``logs``. Changes nothing."""

from __future__ import annotations

import http.client
from collections import deque
from collections.abc import Callable
from pathlib import Path

from longcat_pd.cluster.jobs import Event, Gone, Job, LogPart, Orders, Row, Seen
from longcat_pd.cluster.processes import Process
from longcat_pd.cluster.ready import READY_LINE, ask, condition
from longcat_pd.cluster.record import RunFolder, last_lines

LOOK_S = 0.5  # between two looks at a log that is followed
READY_LINES = 100_000  # of a log are looked through

Say = Callable[[Event], None]


def status(job: Job, orders: Orders, say: Say) -> None:
    """Say how each recorded service is."""
    del orders
    folder = RunFolder(Path(job.folder))
    state = folder.read()
    others = tuple(other.config for other in folder.others())
    if state is None:
        say(Event(seen=Seen(is_recorded=False, others=others)))
        return
    rows = tuple(map(_row, state.processes))
    say(Event(seen=Seen(is_recorded=True, config=state.config, url=state.url, rows=rows, others=others)))


def _row(process: Process) -> Row:
    is_ready, shown = False, f"ended; see {process.log}"
    if process.is_alive and not process.ready_url:
        is_ready, shown = True, "running"
    elif process.is_alive:
        code, answer = ask(process.ready_url)
        is_ready, shown = code == http.client.OK, condition(code, answer)
    lines = tuple(line for line in last_lines(process.log, READY_LINES) if READY_LINE in line)
    return Row(
        service=process.name,
        pid=process.pid,
        is_alive=process.is_alive,
        is_ready=is_ready,
        condition=shown,
        ready_lines=lines,
    )


def logs(job: Job, orders: Orders, say: Say) -> None:
    """Say the last lines of every log, and what is added, as long as somebody listens."""
    state = RunFolder(Path(job.folder)).read()
    files = (
        {process.name: Path(process.log) for process in state.processes}
        if state is not None
        else {service.name: Path(job.logs) / f"{service.name}.log" for service in job.services}
    )
    tails = [_Tail(name, file) for name, file in files.items() if file.is_file()]
    for tail in tails:
        say(Event(part=LogPart(service=tail.name, log=str(tail.log), lines=tail.last(job.lines))))
    try:
        while job.is_followed and orders.next(LOOK_S) is None:
            for tail in tails:
                if lines := tail.added():
                    say(Event(part=LogPart(service=tail.name, log=str(tail.log), lines=lines)))
    except Gone:
        return


class _Tail:
    """One log and how far it has been told. A log that was begun anew is told from its start."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self._file = log.stat().st_ino
        self._place = 0

    def last(self, count: int) -> tuple[str, ...]:
        """The last whole lines that are there now."""
        with self.log.open("rb") as file:
            lines = deque(file, maxlen=count + 1)
            self._place = file.tell()
        if lines and not lines[-1].endswith(b"\n"):
            self._place -= len(lines.pop())
        whole = [line.decode(errors="replace").rstrip("\r\n") for line in lines]
        return tuple(whole[max(len(whole) - count, 0) :])

    def added(self) -> tuple[str, ...]:
        """Whole lines since the last look."""
        if not self.log.is_file():
            return ()
        found = self.log.stat()
        if found.st_ino != self._file or found.st_size < self._place:
            self._file, self._place = found.st_ino, 0
        with self.log.open("rb") as file:
            file.seek(self._place)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._place += len(whole)
        return tuple(whole.decode(errors="replace").splitlines())
