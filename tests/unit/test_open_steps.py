"""engine/open_steps.py and standing.py: ranks that have parted are told behind the step; of a hang, who is waited for."""

from __future__ import annotations

import asyncio

import pytest

from longcat_pd.config.schema import ParallelConfig
from longcat_pd.engine.open_steps import OpenSteps, Overdue
from longcat_pd.engine.plan import AxisCollectives, RankAccounts, StepOutput
from longcat_pd.errors import EngineFault

FOUR = ParallelConfig(dp_size=2, kvp_size=2, attn_tp_size=2, ep_size=4)
STAGES = ParallelConfig(pp_size=2, cp_size=2, ep_size=2)
TOGETHER = {"kvp": (4, 1), "ep": (9, 77)}
LIMIT_S = 20.0


def accounts(rank: int, axes: dict[str, tuple[int, int]], stands_in: str = "") -> RankAccounts:
    entered = tuple(AxisCollectives(axis, count, digest) for axis, (count, digest) in axes.items())
    return RankAccounts(rank=rank, collectives=entered, stands_in=stands_in)


async def end_of(parallel: ParallelConfig, *entered: dict[str, tuple[int, int]] | None) -> str:
    """How a step ends, behind which ranks say so; "" if well."""
    steps = OpenSteps(parallel, limit_s=LIMIT_S)
    future = steps.begin(1, 0.0)
    for rank, axes in enumerate(entered):
        said = None if axes is None else accounts(rank, axes)
        try:
            steps.answered(StepOutput(step_id=1, rank=rank, accounts=said), 1.0)
        except EngineFault as error:
            assert rank == parallel.world_size - 1 and not future.done()
            return error.message
    assert [output.rank for output in future.result()] == list(range(parallel.world_size))
    return ""


LONGER = {"kvp": (6, 5), "ep": (9, 77)}  # a group with a long context, of which only its own ranks need to know


@pytest.mark.parametrize(
    ("parallel", "entered", "told"),
    [
        (FOUR, [TOGETHER] * 4, ""),
        (FOUR, [TOGETHER, TOGETHER, LONGER, LONGER], ""),
        (FOUR, [None, TOGETHER, LONGER, LONGER], ""),
        (STAGES, [{"cp": (3, 1)}, {"cp": (3, 1)}, {"cp": (5, 2), "ep": (2, 2)}, {"cp": (5, 2), "ep": (2, 2)}], ""),
        (FOUR, [TOGETHER, TOGETHER, LONGER, {**LONGER, "kvp": (5, 5)}], "kvp differ between ranks (2: 6, 3: 5)"),
        (FOUR, [LONGER, TOGETHER, LONGER, LONGER], "kvp differ between ranks (0: 6, 1: 4)"),
        (
            FOUR,
            [TOGETHER, TOGETHER, {**LONGER, "ep": (9, 78)}, {**LONGER, "ep": (9, 78)}],
            "ep differ between ranks (0: 9, 1: 9, 2: 9, 3: 9)",
        ),
        (FOUR, [TOGETHER, {"kvp": (4, 1)}, *[LONGER] * 2], "ep differ between ranks (0: 9, 1: 0, 2: 9, 3: 9)"),
        (STAGES, [{"cp": (3, 1)}, {"cp": (3, 1)}, {"cp": (5, 2)}, {"cp": (4, 2)}], "cp differ between ranks (2: 5, 3: 4)"),
    ],
)
async def test_ranks_that_have_parted_are_told_behind_the_step(
    parallel: ParallelConfig, entered: list[dict[str, tuple[int, int]] | None], told: str
) -> None:
    found = await end_of(parallel, *entered)
    assert found == (told and f"the ranks have parted: behind step 1 collectives of {told}")


def hang(parallel: ParallelConfig, *found: RankAccounts, answered: tuple[int, ...] = ()) -> Overdue:
    """A step in which ranks stand like this."""
    steps = OpenSteps(parallel, limit_s=LIMIT_S)
    steps.begin(1, 0.0)
    for rank in answered:
        steps.answered(StepOutput(step_id=1, rank=rank, accounts=found[rank]), 1.0)
    known = dict(enumerate(found))
    assert steps.due_in(15.0) == 5.0 and steps.overdue(LIMIT_S, known) is None
    assert steps.due_in(21.0) is None
    overdue = steps.overdue(21.0, known)
    assert overdue is not None and (overdue.step_id, overdue.seconds) == (1, 21.0)
    return overdue


