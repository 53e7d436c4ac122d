"""``run_pd.sh status``: what runs on every machine of a cluster."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from longcat_pd.cluster.jobs import Row, Seen
from longcat_pd.cluster.machines import Cluster, Machine, running_cluster_of
from longcat_pd.cluster.sessions import Sessions
from longcat_pd.cluster.telling import EXIT_FAILED, EXIT_NOT_RUNNING, EXIT_OK, not_running, say
from longcat_pd.config.services import balancer_url, services

ANSWER_S = 60.0  # for a machine to look at its services, once it is connected


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """Status takes nothing of its own."""
    del parser


def status(options: argparse.Namespace) -> int:
    """Each service: whether it is ready, and why not. Exit status: 0 all are, 3 nothing was started, 1 else."""
    cluster = running_cluster_of(options)
    with Sessions([(machine, cluster.agent("status"), cluster.job(machine)) for machine in cluster.machines]) as sessions:
        seconds = cluster.config.hosts.connect_timeout_s + ANSWER_S
        seen = {s.machine: answer for s, answer in sessions.collect(lambda e: e.seen, timeout_s=seconds).items()}
        problems = {s.machine: s.refusal or s.problem or "" for s in sessions.all if s.machine not in seen}
    if not problems and not any(answer.is_recorded for answer in seen.values()):
        say(not_running(cluster.name, dict.fromkeys(other for answer in seen.values() for other in answer.others)))
        return EXIT_NOT_RUNNING
    return _show(cluster, seen, problems)


def _show(cluster: Cluster, seen: Mapping[Machine, Seen], problems: Mapping[Machine, str]) -> int:
    say(f"{cluster.name}: {cluster.file}, {balancer_url(cluster.config)}")
    rows = {row.service: row for answer in seen.values() for row in answer.rows}
    is_alone, is_ready = len(cluster.machines) == 1, True
    for service in services(cluster.config):
        machine = next(machine for machine in cluster.machines if service.node in machine.nodes)
        row = rows.get(service.name)
        is_ready = is_ready and row is not None and row.is_ready
        where = "" if is_alone else f"{service.node:<15} "
        say(f"  {service.name:<12} {where}{_shown(row, problems.get(machine))}")
        for line in row.ready_lines if row is not None else ():
            say(f"  {'':<12} {line}")
    return EXIT_OK if is_ready else EXIT_FAILED


def _shown(row: Row | None, problem: str | None) -> str:
    if row is not None:
        return f"pid {row.pid:<8} {row.condition}"
    return "not started" if problem is None else f"unknown: the machine cannot be asked: {problem}"
