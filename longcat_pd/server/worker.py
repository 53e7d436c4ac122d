"""The process of a worker's driver, from its command line to its exit status; what prefill and decode have in common.

Knows of the role what ``WorkerRole`` says.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longcat_pd import log
from longcat_pd.clock import MonotonicClock
from longcat_pd.config import resolve
from longcat_pd.config.schema import InstanceSpec, LoadBalancerConfig, Role
from longcat_pd.errors import ConfigError
from longcat_pd.server.app import create_app, worker_front
from longcat_pd.server.gate import Gate
from longcat_pd.server.parts import Parts, make_parts
from longcat_pd.server.peered import Control, PeeredInstance
from longcat_pd.server.run import STATUS_OK, listen, refuse, serve_app
from longcat_pd.server.service import Service
from longcat_pd.server.text import TextProcessor
from longcat_pd.sizing import preflight


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRole:
    """What makes a worker a prefill or a decode worker.

    ``rank_entry``: module:function of its rank processes. ``build``: its service, and its side of the control sockets;
    raises OSError for a port that cannot be had.
    """

    name: Role
    rank_entry: str
    build: Callable[[Parts], tuple[Service, Control]]


def run_worker(role: WorkerRole, arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal or a fault; the exit status of the process."""
    options = _parser(role.name).parse_args(arguments)
    log.set_up()
    log.logger().info("starting", role=role.name, instance=options.instance)
    try:
        cluster = resolve.load(options.config, options.overrides)
        spec = resolve.instance_spec(cluster, options.instance)
        if spec.role != role.name:
            raise ConfigError(f"instance={spec.name}: is a {spec.role} instance", param="instance")
        found = preflight.inspect(spec)
        for line in found.plan:
            sys.stderr.write(f"{line}\n")
        found.raise_if_refused()
        if options.check:
            return STATUS_OK
        front = worker_front(cluster.load_balancer, cluster.cluster_key_file)
        with listen(spec.host, spec.http_port) as listener:
            return asyncio.run(_serve(role, spec, front, listener=listener))
    except ConfigError as error:
        return refuse(error)


def _parser(role: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m longcat_pd.{role}_worker", description=f"One {role} instance.")
    parser.add_argument("--config", required=True, metavar="CLUSTER_YAML")
    parser.add_argument("--instance", required=True, metavar="NAME")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="key.path=value")
    parser.add_argument("--check", action="store_true", help="print the plan, test ports and memory, then end")
    return parser


async def _serve(role: WorkerRole, spec: InstanceSpec, front: LoadBalancerConfig, *, listener: socket.socket) -> int:
    clock, gate = MonotonicClock(), Gate(front.max_inflight)
    parts = make_parts(spec, role.rank_entry, clock)
    app_text = TextProcessor.load(spec.model.path)
    try:
        service, control = role.build(parts)
    except OSError as error:
        raise ConfigError(f"{spec.role} {spec.name}: cannot listen for peers: {error}") from error
    app = create_app(service, app_text, parts.metrics, gate=gate, front=front)
    log.logger().info("listening", host=spec.host, port=spec.http_port)
    return await serve_app(
        app,
        listener,
        PeeredInstance(parts.engine, control, clock),
        gate=gate,
        drain_timeout_s=spec.engine.drain_timeout_s,
        clock=clock,
    )
