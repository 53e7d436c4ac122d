"""What a rank says it has waited for its driver: only where there was work all the time."""

from __future__ import annotations

from itertools import count

import pytest

from longcat_pd.engine.plan import Phase, Segment, StepOutput, StepPlan
from longcat_pd.engine.rank import StepWatch


class Rank:
    """Waits and computes as long as it is told to."""

    def __init__(self) -> None:
        self._now = 100.0
        self._ids = count(1)
        self._watch = StepWatch(lambda: self._now)

    def step(self, *slots: int, wait: float, phase: Phase = "decode", retire: tuple[int, ...] = ()) -> tuple[float, float]:
        """Milliseconds that it says it has waited and computed; a step takes 10 ms."""
        segments = tuple(Segment(slot=s, start=-1, num_tokens=1, is_last=True) for s in slots)
        self._now += wait / 1000.0
        output = self._watch.execute(
            StepPlan(step_id=next(self._ids), phase=phase, segments=segments, retire=retire), self._run
        )
        return round(output.waited_ms, 6), round(output.compute_ms, 6)

    def _run(self, plan: StepPlan) -> StepOutput:
        self._now += 0.010
        return StepOutput(step_id=plan.step_id, rank=0)


def test_a_sequence_that_goes_on_makes_the_wait_count() -> None:
    rank = Rank()
    assert rank.step(0, wait=500.0) == (0.0, 10.0)
    assert rank.step(0, 1, wait=2.0) == (2.0, 10.0)
    assert rank.step(1, wait=3.0) == (3.0, 10.0)


def test_other_plans_between_two_steps_are_waited_for_too() -> None:
    rank = Rank()
    rank.step(0, 3, wait=0.0)
    assert rank.step(1, wait=2.0, phase="prefill") == (0.0, 0.0)
    assert rank.step(wait=1.0, retire=(3,)) == (0.0, 0.0)
    assert rank.step(0, wait=4.0) == (7.0, 10.0)


@pytest.mark.parametrize("retire_apart", [True, False])
def test_a_slot_with_another_tenant_was_not_waited_for(retire_apart: bool) -> None:
    rank = Rank()
    rank.step(0, wait=0.0)
    if retire_apart:
        rank.step(wait=1.0, retire=(0,))
    assert rank.step(0, wait=900.0, retire=() if retire_apart else (0,)) == (0.0, 10.0)
    assert rank.step(0, wait=5.0) == (5.0, 10.0)
