"""The agent's ``status``. Changes nothing."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from pathlib import Path

from longcat_pd.cluster.jobs import Event, Job, Orders, Row, Seen
from longcat_pd.cluster.processes import Process
from longcat_pd.cluster.ready import READY_LINE, ask, condition
from longcat_pd.cluster.record import RunFolder, last_lines

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
