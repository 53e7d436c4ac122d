"""``run_pd.sh start``: all machines of a cluster at once, or none of them.

Asks first, starts then, and waits until all drivers have said that they serve and the balancer sees a pair.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from functools import partial

from longcat_pd.cluster import stop
from longcat_pd.cluster.jobs import Answer, Ended, Order
from longcat_pd.cluster.machines import Cluster, cluster_of, running_cluster_of
from longcat_pd.cluster.sessions import Session, Sessions
from longcat_pd.cluster.telling import EXIT_FAILED, EXIT_OK, complain, grouped, refuse_if_any, say, seconds
from longcat_pd.config.node_checks import is_loopback
from longcat_pd.config.services import BALANCER, balancer_url, start_limit_s
from longcat_pd.errors import ConfigError
from longcat_pd.progress.bars import Bars

CHECK_S = 120.0  # for a machine to say what stands against a start, once it is connected
KEEP_S = 30.0  # for an agent to end once all is ready


class StartFailed(Exception):
    """A service ended, a machine was lost, or time was over, before the cluster was ready."""

    def __init__(self, message: str, *, ended: Ended | None = None) -> None:
        super().__init__(message)
        self.ended = ended

    @property
    def status(self) -> int:
        """Exit status: the culprit's, if that says that something is wrong."""
        return (self.ended.status if self.ended is not None else 0) or EXIT_FAILED


def arguments(parser: argparse.ArgumentParser) -> None:
    """What start takes."""
    parser.add_argument("--timeout-s", type=seconds, help="how long to wait at most until all is ready")


def main(options: argparse.Namespace) -> int:
    """Start, and wait. Exit status: 0 it serves, 2 refused before anything was started, the culprit's, else 1."""
    cluster = cluster_of(options)
    _refuse_what_runs_elsewhere(running_cluster_of(options), cluster)
    _warn_of_a_hidden_balancer(cluster)
    return begin(cluster, options.timeout_s)


def begin(cluster: Cluster, timeout_s: float | None) -> int:
    """Start what is meant of it. Exit status as of ``main``."""
    timeout_s = start_limit_s(cluster.config) if timeout_s is None else timeout_s
    with Sessions([(machine, cluster.agent("start"), cluster.job(machine)) for machine in cluster.machines]) as sessions:
        _refuse_what_cannot_work(cluster, sessions)
        cluster.memory.write(cluster.text)
        sessions.send(Order(verb="go"))
        try:
            with Bars(sys.stderr) as bars:
                _wait_until_ready(cluster, sessions, bars, timeout_s=timeout_s)
            _keep(cluster, sessions)
        except StartFailed as failure:
            _report(failure)
            _clean(cluster, sessions)
            return failure.status
        except KeyboardInterrupt:
            say("interrupted: stopping what was started")
            _clean(cluster, sessions)
            return EXIT_FAILED
    _tell(cluster)
    return EXIT_OK


def _tell(cluster: Cluster) -> None:
    if cluster.only:
        say(f"ready: {cluster.services[0].name}")
        return
    url, logs = balancer_url(cluster.config), cluster.job(cluster.machines[0]).logs
    where = logs if len(cluster.machines) == 1 else f"{logs} of each machine"
    say(f"ready: {url}; logs in {where}. Try:\n\n{_curl(url, cluster.config.load_balancer.api_key_file)}\n")


def _refuse_what_runs_elsewhere(before: Cluster, cluster: Cluster) -> None:
    """What was started under this name on machines, or in folders of them, that the configuration does not name now."""
    folders = {machine.name: cluster.job(machine).folder for machine in cluster.machines}
    left = [machine for machine in before.machines if folders.get(machine.name) != before.job(machine).folder]
    if not left:
        return
    with Sessions([(machine, before.agent("status"), before.job(machine)) for machine in left]) as sessions:
        seen = sessions.collect(lambda event: event.seen, timeout_s=_answer_s(before))
        silent = [session for session in sessions.all if session not in seen]
    rows = [(session.machine.name, row) for session, answer in seen.items() for row in answer.rows if row.is_alive]
    alive = [f"{row.service} (pid {row.pid}) on {machine}" for machine, row in rows]
    for session in silent:
        complain(f"warning: {session.machine.name} was part of {cluster.name} and cannot be asked: {session.problem}")
    if alive:
        raise ConfigError(f"{cluster.name} is already running: {', '.join(alive)}; stop it first")


def _warn_of_a_hidden_balancer(cluster: Cluster) -> None:
    balancer = cluster.config.load_balancer
    machine = next(machine for machine in cluster.machines if balancer.node in machine.nodes)
    if is_loopback(balancer.host) and not machine.shell.is_here:
        text = f"load_balancer.host={balancer.host}: the balancer answers to {machine.name} alone"
        complain(f"warning: {text}; 0.0.0.0 or an address of that machine lets others in")


