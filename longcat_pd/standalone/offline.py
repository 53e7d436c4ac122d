"""What offline inference is put together from: the same face over an engine whose one rank is this process, or whose ranks
are processes of their own where they are several.

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
from longcat_pd.server.identity import own_hello
from longcat_pd.server.parts import make_parts
from longcat_pd.standalone.online import RANK_ENTRY
from longcat_pd.standalone.service import StandaloneService


def offline(spec: InstanceSpec) -> StandaloneService:
    """The service that a face is given; it is not started. Loads the weights. Raises ConfigError."""
    clock = MonotonicClock()
    if spec.parallel.world_size > 1:
        parts = make_parts(spec, RANK_ENTRY, clock)
        return StandaloneService(spec, parts.engine, hello=parts.hello, clock=clock)
    model = ModelConfig.load(spec.model.path)
    hello = own_hello(spec, model)
    engine = Engine(
        spec.engine,
        spec.parallel,
        executor=InlineExecutor(rank_specs(spec, hello.incarnation)[0]),
        eos_token_ids=frozenset(model.eos_token_id),
        clock=clock,
        metrics=Metrics(role=spec.role, instance=spec.name),
    )
    return StandaloneService(spec, engine, hello=hello, clock=clock)
