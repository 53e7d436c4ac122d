"""What decode steps take, as their ranks tell it: an executor around another one. Knows no engine."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from functools import partial

from longcat_pd.engine.executor import Executor, OnClosed, OnFailure, Ready
from longcat_pd.engine.plan import StepOutput, StepPlan
from longcat_pd.engine.roster import RankState

Outputs = asyncio.Future[tuple[StepOutput, ...]]


class TimedExecutor:
    """Notes what the slowest rank computed at each decode step. ``step_s``: seconds, by how many sequences it had."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.step_s: defaultdict[int, list[float]] = defaultdict(list)

    async def start(self, on_closed: OnClosed, on_failure: OnFailure) -> Ready:
        """See ``Executor``."""
        return await self._executor.start(on_closed, on_failure)

    def submit(self, plan: StepPlan) -> Outputs:
        """See ``Executor``."""
        outputs = self._executor.submit(plan)
        if plan.phase == "decode" and plan.segments:
            outputs.add_done_callback(partial(self._note, len(plan.segments)))
        return outputs

    def rank_states(self) -> tuple[RankState, ...]:
        """See ``Executor``."""
        return self._executor.rank_states()

    async def close(self) -> None:
        """See ``Executor``."""
        await self._executor.close()

    def _note(self, num_seqs: int, outputs: Outputs) -> None:
        if not outputs.cancelled() and outputs.exception() is None:
            self.step_s[num_seqs].append(max(output.compute_ms for output in outputs.result()) / 1000.0)