async def test_who_does_not_enter_is_missed_and_the_others_are_said_to_wait_there() -> None:
    ahead, behind = {"kvp": (4, 1), "ep": (10, 8)}, {"kvp": (4, 1), "ep": (9, 77)}
    found = [accounts(rank, ahead, "ep") for rank in range(4)]
    found[1] = accounts(1, behind)
    overdue = hang(FOUR, *found)
    assert overdue.missing == (0, 1, 2, 3) and overdue.standing.missed == (1,)
    where = "ranks [0, 2, 3] are in number 10 of ep, which ranks [1] have not entered (0: 10, 1: 9, 2: 10, 3: 10)"
    assert str(overdue) == f"step 1 has taken 21 s; no answer of ranks [0, 1, 2, 3]; {where}"
    assert overdue.said_of(1) == f"step 1 has waited 21 s for it; {where}" and overdue.said_of(0) == ""


async def test_who_waits_for_the_one_who_does_not_enter_is_not_missed() -> None:
    """Rank 2 spins, rank 3 waits for it in their own group, and so neither comes where the others wait."""
    first = {"kvp": (4, 1), "ep": (10, 8)}
    found = (
        accounts(0, first, "ep"),
        accounts(1, first, "ep"),
        accounts(2, {"kvp": (4, 1), "ep": (9, 77)}),
        accounts(3, {"kvp": (5, 3), "ep": (9, 77)}, "kvp"),
    )
    overdue = hang(FOUR, *found)
    assert overdue.standing.missed == (2,) and len(overdue.standing.lines) == 2
    blind = [accounts(one.rank, {c.axis: (c.entered, c.digest) for c in one.collectives}) for one in found]
    assert hang(FOUR, *blind).standing.missed == (2,), "also where the host does not see that a rank waits"


async def test_ranks_that_wait_for_each_other_in_different_places() -> None:
    """They have parted inside the step: nobody is at work, and all that can be said is who is where."""
    found = [accounts(rank, {"kvp": (4, 1), "ep": (10, 8)}, "ep") for rank in range(4)]
    found[3] = accounts(3, {"kvp": (4, 1), "ep": (9, 77)}, "ep")
    assert hang(FOUR, *found).standing.missed == (3,)


async def test_a_message_that_all_wait_for_names_nobody_and_says_where() -> None:
    found = [accounts(rank, {"kvp": (4, 1), "ep": (10, 8)}, "ep") for rank in range(4)]
    overdue = hang(FOUR, *found)
    assert overdue.standing.missed == (0, 1, 2, 3)
    assert overdue.standing.lines == ("ranks [0, 1, 2, 3] wait in number 10 of ep, which all have entered",)


async def test_a_stage_that_gets_nothing_misses_the_one_before() -> None:
    found = [accounts(rank, {"cp": (3, 1)}, "pp" if rank > 1 else "") for rank in range(4)]
    found[1] = accounts(1, {"cp": (4, 1)}, "cp")
    overdue = hang(STAGES, *found)
    assert overdue.standing.missed == (0,)
    assert "ranks [2] wait for a message along pp" in overdue.standing.lines


@pytest.mark.parametrize("answered", [(0, 1, 2), (0,), ()])
async def test_who_has_answered_is_not_missed(answered: tuple[int, ...]) -> None:
    overdue = hang(FOUR, *(accounts(rank, TOGETHER) for rank in range(4)), answered=answered)
    assert overdue.standing.missed == overdue.missing == tuple(rank for rank in range(4) if rank not in answered)
    assert overdue.standing.lines == ()


async def test_a_step_has_its_own_time_and_ends_once() -> None:
    steps = OpenSteps(ParallelConfig(), limit_s=LIMIT_S)
    first, second = steps.begin(1, 0.0), steps.begin(2, 0.0)
    steps.answered(StepOutput(step_id=1, rank=0), 15.0)
    assert first.done() and steps.overdue(34.0, {0: RankAccounts(rank=0)}) is None
    steps.forgive(10.0)
    assert steps.due_in(34.0) == 11.0
    with pytest.raises(EngineFault, match="rank 0 answered step 1, which is not open"):
        steps.answered(StepOutput(step_id=1, rank=0), 16.0)
    steps.end(EngineFault("over"))
    with pytest.raises(EngineFault, match="over"):
        await asyncio.wait_for(second, 30.0)
    assert steps.due_in(40.0) is None and steps.overdue(99.0, {}) is None
