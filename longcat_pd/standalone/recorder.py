"""What decode steps take and bring, as their ranks tell it: an executor around another one. Knows no engine."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from longcat_pd.engine.executor import Executor, OnClosed, OnFailure, Ready
from longcat_pd.engine.plan import StepOutput, StepPlan
from longcat_pd.engine.roster import RankState

Outputs = asyncio.Future[tuple[StepOutput, ...]]


class Steps:
    """Decode steps of a whole life.

    Attributes:
        step_s: seconds that the slowest rank computed at each, by how many sequences the step had; a reader may clear it.
        num_rows: sequences of all steps together.
        num_tokens: that they got, their own and accepted drafts, also behind an answer's end.
    """

    def __init__(self) -> None:
        self.step_s: defaultdict[int, list[float]] = defaultdict(list)
        self.num_rows = 0
        self.num_tokens = 0

    def note(self, num_seqs: int, by_rank: Sequence[StepOutput]) -> None:
        """One step, as its ranks answered it."""
        self.step_s[num_seqs].append(max(output.compute_ms for output in by_rank) / 1000.0)
        tokens = {slot.slot: len(slot.token_ids) for output in by_rank for slot in output.slots}
        self.num_rows += len(tokens)
        self.num_tokens += sum(tokens.values())

    def all_ms(self) -> list[float]:
        """Milliseconds of all steps, in no order."""
        return [1000.0 * seconds for found in self.step_s.values() for seconds in found]

    def tokens_per_row(self) -> float | None:
        """Tokens that a sequence got from a step; None before the first."""
        return self.num_tokens / self.num_rows if self.num_rows else None


class StepRecorder:
    """Passes everything on, and notes decode steps in ``steps``."""

    def __init__(self, executor: Executor, steps: Steps) -> None:
        self._executor = executor
        self._steps = steps

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
            self._steps.note(num_seqs, outputs.result())