def _refuse_what_cannot_work(cluster: Cluster, sessions: Sessions) -> None:
    """Nothing has been started yet. Raises ConfigError with what all machines have against it."""
    found = sessions.collect(lambda event: event.found, timeout_s=_answer_s(cluster))
    is_alone = len(cluster.machines) == 1
    alive = [
        name if is_alone else f"{name} on {session.machine.name}"
        for session, answer in found.items()
        for name in answer.alive
    ]
    if alive:
        raise ConfigError(f"{cluster.name} is already running: {', '.join(alive)}; stop it first")
    silent = [session for session in sessions.all if session not in found]
    findings = [(session.machine.name, session.refusal or session.problem or "") for session in silent]
    findings += [(session.machine.name, line) for session, answer in found.items() for line in answer.findings]
    codes = dict.fromkeys(answer.code for answer in found.values())
    if len(codes) > 1:  # none of them is the right one
        text = "the code differs between machines: run 'run_pd.sh code'"
        findings += [(session.machine.name, f"{text}; release {answer.code} here") for session, answer in found.items()]
    refuse_if_any(grouped(findings, is_alone=is_alone))


def _answer_s(cluster: Cluster) -> float:
    return cluster.config.hosts.connect_timeout_s + CHECK_S


def _wait_until_ready(cluster: Cluster, sessions: Sessions, bars: Bars, *, timeout_s: float) -> None:
    """Raises StartFailed when a service ends first, a machine is lost, or time is over."""
    began, shown = time.monotonic(), ""
    waiting = {service.name for service in cluster.services if service.kind == "driver"}
    has_balancer = any(service.kind == BALANCER for service in cluster.services)
    answer = Answer(is_ready=not has_balancer, reasons=())
    for session, event in sessions.news(began + timeout_s):
        on_machine = "" if len(cluster.machines) == 1 else f" on {session.machine.name}"
        if event is None:
            raise StartFailed(_why_lost(session))
        if event.ended is not None:
            raise StartFailed(
                f"{event.ended.service}{on_machine} ended with status {event.ended.status}", ended=event.ended
            )
        if event.started is not None:
            told = f"started {event.started.service}{on_machine}, pid {event.started.pid}, log {event.started.log}"
            bars.say(partial(say, told))
            continue
        if event.progress is not None:
            bars.show(event.progress.service, event.progress.stages)
            continue
        answer = event.answer or answer
        waiting.discard(event.ready or "")
        if answer.is_ready and not waiting:
            return
        if shown != (shown := _reasons(answer, waiting)):
            bars.say(partial(say, f"{time.monotonic() - began:5.1f} s: {shown}"))
    raise StartFailed(f"not ready after {timeout_s:g} s: {_reasons(answer, waiting)} (--timeout-s waits longer)")


def _reasons(answer: Answer, waiting: set[str]) -> str:
    if answer.is_ready:
        return f"{', '.join(sorted(waiting))} not ready"
    return ", ".join(answer.reasons) or "no answer yet"


def _why_lost(session: Session) -> str:
    return f"{session.machine.name}: {session.refusal or session.problem or 'its agent has ended'}"


def _keep(cluster: Cluster, sessions: Sessions) -> None:
    """From now on the services need no agent. Raises StartFailed if one did not hear that."""
    sessions.send(Order(verb="keep"))
    for session, event in sessions.news(time.monotonic() + KEEP_S):
        if event is None and session.problem is not None:
            raise StartFailed(_why_lost(session))
        if event is not None and event.ended is not None:
            raise StartFailed(f"{event.ended.service} ended with status {event.ended.status}", ended=event.ended)
    if sessions.open:
        raise StartFailed(f"{sessions.open[0].machine.name}: no answer within {KEEP_S:g} s")


def _report(failure: StartFailed) -> None:
    complain(f"error: the start failed: {failure}")
    if failure.ended is not None:
        complain(f"the end of {failure.ended.log}:")
        for line in failure.ended.lines:
            complain(f"  {line}")


def _clean(cluster: Cluster, sessions: Sessions) -> None:
    """Agents that are left alone end what they began; where that is not known to have worked, stop does."""
    for session in sessions.open:
        session.leave()
    stopped = sessions.collect(lambda event: event.stopped, timeout_s=stop.FINISH_S)
    left = [session.machine for session in sessions.all if session not in stopped]
    answers = {session.machine: answer for session, answer in stopped.items()}
    stop.report(cluster, answers, is_all=not left)
    if not left:
        if not any(answer.left for answer in answers.values()):
            cluster.forget()
        return
    try:
        stop.stop(cluster, left, timeout_s=0.0)
    except ConfigError as error:  # the agent of a session that is lost is still at work there, and will end alone
        complain("\n".join(f"error: {line}" for line in error.message.splitlines()))


def _curl(url: str, key_file: str | None) -> str:
    body = {
        "model": "",
        "messages": [{"role": "user", "content": "你好，请介绍一下自己"}],
        "max_tokens": 64,
        "temperature": 0.7,
        "stream": False,
    }
    data = json.dumps(body, ensure_ascii=False)
    key = f' -H "Authorization: Bearer $(head -n 1 {shlex.quote(key_file)})"' if key_file else ""
    return f"curl -X POST {url}/v1/chat/completions -H \"Content-Type: application/json\"{key} -d '{data}'"
