"""``python -m longcat_pd.load_balancer --config YAML``: the balancer's process from its start to its exit status.

Owns what starting and closing mean for a balancer. Signals and the drain are ``server/run.py``'s, as for every process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from longcat_pd import log
from longcat_pd.config.checks import pools, port_uses
from longcat_pd.config.resolve import load
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.errors import ConfigError, EngineFault
from longcat_pd.load_balancer.app import create_app
from longcat_pd.load_balancer.assemble import NAME, build
from longcat_pd.load_balancer.face import Face
from longcat_pd.server.run import LAST_BYTES_S, STATUS_OK, listen, refuse, serve_app
from longcat_pd.sizing.preflight import port_findings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal. Exit status: 0 drained, 3 some requests were cut, 2 refused at the start, 1 a fault."""
    options = _parser().parse_args(arguments)
    log.set_up()
    log.logger().info("starting", role=NAME)
    began = time.monotonic()
    try:
        cluster = load(options.config, options.overrides)
        log.logger().info("config_resolved", seconds=time.monotonic() - began)
        settings = cluster.load_balancer
        log.logger().info(
            "plan", ports=[settings.port], instances=[i.name for _, pool in pools(cluster) for i in pool.instances]
        )
        if findings := list(port_findings(use for use in port_uses(cluster) if use.port == settings.port)):
            raise ConfigError("\n".join(findings))
        if options.check:
            return STATUS_OK
        face = build(cluster)
        listener = listen(settings.host, settings.port)
    except ConfigError as error:
        return refuse(error)
    with listener:
        return asyncio.run(_serve(cluster, face, listener))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m longcat_pd.load_balancer", description="The balancer of a cluster.")
    parser.add_argument("--config", required=True, metavar="CLUSTER_YAML")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="key.path=value")
    parser.add_argument("--check", action="store_true", help="check the configuration and the port, then end")
    return parser


class _Instance:
    """The balancer as something to start and to close: it has started when one pair can serve."""

    def __init__(self, face: Face) -> None:
        self._face = face
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._watching = asyncio.create_task(self._face.means.pool.watch())
        await self._face.means.pool.has_been_ready.wait()

    async def failed(self) -> NoReturn:
        assert self._watching is not None
        await asyncio.wait({self._watching})  # which ends by itself only through a defect
        log.logger().error("watch_failed", exc_info=self._watching.exception())
        raise EngineFault("the watch over the instances failed")

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):  # what is cut closes its own calls first
            await self._face.means.clock.within(LAST_BYTES_S, self._face.gate.empty())
        await self._face.probe.close()
        await self._face.lookout.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._face.means.workers.close()
        if self._face.means.tracer is not None:
            await self._face.means.tracer.close()


async def _serve(cluster: ClusterConfig, face: Face, listener: socket.socket) -> int:
    drain_timeout_s = max(pool.engine.drain_timeout_s for _, pool in pools(cluster))
    host, port = listener.getsockname()[:2]
    log.logger().info("listening", host=host, port=port)
    return await serve_app(
        create_app(face),
        listener,
        _Instance(face),
        gate=face.gate,
        drain_timeout_s=drain_timeout_s,
        clock=face.means.clock,
    )


if __name__ == "__main__":
    sys.exit(main())
