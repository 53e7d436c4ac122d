"""Entries of rank processes that take long over some prompts: every step of a sequence with such a length is slow.

The length is the switch, so that a test chooses request by request, and everybody else in the same step waits with it.
"""

from __future__ import annotations

import time

from longcat_pd.decode_worker import rank as decode_rank
from longcat_pd.engine.plan import StepOutput, StepPlan
from longcat_pd.engine.runner import ModelRunner
from longcat_pd.prefill_worker import rank as prefill_rank

SLOW_S = {397: 0.3, 398: 1.0, 399: 8.0}  # seconds of a step by length of the prompt; of a decode step a tenth


def prefill(config: str) -> None:
    """A rank of a prefill pool."""
    ModelRunner.execute = _slowed(1.0)  # type: ignore[method-assign]
    prefill_rank.main(config)


def decode(config: str) -> None:
    """A rank of a decode pool."""
    ModelRunner.execute = _slowed(0.1)  # type: ignore[method-assign]
    decode_rank.main(config)


def _slowed(share: float):  # type: ignore[no-untyped-def]
    execute = ModelRunner.execute
    slots: dict[int, float] = {}

    def slow(self: ModelRunner, plan: StepPlan) -> StepOutput:
        for admit in plan.admit:
            slots[admit.slot] = SLOW_S.get(admit.prompt_len, 0.0) * share
        time.sleep(max((slots[segment.slot] for segment in plan.segments), default=0.0))
        return execute(self, plan)

    return slow
