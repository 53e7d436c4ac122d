"""The agent's ``stop``: ends the recorded services of this machine, group after group, and what they left behind.

By process id and start time, never by name.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from longcat_pd.cluster.jobs import GROUPS, Event, Found, Group, Job, Order, Orders, Stopped, named
from longcat_pd.cluster.processes import Process, StillAlive, kill_sessions, send, wait_for_end, wait_for_news
from longcat_pd.cluster.record import RunFolder, State
from longcat_pd.config.services import BALANCER
from longcat_pd.sizing.preflight import port_findings

HELPERS_END_S = (
    15.0  # for what a driver leaves behind: the interpreter that ranks are forked from takes seconds on a busy machine
)
NEXT_ORDER_S = 3600.0  # other machines may drain so long

Say = Callable[[Event], None]


def stop(job: Job, orders: Orders, say: Say) -> None:
    """Say what was found; then end groups as ordered, until ``finish`` kills the rest. Without it all stays recorded."""
    folder = RunFolder(Path(job.folder))
    with folder.one_at_a_time():
        state = folder.read()
        others = tuple(other.config for other in folder.others())
        if state is None:
            findings = () if others else tuple(port_findings(job.ports))  # a record may be lost while services run
            say(Event(found=Found(is_recorded=False, others=others, findings=findings)))
            return
        if job.is_part:
            state = state.of([service.name for service in job.services], job.ports)
        names = named((process.name, process.pid) for process in state.alive)
        say(Event(found=Found(is_recorded=True, alive=names, drain_s=state.drain_s)))
        order = orders.next(NEXT_ORDER_S)
        while order is not None and order.verb == "end":
            following = _end_group(_members(state, order.group), order, orders=orders)
            say(Event(settled=order.group))
            order = following or orders.next(NEXT_ORDER_S)
        if order is not None and order.verb == "finish":
            say(Event(stopped=finish(folder, state)))


def end_all(folder: RunFolder, state: State, *, within_s: float) -> Stopped:
    """End the groups of this machine one after the other, then kill what is left."""
    deadline = time.monotonic() + within_s
    for group in GROUPS:
        members = _members(state, group)
        for process in members:
            send(process, signal.SIGTERM)
        alive = [process for process in members if process.is_alive]
        wait_for_end(alive, timeout_s=max(deadline - time.monotonic(), 0.0), all_of_them=True)
    return finish(folder, state)


def finish(folder: RunFolder, state: State) -> Stopped:
    """Kill what is left, test the ports, and forget it; what does not end even so stays recorded."""
    late = tuple(process.name for process in state.alive)
    try:
        killed = kill_sessions(state.processes, grace_s=0.0 if late else HELPERS_END_S)
    except StillAlive as error:
        return Stopped(num_killed=len(error.killed), late=late, findings=(), left=error.left)
    findings = tuple(port_findings(state.ports))
    folder.drop(state.processes)
    return Stopped(num_killed=len(killed), late=late, findings=findings)


def _end_group(members: Sequence[Process], order: Order, *, orders: Orders) -> Order | None:
    """Tell these to end and wait for it; an order that comes first ends the waiting and is returned."""
    deadline = time.monotonic() + order.within_s
    for process in members:
        send(process, signal.SIGTERM)
    alive = [process for process in members if process.is_alive]
    while alive and (left := deadline - time.monotonic()) > 0:
        if (following := orders.next(0.0)) is not None:  # it may have come with the one before
            return following
        wait_for_news(alive, fd=orders.fd, timeout_s=left)
        alive = [process for process in alive if process.is_alive]
    return None


def _members(state: State, group: Group) -> list[Process]:
    return [process for process in state.processes if _group(process) == group]


def _group(process: Process) -> Group:
    """Of the services only ranks on further nodes have no HTTP."""
    if process.name == BALANCER:
        return "balancer"
    return "driver" if process.ready_url else "ranks"
