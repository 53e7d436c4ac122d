"""Admits and aborts at any moment: every stage of a pipeline executes the same plans in the same order, however far apart.

Each stage is a pencil of its own, whose books are checked with every plan, and runs as late as it likes behind another.
"""

from __future__ import annotations

import random

import pytest

from longcat_pd.config.schema import ParallelConfig
from longcat_pd.engine.plan import RankAccounts, StepPlan
from longcat_pd.engine.scheduler import Scheduler
from longcat_pd.engine.sequence import Sequence, Stage
from tests.unit.engine_rig import engine_config, request
from tests.unit.pencil import Pencil


class Pipeline:
    """Stages that are each somewhere in the same list of plans."""

    def __init__(self, scheduler: Scheduler, num_stages: int) -> None:
        self._scheduler = scheduler
        self.stages = [Pencil(engine_config(), ParallelConfig(), auto=False) for _ in range(num_stages)]
        self.plans: list[StepPlan] = []
        self.accounts: list[list[RankAccounts]] = [[] for _ in range(num_stages)]

    def plan(self) -> None:
        """The next plan goes to all stages at once."""
        plan = self._scheduler.next_plan(0.0)
        if plan is not None:
            self.plans.append(plan)
            for stage in self.stages:
                stage.submit(plan)

    def step(self, number: int) -> None:
        """One stage executes what the one before has; what the last one brings is told the driver."""
        stage, done = self.stages[number], len(self.accounts[number])
        if done == len(self.plans if not number else self.accounts[number - 1]):
            return
        _, future = stage.waiting[0]
        stage.step()
        outputs = future.result()
        assert outputs[0].accounts is not None
        self.accounts[number].append(outputs[0].accounts)
        if number == len(self.stages) - 1:
            self._scheduler.apply(outputs, 0.0)

    def drain(self) -> None:
        for _ in range(200):
            self.plan()
            for number in range(len(self.stages)):
                self.step(number)


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("seed", range(25))
async def test_every_stage_holds_the_same_behind_every_plan(seed: int, num_stages: int) -> None:
    draw = random.Random(seed)
    scheduler = Scheduler(engine_config(max_num_seqs=4), ParallelConfig(pp_size=num_stages), eos_token_ids=frozenset({20}))
    pipeline, alive = Pipeline(scheduler, num_stages), list[Sequence]()
    num_aborted = 0
    for _ in range(300):
        act = draw.random()
        if act < 0.1 and len(alive) < 6:
            prompt = [draw.randrange(100, 400) for _ in range(draw.randint(1, 30))]
            alive.append(scheduler.room.enqueue(request(prompt, 1), len(prompt) + 1))
        elif act < 0.2 and alive:
            left = draw.choice(alive)
            num_aborted += left.stage is not Stage.PREFILLED
            alive.remove(left)
            scheduler.release(left)
        elif act < 0.5:
            pipeline.plan()
        else:
            pipeline.step(draw.randrange(num_stages))
        for seq in scheduler.room.admit_waiting():
            scheduler.start_prefill(seq, None)
    for seq in alive:
        scheduler.release(seq)
    pipeline.drain()
    assert num_aborted > 3 and len(pipeline.plans) > 10
    assert [plan.step_id for plan in pipeline.plans] == list(range(1, 1 + len(pipeline.plans)))
    first, *rest = pipeline.accounts
    assert all(accounts == first for accounts in rest)
    assert len({accounts.blocks_live for accounts in first}) > 2
    assert first[-1].blocks_live == first[-1].slots_used == 0
    figures = scheduler.room.figures()
    assert figures.running == figures.waiting == 0
