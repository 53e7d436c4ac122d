"""The plans that ranks work on: who has answered, what is due, and whether the ranks are still together.

Judges only; whoever hears the ranks (``executor.py``) feeds it and acts. Knows of a plan its number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from longcat_pd.config.schema import ParallelConfig
from longcat_pd.engine.plan import RankAccounts, StepOutput
from longcat_pd.engine.standing import Standing, groups_of, parted, standing
from longcat_pd.errors import EngineFault, LongcatError, RankLost
from longcat_pd.log import logger

Outputs = asyncio.Future[tuple[StepOutput, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Overdue:
    """A step that takes longer than it may. ``missing``: who has not answered; ``standing``: whom it waits for."""

    step_id: int
    seconds: float
    missing: tuple[int, ...]
    standing: Standing

    def __str__(self) -> str:
        said = f"step {self.step_id} has taken {self.seconds:.0f} s; no answer of ranks {list(self.missing)}"
        return "; ".join((said, *self.standing.lines))

    def said_of(self, rank: int) -> str:
        """Why this rank is held to be the cause; empty for the others."""
        if rank not in self.standing.missed:
            return ""
        return "; ".join((f"step {self.step_id} has waited {self.seconds:.0f} s for it", *self.standing.lines))

    def loss(self) -> RankLost:
        """What it is when it does not end."""
        return RankLost(str(self))


@dataclass
class _Step:
    future: Outputs
    outputs: dict[int, StepOutput] = field(default_factory=dict)


class OpenSteps:
    """In the order of their numbers, which is the order in which ranks execute them.

    Args:
        parallel: how the instance is split: which ranks take part in the same collectives.
        limit_s: what a step may take.
    """

    def __init__(self, parallel: ParallelConfig, *, limit_s: float) -> None:
        self._num_ranks = parallel.world_size
        self._stage_size = parallel.stage_size
        self._group_size = parallel.stage_size // parallel.dp_size
        self._groups = groups_of(parallel)
        firsts = range(0, self._num_ranks, self._group_size)
        self._groups_of_firsts = tuple((axis, tuple(r for r in ranks if r in firsts)) for axis, ranks in self._groups)
        self._limit_s = limit_s
        self._steps: dict[int, _Step] = {}
        self._progress_at = 0.0  # when the step in work began, at the latest

    def begin(self, step_id: int, now: float) -> Outputs:
        """A plan goes out. Its future is finished by the answers of all ranks, or by ``end``."""
        if not self._steps:
            self._progress_at = now
        step = _Step(asyncio.get_running_loop().create_future())
        self._steps[step_id] = step
        return step.future

    def answered(self, output: StepOutput, now: float) -> None:
        """A rank has executed a plan. Raises EngineFault for a step that is not open, and when the ranks have parted."""
        step = self._steps.get(output.step_id)
        if step is None or output.rank in step.outputs:
            raise EngineFault(f"rank {output.rank} answered step {output.step_id}, which is not open")
        step.outputs[output.rank] = output
        if len(step.outputs) == self._num_ranks:
            outputs = tuple(step.outputs[rank] for rank in range(self._num_ranks))
            self._see_them_together(outputs)
            del self._steps[output.step_id]
            self._progress_at = now
            step.future.set_result(outputs)

    def end(self, error: LongcatError) -> None:
        """No step is answered any more."""
        steps, self._steps = self._steps, {}
        for step in steps.values():
            step.future.set_exception(error)

    def forgive(self, seconds: float) -> None:
        """The driver itself stood still for so long."""
        self._progress_at += seconds

    def due_in(self, now: float) -> float | None:
        """Seconds until the step in work is overdue; None without one, or if it is."""
        left = self._progress_at + self._limit_s - now
        return left if self._steps and left > 0.0 else None

    def overdue(self, now: float, accounts: Mapping[int, RankAccounts]) -> Overdue | None:
        """The step in work, if it takes too long. ``accounts``: the newest ones of all ranks."""
        if not self._steps or now - self._progress_at <= self._limit_s:
            return None
        step_id = min(self._steps)
        missing = tuple(r for r in range(self._num_ranks) if r not in self._steps[step_id].outputs)
        where = standing(accounts, self._groups, missing)
        return Overdue(step_id=step_id, seconds=now - self._progress_at, missing=missing, standing=where)

    def _see_them_together(self, outputs: tuple[StepOutput, ...]) -> None:
        accounts = [output.accounts for output in outputs if output.accounts is not None]
        if len(accounts) == self._num_ranks and self._are_together(accounts):
            return
        found = parted({one.rank: one for one in accounts}, self._groups)
        for one in found:
            logger().error("collectives_parted", step_id=outputs[0].step_id, axis=one.axis, counts=one.shown)
        if found:
            told = "; ".join(str(one) for one in found)
            raise EngineFault(f"the ranks have parted: behind step {outputs[0].step_id} {told}")

    def _are_together(self, accounts: list[RankAccounts]) -> bool:
        """Seen at little cost in two cases that are nearly all: the ranks of each stage have entered the same collectives,
        or those of each group have and the first ones of groups have not parted."""
        if _are_alike(accounts, self._stage_size):
            return True
        firsts = {one.rank: one for one in accounts[:: self._group_size]}
        return _are_alike(accounts, self._group_size) and not parted(firsts, self._groups_of_firsts)


def _are_alike(accounts: list[RankAccounts], size: int) -> bool:
    """Whether each rank has entered what the first one of its run of ``size`` neighbours has."""
    return all(one.collectives == accounts[one.rank - one.rank % size].collectives for one in accounts)
