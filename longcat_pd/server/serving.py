"""A worker that is put together and served: engine, service, links and face, until its process is to end."""

from __future__ import annotations

import socket

from longcat_pd import log
from longcat_pd.clock import MonotonicClock
from longcat_pd.config.schema import InstanceSpec, LoadBalancerConfig
from longcat_pd.errors import ConfigError
from longcat_pd.server.faced import faced
from longcat_pd.server.gate import Gate
from longcat_pd.server.parts import make_parts
from longcat_pd.server.peered import PeeredInstance, WorkerRole
from longcat_pd.server.run import serve_app


async def serve(role: WorkerRole, spec: InstanceSpec, front: LoadBalancerConfig, *, listener: socket.socket) -> int:
    """Until a signal or a fault; the exit status. Raises ConfigError for what cannot be started."""
    clock, gate = MonotonicClock(), Gate(front.max_inflight)
    parts = make_parts(spec, role.rank_entry, clock)
    try:
        service, control = role.build(parts)
    except OSError as error:
        raise ConfigError(f"{spec.role} {spec.name}: cannot listen for peers: {error}") from error
    async with faced(service, parts, gate=gate, front=front) as app:
        log.logger().info("listening", host=spec.host, port=spec.http_port)
        return await serve_app(
            app,
            listener,
            PeeredInstance(parts.engine, control, clock),
            gate=gate,
            drain_timeout_s=spec.engine.drain_timeout_s,
            clock=clock,
            told_to_end=parts.told_to_end,
        )
