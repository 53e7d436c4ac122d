"""The process of a worker's driver, from its command line to its exit status; what prefill and decode have in common.

Knows of the role what ``WorkerRole`` says.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from longcat_pd import log
from longcat_pd.config import resolve
from longcat_pd.errors import ConfigError
from longcat_pd.server.app import worker_front
from longcat_pd.server.peered import WorkerRole
from longcat_pd.server.run import STATUS_OK, listen, refuse
from longcat_pd.server.serving import serve
from longcat_pd.sizing import preflight


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
            return asyncio.run(serve(role, spec, front, listener=listener))
    except ConfigError as error:
        return refuse(error)


def _parser(role: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m longcat_pd.{role}_worker", description=f"One {role} instance.")
    parser.add_argument("--config", required=True, metavar="CLUSTER_YAML")
    parser.add_argument("--instance", required=True, metavar="NAME")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="key.path=value")
    parser.add_argument("--check", action="store_true", help="print the plan, test ports and memory, then end")
    return parser
