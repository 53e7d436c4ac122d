"""What offline inference is put together from: the same face over an engine whose one rank is this process.

Importing this imports torch.
"""

from __future__ import annotations

from longcat_pd.clock import MonotonicClock
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.engine.driver import Engine
from longcat_pd.engine.inline import InlineExecutor
from longcat_pd.engine.rank_model import RankModel
from longcat_pd.metrics import Metrics
from longcat_pd.progress.steps import Tell, untold
from longcat_pd.server.identity import own_hello
from longcat_pd.standalone.service import StandaloneService


def offline(
    spec: InstanceSpec, *, metrics: Metrics | None = None, loaded: RankModel | None = None, tell: Tell = untold
) -> StandaloneService:
    """The service that a face is given; it is not started. Raises ConfigError.

    ``metrics``: where the engine counts; None: nobody looks. ``loaded``: model and cache; None: loads the checkpoint.
    ``tell``: of that, and of what is compiled.
    """
    clock, model = MonotonicClock(), ModelConfig.load(spec.model.path)
    hello = own_hello(spec, model)
    engine = Engine(
        spec.engine,
        spec.parallel,
        executor=InlineExecutor.of(spec, hello.incarnation, loaded=loaded, tell=tell),
        eos_token_ids=frozenset(model.eos_token_id),
        clock=clock,
        metrics=metrics or Metrics(role=spec.role, instance=spec.name),
    )
    return StandaloneService(spec, engine, hello=hello, clock=clock)
