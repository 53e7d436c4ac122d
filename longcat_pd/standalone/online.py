"""What a standalone server is put together from. Knows no arguments and no files but the checkpoint."""

from __future__ import annotations

import socket
import sys

from longcat_pd.clock import MonotonicClock
from longcat_pd.config.schema import InstanceSpec, LoadBalancerConfig
from longcat_pd.server.faced import faced
from longcat_pd.server.gate import Gate
from longcat_pd.server.parts import make_parts
from longcat_pd.server.run import serve_app
from longcat_pd.standalone.service import StandaloneService
from longcat_pd.standalone.start import ShownInstance, ShownStart

RANK_ENTRY = "longcat_pd.engine.rank:main"


async def serve(spec: InstanceSpec, front: LoadBalancerConfig, listener: socket.socket) -> int:
    """Serve until a signal or a fault; the exit status. Raises ConfigError."""
    clock, gate = MonotonicClock(), Gate(front.max_inflight)
    shown = ShownStart(sys.stderr, clock)
    parts = make_parts(spec, RANK_ENTRY, clock, on_progress=shown.progressed)
    service = StandaloneService(spec, parts.engine, hello=parts.hello, clock=clock)
    async with faced(service, parts, gate=gate, front=front) as app:
        instance = ShownInstance(service, shown)
        return await serve_app(app, listener, instance, gate=gate, drain_timeout_s=spec.engine.drain_timeout_s, clock=clock)
