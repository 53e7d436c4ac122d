"""What offline inference over rank processes is put together from: the service, and what is measured of its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from longcat_pd.clock import Clock
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.server.parts import make_parts
from longcat_pd.standalone.online import RANK_ENTRY
from longcat_pd.standalone.recorder import StepRecorder, Steps
from longcat_pd.standalone.service import StandaloneService


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A service that is not started. ``steps``: of its whole life."""

    service: StandaloneService
    steps: Steps


def over_processes(spec: InstanceSpec, clock: Clock, *, on_progress: Callable[[], None] = lambda: None) -> Measured:
    """An engine over rank processes of this machine. ``on_progress``: see ``make_parts``. Raises ConfigError."""
    steps = Steps()
    parts = make_parts(
        spec, RANK_ENTRY, clock, watch=lambda executor: StepRecorder(executor, steps), on_progress=on_progress
    )
    service = StandaloneService(spec, parts.engine, hello=parts.hello, clock=clock)
    return Measured(service=service, steps=steps)
