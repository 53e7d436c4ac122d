"""What offline inference is put together from: the same face over an engine whose one rank is this process.

Importing this imports torch.
"""

from __future__ import annotations

from longcat_pd.clock import MonotonicClock
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.engine.driver import Engine
from longcat_pd.engine.executor import rank_specs
from longcat_pd.engine.inline import InlineExecutor
from longcat_pd.metrics import Metrics
from longcat_pd.server.face import Face
from longcat_pd.server.text import TextProcessor
from longcat_pd.standalone.service import StandaloneService

_INCARNATION = "offline"


def offline(spec: InstanceSpec) -> tuple[Face, StandaloneService]:
    """The face, and the service behind it that is not started. Loads the weights. Raises ConfigError."""
    clock = MonotonicClock()
    engine = Engine(
        spec.engine,
        spec.parallel,
        executor=InlineExecutor(rank_specs(spec, _INCARNATION)[0]),
        eos_token_ids=frozenset(ModelConfig.load(spec.model.path).eos_token_id),
        clock=clock,
        metrics=Metrics(role=spec.role, instance=spec.name),
    )
    service = StandaloneService(spec, engine, incarnation=_INCARNATION, clock=clock)
    return Face(service, TextProcessor.load(spec.model.path)), service
