"""``python -m longcat_pd.load_balancer --config YAML``: the balancer's process from its start to its exit status.

Owns the listening socket, the signals and the drain. Everything else is ``app.py``'s and ``pool.py``'s.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvicorn

from longcat_pd import log
from longcat_pd.config.checks import pools, port_uses
from longcat_pd.config.resolve import load
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.errors import ConfigError
from longcat_pd.load_balancer.app import create_app
from longcat_pd.load_balancer.assemble import NAME, build
from longcat_pd.load_balancer.face import Face
from longcat_pd.sizing.preflight import port_findings

DRAINED, FAULT, REFUSED, CUT = 0, 1, 2, 3  # exit statuses
FAREWELL_S = 2.0  # for the last errors to leave, and for uvicorn to close its connections


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal. Exit status: 0 drained, 3 some requests were cut, 2 refused at the start, 1 a fault."""
    options = _parser().parse_args(arguments)
    log.set_up()
    started = time.monotonic()
    log.logger().info("starting", role=NAME)
    try:
        cluster = load(options.config, options.overrides)
        ours = [use for use in port_uses(cluster) if use.port == cluster.load_balancer.port]
        if findings := list(port_findings(ours)):
            raise ConfigError("\n".join(findings))
        if options.check:
            return DRAINED
        face = build(cluster)
        listener = socket.create_server((cluster.load_balancer.host, cluster.load_balancer.port), backlog=2048)
    except (ConfigError, OSError) as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"error: {line}\n")
        return REFUSED
    with listener:
        status = asyncio.run(_serve(face, listener, drain_s=_drain_timeout_s(cluster), started=started))
    log.logger().info("stopped", status=status)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m longcat_pd.load_balancer", description="The balancer of a cluster.")
    parser.add_argument("--config", required=True, metavar="CLUSTER_YAML")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="key.path=value")
    parser.add_argument("--check", action="store_true", help="check the configuration and the port, then end")
    return parser


def _drain_timeout_s(cluster: ClusterConfig) -> float:
    return max(pool.engine.drain_timeout_s for _, pool in pools(cluster))


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: a signal means a drain here, and that is ours."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


async def _serve(face: Face, listener: socket.socket, *, drain_s: float, started: float) -> int:
    config = uvicorn.Config(
        create_app(face),
        http="httptools",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(FAREWELL_S),
    )
    server = _Server(config)
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    watching = asyncio.create_task(face.means.pool.watch())
    told = asyncio.create_task(signals.get())
    host, port = listener.getsockname()[:2]
    log.logger().info("listening", host=host, port=port, seconds=time.monotonic() - started)
    try:
        await asyncio.wait((serving, watching, told), return_when=asyncio.FIRST_COMPLETED)
        status = await _drain(face, signals, drain_s=drain_s) if told.done() else FAULT
    finally:
        server.should_exit = True
        watching.cancel()
        told.cancel()
        ends = await asyncio.gather(serving, watching, told, return_exceptions=True)
        await face.probe.close()
        await face.means.workers.close()
    for end in ends:
        if isinstance(end, Exception):
            log.logger().error("fault", exc_info=end)
            status = FAULT
    return status


async def _drain(face: Face, signals: asyncio.Queue[int], *, drain_s: float) -> int:
    """Take nothing new, let what runs finish in its time, cut the rest. A second signal means at once."""
    proxy, began = face.proxy, time.monotonic()
    proxy.is_draining = True
    face.means.metrics.draining.set(1)
    log.logger().info("drain_started", open=proxy.num_clients)
    parts = [asyncio.ensure_future(part) for part in (proxy.idle(), signals.get())]
    await asyncio.wait(parts, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    num_cut = proxy.num_clients
    if num_cut:
        proxy.cut()
        await asyncio.wait(parts[:1], timeout=FAREWELL_S)
    for part in parts:
        part.cancel()
    await asyncio.gather(*parts, return_exceptions=True)
    log.logger().info("drain_finished", open=proxy.num_clients, cut=num_cut, seconds=time.monotonic() - began)
    return CUT if num_cut else DRAINED


if __name__ == "__main__":
    sys.exit(main())
