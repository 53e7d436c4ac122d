"""engine/room.py with several groups: who goes where, who waits, and what each rank is expected to hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from longcat_pd.config.schema import ParallelConfig
from longcat_pd.engine.room import RankFigures
from longcat_pd.engine.scheduler import Scheduler
from longcat_pd.engine.sequence import Sequence
from longcat_pd.errors import InvalidRequest
from tests.unit.engine_rig import engine_config, request
from tests.unit.test_prefixes import leave, next_plan, prefill

BLOCK = 4
TWO = ParallelConfig(dp_size=2)
TWO_BY_TWO = ParallelConfig(dp_size=2, kvp_size=2, attn_tp_size=2)


def scheduler(parallel: ParallelConfig = TWO, **changes: Any) -> Scheduler:
    values = {"max_num_seqs": 4, "num_blocks": 17, "max_num_batched_tokens": 64, **changes}
    return Scheduler(engine_config(**values), parallel, eos_token_ids=frozenset({20}))


def line_up(s: Scheduler, num_blocks: int, first: int = 100, *, priority: int = 0) -> Sequence:
    """Stands in line with a prompt of so many blocks; the answer lies in the last of them."""
    length = num_blocks * BLOCK - 1
    return s.room.enqueue(request(list(range(first, first + length)), 1, priority=priority), length + 1)


def enter(s: Scheduler, num_blocks: int, first: int = 100) -> Sequence:
    seq = line_up(s, num_blocks, first)
    assert s.room.admit_waiting() == [seq]
    return seq


def places(*seqs: Sequence) -> list[tuple[int, int]]:
    return [(seq.group, seq.slot) for seq in seqs]


def test_each_goes_where_most_is_left_beside_it() -> None:
    s = scheduler()
    seqs = [enter(s, size, 100 * n) for n, size in enumerate((6, 1, 3, 2), start=1)]
    assert places(*seqs) == [(0, 0), (1, 2), (1, 3), (0, 1)], "the third has 12 blocks beside it in group 1, 7 in group 0"


def test_of_equal_room_the_one_with_fewer_sequences_and_then_the_first() -> None:
    s = scheduler(max_num_seqs=6)
    enter(s, 4), enter(s, 2, 200), enter(s, 2, 300)
    assert places(enter(s, 1, 400)) == [(0, 1)], "twelve blocks are left in both, one sequence is here, two are there"
    assert places(enter(s, 1, 500)) == [(1, 5)]


def test_a_full_group_is_passed_over_and_a_slot_that_comes_back_stays_in_its_group() -> None:
    s = scheduler()
    big = enter(s, 16)
    rest = [enter(s, 1, 200), enter(s, 1, 300)]
    assert places(big, *rest) == [(0, 0), (1, 2), (1, 3)]
    late = line_up(s, 1, 400)
    assert s.room.admit_waiting() == [], "group 0 has a slot and no block, group 1 blocks and no slot"
    s.release(rest[0])
    assert s.room.admit_waiting() == [late] and places(late) == [(1, 2)]


def test_nobody_overtakes_the_one_in_front_in_any_group() -> None:
    s = scheduler()
    first, second = enter(s, 10), enter(s, 10, 200)
    large, small = line_up(s, 8, 300), line_up(s, 1, 400)
    assert s.room.admit_waiting() == []
    s.release(second)
    assert s.room.admit_waiting() == [large, small]
    assert places(first, large, small) == [(0, 0), (1, 2), (1, 3)], "eight are left in group 1, six in group 0"


def test_the_lowest_priority_goes_first_and_of_equals_who_came_first() -> None:
    s = scheduler(ParallelConfig(), max_num_seqs=1, max_queued_requests=16)
    running = enter(s, 1)
    asked = (5, 0, -100, 5, 0, 100, -100, -3)
    lined_up = [line_up(s, 1, 100 * n, priority=priority) for n, priority in enumerate(asked, start=2)]
    served = []
    for _ in lined_up:
        assert s.room.admit_waiting() == [], "who runs is not interrupted"
        s.release(running)
        (running,) = s.room.admit_waiting()
        served.append(lined_up.index(running))
    assert served == [2, 6, 7, 1, 4, 0, 3, 5]


def test_a_large_one_waits_for_those_before_it_only() -> None:
    s = scheduler(ParallelConfig(), max_num_seqs=8, max_queued_requests=16)
    running = enter(s, 10)
    large = line_up(s, 12, 300)
    late, equal = line_up(s, 1, 500, priority=1), line_up(s, 1, 600)
    assert s.room.admit_waiting() == [], "neither its equals nor those behind them take what it needs"
    first = line_up(s, 1, 700, priority=-1)
    assert s.room.admit_waiting() == [first]
    s.room.leave(late)
    assert s.room.figures().waiting == 2
    s.release(running)
    assert s.room.admit_waiting() == [large, equal]


def test_a_request_must_fit_in_one_group() -> None:
    s = scheduler(TWO_BY_TWO, num_blocks=4)
    with pytest.raises(InvalidRequest, match=r"this instance has room for 24$"):
        line_up(s, 7)
    enter(s, 6)


def test_a_prompt_goes_to_the_group_that_knows_its_beginning() -> None:
    s = scheduler()
    filler, known = enter(s, 1), enter(s, 3, 200)
    assert places(filler, known) == [(0, 0), (1, 2)]
    prefill(s, known)
    leave(s, known)
    s.release(filler)
    assert s.room.figures().blocks["cached"] == 2, "the last block of the prompt is not full"
    again, other = enter(s, 3, 200), enter(s, 3, 300)
    assert places(again, other) == [(1, 2), (0, 0)] and again.num_shared == 2
    assert prefill(s, again) == [(8, 3)]


def test_groups_share_nothing() -> None:
    """Also not what is in work: nobody waits for a block that another group computes."""
    s = scheduler()
    first, second = enter(s, 3), enter(s, 3)
    assert places(first, second) == [(0, 0), (1, 2)]
    for seq in (first, second):
        s.start_prefill(seq, None)
    plan = next_plan(s)
    assert [(g.slot, g.start, g.num_tokens) for g in plan.segments] == [(0, 0, 11), (2, 0, 11)]
    assert [(a.slot, a.group) for a in plan.admit] == [(0, 0), (2, 1)]
    assert s.room.figures().blocks["live"] == 6


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        (TWO, [(5, 1), (2, 2)]),
        (TWO_BY_TWO, [(3, 1), (2, 1), (1, 2), (1, 2)]),
        (ParallelConfig(dp_size=2, attn_tp_size=2), [(5, 1), (5, 1), (2, 2), (2, 2)]),
    ],
)
def test_each_rank_holds_its_shard_of_its_group(parallel: ParallelConfig, expected: list[tuple[int, int]]) -> None:
    s = scheduler(parallel)
    seqs = [enter(s, 5, 100), enter(s, 1, 200), enter(s, 1, 300)]
    assert [seq.group for seq in seqs] == [0, 1, 1]
    for seq in seqs:
        s.start_prefill(seq, None)
    next_plan(s)
    found = s.room.by_rank()
    empty = RankFigures(live=0, reserved=0, quarantined=0, slots=0, cached=0)
    swapped = seqs[0].split.start == 1  # an odd number of blocks begins anywhere
    totals = [(figures.live, figures.slots) for figures in found]
    if parallel is TWO_BY_TWO:
        assert sorted(totals[:2], reverse=True) == expected[:2] and (totals[0] < totals[1]) == swapped
        assert sum(live for live, _ in totals[2:]) == 2 and [n for _, n in totals[2:]] == [2, 2]
    else:
        assert totals == expected
    assert all(replace(figures, live=0, slots=0) == empty for figures in found)
    assert s.room.figures().blocks["live"] == 7 and s.room.figures().running == 3 and s.room.figures().slots == 4
