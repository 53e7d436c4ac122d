"""Decode steps as they pass by: how long they took, and what all of them together brought."""

from __future__ import annotations

import asyncio

import pytest

from longcat_pd.engine.executor import OnClosed, OnFailure, Ready
from longcat_pd.engine.plan import Phase, Segment, SlotOutput, StepOutput, StepPlan
from longcat_pd.engine.roster import RankState
from longcat_pd.errors import RankLost
from longcat_pd.standalone.recorder import StepRecorder, Steps


class _Scripted:
    """Finishes plans when told."""

    def __init__(self) -> None:
        self.futures: list[asyncio.Future[tuple[StepOutput, ...]]] = []

    async def start(self, on_closed: OnClosed, on_failure: OnFailure) -> Ready:
        return ()

    def submit(self, plan: StepPlan) -> asyncio.Future[tuple[StepOutput, ...]]:
        self.futures.append(asyncio.get_running_loop().create_future())
        return self.futures[-1]

    def rank_states(self) -> tuple[RankState, ...]:
        return ()

    async def close(self) -> None:
        pass


def plan(phase: Phase, num_seqs: int) -> StepPlan:
    segments = tuple(Segment(slot=slot, start=-1, num_tokens=1, is_last=True) for slot in range(num_seqs))
    return StepPlan(step_id=1, phase=phase, segments=segments)


async def test_decode_steps_are_noted_with_their_slowest_rank_by_how_many_sequences_they_have() -> None:
    ranks, steps = _Scripted(), Steps()
    recorder = StepRecorder(ranks, steps)
    told: list[tuple[Phase, int]] = [("prefill", 1), ("decode", 1), ("decode", 0)]
    told += [("decode", 2)] * 3
    passed_on = [recorder.submit(plan(phase, count)) for phase, count in told]
    assert passed_on == ranks.futures
    for number, future in enumerate(ranks.futures[:4]):
        times = (3.0 + number, 4.0 + number)
        future.set_result(tuple(StepOutput(step_id=1, rank=rank, compute_ms=ms) for rank, ms in enumerate(times)))
    ranks.futures[4].set_exception(RankLost("gone"))
    ranks.futures[5].cancel()
    await asyncio.gather(*passed_on, return_exceptions=True)
    assert steps.step_s == {1: [0.005], 2: [0.007]}
    assert steps.all_ms() == pytest.approx([5.0, 7.0])


def test_tokens_are_counted_over_the_whole_life() -> None:
    """Also by several ranks of which each tells of its own group, or both of the same slot."""
    steps = Steps()
    assert steps.tokens_per_row() is None
    for _ in range(5000):
        slots = SlotOutput(slot=0, token_ids=(1, 2, 3)), SlotOutput(slot=4, token_ids=(7,))
        steps.note(2, (StepOutput(step_id=1, rank=0, slots=slots[:1]), StepOutput(step_id=1, rank=1, slots=slots)))
    for _ in range(5000):
        steps.note(1, (StepOutput(step_id=1, rank=0, slots=(SlotOutput(slot=0, token_ids=(1,)),)),))
    assert (steps.num_rows, steps.num_tokens) == (15000, 25000)
    assert steps.tokens_per_row() == pytest.approx(25 / 15)
