"""``run_pd.sh stop``: the balancer, then the drivers, then what is left, on every machine of a cluster that can be reached;
or one service.

Ends exactly the processes that a start recorded, and what they started.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from longcat_pd.cluster.jobs import GROUPS, Found, Group, Order, Stopped
from longcat_pd.cluster.machines import Cluster, Machine, running_cluster_of, running_part_of
from longcat_pd.cluster.sessions import Session, Sessions
from longcat_pd.cluster.telling import (
    EXIT_FAILED,
    EXIT_NOT_RUNNING,
    EXIT_OK,
    complain,
    grouped,
    not_running,
    refuse_if_any,
    say,
    seconds,
)

ANSWER_S = 60.0  # for a machine to say what runs there, once it is connected
RANKS_END_S = 10.0  # ranks on further nodes end with their driver, which has ended
FINISH_S = 60.0  # for what is left to be killed and ports to be tested


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Exit status, and whether nothing is left anywhere."""

    status: int
    is_clear: bool


def arguments(parser: argparse.ArgumentParser) -> None:
    """What stop takes."""
    parser.add_argument("--timeout-s", type=seconds, help="how long services may take to end by themselves")
    parser.add_argument("--instance", metavar="NAME", help="this instance alone, on all of its machines, or balancer")


def main(options: argparse.Namespace) -> int:
    """Stop. Exit status: 0 all ended by itself, or nothing ran; 1 not everywhere, or not by itself; 2 refused."""
    cluster = running_cluster_of(options) if options.instance is None else running_part_of(options)
    return stop(cluster, cluster.machines, timeout_s=options.timeout_s).status


def stop(cluster: Cluster, machines: Sequence[Machine], *, timeout_s: float | None) -> Outcome:
    """End what runs on these machines. Raises ConfigError if another start or stop is at work on one of them."""
    with Sessions([(machine, cluster.agent("stop"), cluster.job(machine)) for machine in machines]) as sessions:
        answer_s = cluster.config.hosts.connect_timeout_s + ANSWER_S
        found = sessions.collect(lambda event: event.found, timeout_s=answer_s)
        refusals = [(s.machine.name, s.refusal) for s in sessions.all if s.refusal is not None]
        refuse_if_any(grouped(refusals, is_alone=len(cluster.machines) == 1))
        lost = [session for session in sessions.all if session not in found]
        running = {session: answer for session, answer in found.items() if answer.is_recorded}
        if not running and not lost:
            return _nothing_runs(cluster, found)
        drain_s = max((answer.drain_s for answer in running.values()), default=0.0) if timeout_s is None else timeout_s
        _end_groups(sessions, running, within_s=drain_s)
        sessions.send(Order(verb="finish"))
        stopped = sessions.collect(lambda event: event.stopped, timeout_s=FINISH_S)
        lost += [session for session in running if session not in stopped]
    for session in lost:
        complain(f"error: {session.machine.name}: not stopped: {session.problem or 'its agent has ended'}")
    is_clean = report(cluster, {s.machine: answer for s, answer in stopped.items()}, is_all=not lost)
    has_left = any(answer.left for answer in stopped.values())
    if not lost and not has_left:
        cluster.forget()
    is_clear = not lost and not has_left and not any(answer.findings for answer in stopped.values())
    return Outcome(status=EXIT_OK if is_clean and not lost else EXIT_FAILED, is_clear=is_clear)


def report(cluster: Cluster, stopped: Mapping[Machine, Stopped], *, is_all: bool) -> bool:
    """Say what had to be killed and which ports are still taken; whether there was nothing of that kind."""
    is_alone = len(cluster.machines) == 1
    for machine, answer in stopped.items():
        if answer.num_killed:
            where = "" if is_alone else f" on {machine.name}"
            names = ", ".join(answer.late) or "ranks left behind"
            say(f"killed {answer.num_killed} processes{where} that did not end by themselves: {names}")
    left = [(machine.name, _left(answer.left)) for machine, answer in stopped.items() if answer.left]
    findings = [(machine.name, line) for machine, answer in stopped.items() for line in answer.findings]
    for line in grouped([*left, *findings], is_alone=is_alone):
        complain(f"error: {line}")
    if is_all and not left:
        what = " ".join(("stopped", *(s.name for s in cluster.services if cluster.only and s.kind != "ranks")))
        say(what if not findings else f"{what}, but ports are still taken")
    elif gone := [machine.name for machine, answer in stopped.items() if not answer.left]:
        say(f"stopped on {', '.join(gone)}")
    return not findings and not any(answer.num_killed for answer in stopped.values())


def _left(pids: Sequence[int]) -> str:
    text = "were killed and have not ended: they may wait for a device or a disk; stop again, or restart the machine"
    return f"processes {', '.join(map(str, pids))} {text}"


def _nothing_runs(cluster: Cluster, found: Mapping[Session, Found]) -> Outcome:
    findings = [(session.machine.name, line) for session, answer in found.items() for line in answer.findings]
    if findings:
        complain(f"error: nothing of {cluster.name} is recorded, so nothing was ended, but its ports are taken:")
        for line in grouped(findings, is_alone=len(cluster.machines) == 1):
            complain(f"error: {line}")
        return Outcome(status=EXIT_FAILED, is_clear=False)
    others = list(dict.fromkeys(other for answer in found.values() for other in answer.others))
    say(not_running(cluster.name, others))
    cluster.forget()
    return Outcome(status=EXIT_NOT_RUNNING if others else EXIT_OK, is_clear=True)


def _end_groups(sessions: Sessions, running: Mapping[Session, Found], *, within_s: float) -> None:
    """The balancer first, so that nothing new arrives while the drivers finish, together."""
    deadline = time.monotonic() + within_s
    try:
        for group in GROUPS:
            left = max(deadline - time.monotonic(), 0.0)
            within_s = min(left, RANKS_END_S) if group == "ranks" else left
            sessions.send(Order(verb="end", group=group, within_s=within_s))
            _wait_until_settled(sessions, running, group, timeout_s=within_s + ANSWER_S)
    except KeyboardInterrupt:
        say("interrupted: no more waiting")


def _wait_until_settled(sessions: Sessions, running: Mapping[Session, Found], group: Group, *, timeout_s: float) -> None:
    waiting = {session for session in running if not session.is_over}
    for session, event in sessions.news(time.monotonic() + timeout_s) if waiting else ():
        if event is None or event.settled == group:
            waiting.discard(session)
        if not waiting:
            return
