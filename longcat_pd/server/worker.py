"""The process of a worker, from its command line to its exit status; what prefill and decode have in common.

It is the instance's driver, or one that starts ranks on a further node. Knows of the role what ``WorkerRole`` says.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence

from longcat_pd import log
from longcat_pd.config import resolve
from longcat_pd.config.schema import ClusterConfig, InstanceSpec
from longcat_pd.errors import ConfigError
from longcat_pd.server.app import worker_front
from longcat_pd.server.inspected import tell_plan
from longcat_pd.server.node_process import serve_node, tell_refusal
from longcat_pd.server.peered import WorkerRole
from longcat_pd.server.run import STATUS_OK, listen, refuse
from longcat_pd.server.serving import serve


def run_worker(role: WorkerRole, arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal or a fault; the exit status of the process."""
    options = _parser(role.name).parse_args(arguments)
    node: int = options.node_rank
    log.set_up()
    log.logger().info("starting", role=role.name, instance=options.instance, node=node)
    began = time.monotonic()
    try:
        cluster = resolve.load(options.config, options.overrides)
        spec = resolve.instance_spec(cluster, options.instance)
        log.logger().info("config_resolved", digest=spec.config_digest, seconds=time.monotonic() - began)
        _check_place(role, spec, node)
        tell_plan(spec, node_rank=node)
        if options.check:
            return STATUS_OK
        if node:
            return asyncio.run(serve_node(spec, node, role.rank_entry))
        return _drive(role, cluster, spec)
    except ConfigError as error:
        status = refuse(error)
        if node and not options.check:
            _tell_driver(options, error)
        return status


def _check_place(role: WorkerRole, spec: InstanceSpec, node: int) -> None:
    if spec.role != role.name:
        raise ConfigError(f"instance={spec.name}: is a {spec.role} instance", param="instance")
    last = max(len(spec.nodes), 1) - 1
    if not 0 <= node <= last:
        raise ConfigError(f"node-rank={node}: the nodes of {spec.name} are 0 ... {last}", param="node-rank")


def _drive(role: WorkerRole, cluster: ClusterConfig, spec: InstanceSpec) -> int:
    front = worker_front(cluster.load_balancer, cluster.cluster_key_file)
    with listen(spec.host, spec.http_port) as listener:
        return asyncio.run(serve(role, spec, front, listener=listener))


def _tell_driver(options: argparse.Namespace, error: ConfigError) -> None:
    """As far as this node knows where that is: perhaps it cannot read the checkpoint, or not even the file."""
    try:
        cluster = resolve.unresolved(options.config, options.overrides)
        spec = resolve.instance_spec(cluster, options.instance)
    except ConfigError:
        return
    asyncio.run(tell_refusal(spec, options.node_rank, error.message))


def _parser(role: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m longcat_pd.{role}_worker", description=f"One {role} instance.")
    parser.add_argument("--config", required=True, metavar="CLUSTER_YAML")
    parser.add_argument("--instance", required=True, metavar="NAME")
    parser.add_argument(
        "--node-rank",
        type=int,
        default=0,
        metavar="K",
        help="0: its driver, with the ranks of its first node; else those of node K",
    )
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="key.path=value")
    parser.add_argument("--check", action="store_true", help="print the plan, test ports and memory, then end")
    return parser
