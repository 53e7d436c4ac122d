"""What offline inference over rank processes is put together from: the service, and what is measured of its steps."""

from __future__ import annotations

from dataclasses import dataclass

from longcat_pd.clock import Clock
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.engine.accounting import Acceptance
from longcat_pd.server.parts import make_parts
from longcat_pd.standalone.figures import StepRecorder
from longcat_pd.standalone.online import RANK_ENTRY
from longcat_pd.standalone.service import StandaloneService


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A service that is not started. ``decode_ms``: grows by each decode step, what its slowest rank took."""

    service: StandaloneService
    acceptance: Acceptance
    decode_ms: list[float]


def over_processes(spec: InstanceSpec, clock: Clock) -> Measured:
    """An engine over rank processes of this machine. Raises ConfigError."""
    decode_ms: list[float] = []
    parts = make_parts(spec, RANK_ENTRY, clock, watch=lambda executor: StepRecorder(executor, decode_ms))
    service = StandaloneService(spec, parts.engine, hello=parts.hello, clock=clock)
    return Measured(service=service, acceptance=parts.engine.acceptance, decode_ms=decode_ms)
