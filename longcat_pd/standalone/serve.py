"""``longcat-pd serve``: one engine behind the public face, its rank in a process of its own so that the face never waits.

Owns the command's arguments and what is put together for it.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import socket
import sys
from collections.abc import Sequence

from longcat_pd import log, wire
from longcat_pd.clock import MonotonicClock
from longcat_pd.config import resolve
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec, LoadBalancerConfig
from longcat_pd.engine.driver import Engine
from longcat_pd.engine.executor import ProcessExecutor, rank_specs
from longcat_pd.errors import ConfigError
from longcat_pd.metrics import Metrics
from longcat_pd.server.app import create_app
from longcat_pd.server.gate import Gate
from longcat_pd.server.launch import ForkedRanks
from longcat_pd.server.run import STATUS_OK, listen, refuse, serve_app
from longcat_pd.server.text import TextProcessor
from longcat_pd.sizing import preflight
from longcat_pd.standalone.service import StandaloneService

RANK_ENTRY = "longcat_pd.engine.rank:main"


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal or a fault; the exit status."""
    options = _parser().parse_args(arguments)
    log.set_up()
    log.logger().info("starting", role="standalone")
    front = LoadBalancerConfig(
        host=options.host, port=options.port, api_key_file=options.api_key_file, admin_key_file=options.admin_key_file
    )
    try:
        spec = resolve.standalone(options.model, options.overrides, host=options.host, port=options.port)
        found = preflight.inspect(spec)
        for line in found.plan:
            sys.stderr.write(f"{line}\n")
        found.raise_if_refused()
        if options.check:
            return STATUS_OK
        with listen(options.host, options.port) as listener:
            return asyncio.run(_serve(spec, front, listener))
    except ConfigError as error:
        return refuse(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="longcat-pd serve", description="Serve one engine over HTTP, without a balancer.")
    parser.add_argument("--model", required=True, metavar="DIR", help="checkpoint")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=LoadBalancerConfig.port, help="and the four above it")
    parser.add_argument("--api-key-file", metavar="FILE", help="keys of clients, one a line; none: open to all")
    parser.add_argument("--admin-key-file", metavar="FILE", help="keys for /admin, one a line")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="key=value",
        help="a setting, such as engine.max_num_seqs=16 or model.dtype=float32",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="print the plan, test ports and memory, then end")
    return parser


async def _serve(spec: InstanceSpec, front: LoadBalancerConfig, listener: socket.socket) -> int:
    clock, gate = MonotonicClock(), Gate(front.max_inflight)
    metrics = Metrics(role=spec.role, instance=spec.name)
    incarnation = secrets.token_hex(8)
    ranks = rank_specs(spec, incarnation)
    processes = ForkedRanks(RANK_ENTRY, [wire.to_json(rank) for rank in ranks], clock=clock)
    engine = Engine(
        spec.engine,
        spec.parallel,
        executor=ProcessExecutor(ranks, processes, config=spec.engine, clock=clock),
        eos_token_ids=frozenset(ModelConfig.load(spec.model.path).eos_token_id),
        clock=clock,
        metrics=metrics,
    )
    service = StandaloneService(spec, engine, incarnation=incarnation, clock=clock, metrics=metrics)
    app = create_app(service, TextProcessor.load(spec.model.path), metrics, gate=gate, front=front)
    return await serve_app(app, listener, service, gate=gate, drain_timeout_s=spec.engine.drain_timeout_s, clock=clock)
