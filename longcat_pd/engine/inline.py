"""One rank in the driver's own process, for offline work: no processes, no sockets, one compute thread.

The only part of a driver that imports torch, so it is imported by ``infer`` alone. Knows plans, not what they mean.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from longcat_pd.config.schema import InstanceSpec, RankSpec
from longcat_pd.engine.executor import OnClosed, OnFailure, Ready, rank_specs
from longcat_pd.engine.plan import StepOutput, StepPlan
from longcat_pd.engine.rank_model import RankModel, load_rank_model
from longcat_pd.engine.roster import RankState
from longcat_pd.engine.runner import ModelRunner
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.parallel.platform import platform_of
from longcat_pd.progress.steps import Tell, untold


class InlineExecutor:
    """Executes plans in order on one thread, so that the event loop stays free.

    ``loaded``: model and cache; read from ``spec``'s checkpoint when not given, of which and of compiling ``tell`` is told.
    """

    def __init__(self, spec: RankSpec, *, loaded: RankModel | None = None, tell: Tell = untold) -> None:
        assert spec.instance.parallel.world_size == 1, "an inline executor is one rank"
        platform_of(spec.instance.device).runtime.prepare(spec.local_rank)
        mesh = Mesh.join(spec)
        self._runner = ModelRunner(spec, mesh, loaded=loaded or load_rank_model(spec, mesh, tell=tell))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rank")

    @classmethod
    def of(
        cls, spec: InstanceSpec, incarnation: str, *, loaded: RankModel | None = None, tell: Tell = untold
    ) -> InlineExecutor:
        """Of the one rank of an instance."""
        return cls(rank_specs(spec, incarnation)[0], loaded=loaded, tell=tell)

    async def start(self, on_closed: OnClosed, on_failure: OnFailure) -> Ready:
        """The rank is ready since it was made; nothing here can be lost, and there are no transfers."""
        return (self._runner.ready(),)

    def submit(self, plan: StepPlan) -> asyncio.Future[tuple[StepOutput, ...]]:
        """Queue the plan behind those before it."""
        return asyncio.wrap_future(self._thread.submit(self._execute, plan))

    def rank_states(self) -> tuple[RankState, ...]:
        """Always well."""
        return (RankState(0, "ok", 0.0, None, self._runner.accounts()),)

    async def close(self) -> None:
        """Finish the step in work."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    def _execute(self, plan: StepPlan) -> tuple[StepOutput, ...]:
        return (self._runner.execute(plan),)
