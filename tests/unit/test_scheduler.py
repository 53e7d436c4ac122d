"""Plans by hand: chunks, depth, batching, what outputs mean, who may have which block when."""

from __future__ import annotations

from typing import Any

import pytest

from longcat_pd.config.schema import ParallelConfig
from longcat_pd.engine.plan import Segment, SlotOutput, StepOutput, StepPlan
from longcat_pd.engine.request import FinishReason, TokenOutput
from longcat_pd.engine.scheduler import Scheduler
from longcat_pd.engine.sequence import Sequence, Stage
from longcat_pd.errors import EngineFault
from longcat_pd.kv_transfer.messages import Arrival, DraftState, TransferClosed
from longcat_pd.wire import pack, unpack
from tests.unit.engine_rig import engine_config, push, request


def scheduler(parallel: ParallelConfig | None = None, **changes: Any) -> Scheduler:
    return Scheduler(engine_config(**changes), parallel or ParallelConfig(), eos_token_ids=frozenset({20}))


def admitted(s: Scheduler, num_prompt: int, max_tokens: int = 4, *, num_drafts: int = 0, **sampling: Any) -> Sequence:
    """A request that has room; ``sampling`` may hold its priority too."""
    num_tokens = num_prompt + max_tokens + num_drafts
    seq = s.room.enqueue(request([50] * num_prompt, max_tokens, **sampling), num_tokens)
    assert s.room.admit_waiting() == [seq]
    return seq


def answer(plan: StepPlan, **tokens: int) -> list[StepOutput]:
    slots = tuple(SlotOutput(slot=int(k[1:]), token_ids=(v,)) for k, v in tokens.items())
    return [StepOutput(step_id=plan.step_id, rank=0, slots=slots)]


def next_plan(s: Scheduler) -> StepPlan:
    plan = s.next_plan(0.0)
    assert plan is not None
    return plan


def chunks(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [(g.slot, g.start, g.num_tokens, g.is_last) for g in plan.segments]


def test_a_prompt_is_cut_at_block_borders_within_the_budget() -> None:
    s = scheduler(max_num_batched_tokens=10)  # two blocks of four
    seq = admitted(s, 19)
    s.start_prefill(seq, None)
    one, two = next_plan(s), next_plan(s)
    assert s.next_plan(0.0) is None, "one plan in flight for each pipeline stage, and the next"
    s.apply(answer(one), 0.0)
    last = next_plan(s)
    assert chunks(one) + chunks(two) + chunks(last) == [(0, 0, 8, False), (0, 8, 8, False), (0, 16, 3, True)]
    s.apply(answer(two), 0.0)
    s.apply(answer(last, s0=7), 0.0)
    assert seq.stage is Stage.PREFILLED and seq.num_computed == 19


def test_prompts_that_have_not_begun_stand_by_priority() -> None:
    s = scheduler(max_num_batched_tokens=4, max_num_seqs=6, num_blocks=33, prefix_cache=False)
    for priority in (0, 9, 0):
        s.start_prefill(admitted(s, 8, 1, priority=priority), None)
    plan: StepPlan | None = next_plan(s)
    for priority in (-1, 0, -1):
        s.start_prefill(admitted(s, 8, 1, priority=priority), None)
    order = []
    while plan is not None:
        order += [slot for slot, _, _, _ in chunks(plan)]
        s.apply(answer(plan, **{f"s{n}": 7 for n in range(6)}), 0.0)
        plan = s.next_plan(0.0)
    assert order == [0, 0, 3, 3, 5, 5, 2, 2, 4, 4, 1, 1], "who has begun goes on"


def test_a_plan_flies_for_each_stage_and_one_more_and_they_share_their_budget_among_prompts() -> None:
    s = scheduler(ParallelConfig(pp_size=2), max_num_batched_tokens=8, num_blocks=64)
    first, second = admitted(s, 3), admitted(s, 22)
    s.start_prefill(first, None)
    s.start_prefill(second, None)
    one, two, three = next_plan(s), next_plan(s), next_plan(s)
    assert chunks(one) == [(0, 0, 3, True), (1, 0, 4, False)]
    assert chunks(two) + chunks(three) == [(1, 4, 8, False), (1, 12, 8, False)]
    assert s.next_plan(0.0) is None
    s.apply(answer(one, s0=7), 0.0)
    assert chunks(next_plan(s)) == [(1, 20, 2, True)]
    assert [a.slot for a in one.admit] == [0, 1] and not two.admit


def test_every_group_has_a_budget_and_waits_for_its_own_only() -> None:
    s = scheduler(ParallelConfig(dp_size=2), max_num_batched_tokens=8, num_blocks=64, prefix_cache=False)
    seqs = [admitted(s, n) for n in (20, 6, 3, 5)]
    assert [seq.slot for seq in seqs] == [0, 2, 3, 1]
    for seq in seqs:
        s.start_prefill(seq, None)
    one, two = next_plan(s), next_plan(s)
    assert chunks(one) == [(0, 0, 8, False), (2, 0, 6, True)], "two tokens of group 1 are left, and no block of the third"
    assert chunks(two) == [(0, 8, 8, False), (3, 0, 3, True)]
    s.apply(answer(one, s2=7), 0.0)
    assert chunks(next_plan(s)) == [(0, 16, 4, True), (1, 0, 4, False)]


def test_one_step_for_those_of_all_groups_that_decode() -> None:
    s = scheduler(ParallelConfig(dp_size=2, attn_tp_size=2))
    seqs = [decoding(s) for _ in range(3)]
    assert [seq.slot for seq in seqs] == [0, 2, 1] and [seq.group for seq in seqs] == [0, 1, 0]
    step = next_plan(s)
    assert [g.slot for g in step.segments] == [0, 2, 1]
    outputs = [
        StepOutput(step_id=step.step_id, rank=rank, slots=tuple(SlotOutput(slot=n, token_ids=(30 + n,)) for n in slots))
        for rank, slots in enumerate(((0, 1), (), (2,), ()))
    ]
    assert [tokens[0].token_id for _, tokens in s.apply(outputs, 0.0)] == [30, 32, 31]


def test_prompts_go_before_one_step_for_all_that_decode() -> None:
    s = scheduler()
    old = [admitted(s, 2), admitted(s, 3)]
    for seq in old:
        s.start_prefill(seq, None)
    s.apply(answer(next_plan(s), s0=7, s1=8), 0.0)
    s.start_decode(old[0], TokenOutput(7))
    s.start_decode(old[1], TokenOutput(8))
    new = admitted(s, 5)
    s.start_prefill(new, None)
    plan = next_plan(s)
    assert plan.phase == "prefill" and chunks(plan) == [(2, 0, 5, True)]
    s.apply(answer(plan, s2=9), 0.0)
    step = next_plan(s)
    assert step.phase == "decode"
    assert step.segments == tuple(Segment(slot=i, start=-1, num_tokens=1, is_last=True) for i in (0, 1))
    assert s.apply(answer(step, s0=1, s1=2), 0.0) == [(old[0], (TokenOutput(1),)), (old[1], (TokenOutput(2),))]


def decoding(s: Scheduler, num_prompt: int = 2, max_tokens: int = 9, *, num_drafts: int = 0, **sampling: Any) -> Sequence:
    """A sequence with its first token, 7, while nothing is in flight."""
    seq = admitted(s, num_prompt, max_tokens, num_drafts=num_drafts, **sampling)
    s.start_prefill(seq, None)
    s.apply(answer(next_plan(s), **{f"s{seq.slot}": 7}), 0.0)
    s.start_decode(seq, TokenOutput(7))
    return seq


def run(plan: StepPlan, *token_ids: int, slot: int = 0) -> list[StepOutput]:
    return [StepOutput(step_id=plan.step_id, rank=0, slots=(SlotOutput(slot=slot, token_ids=token_ids),))]


def test_the_next_decode_step_is_on_its_way_while_one_computes() -> None:
    s = scheduler()
    seq = decoding(s)
    one, two = next_plan(s), next_plan(s)
    assert one.segments == two.segments == (Segment(slot=0, start=-1, num_tokens=1, is_last=True),)
    assert s.next_plan(0.0) is None
    s.apply(answer(one, s0=8), 0.0)
    assert next_plan(s).phase == "decode" and s.next_plan(0.0) is None
    s.apply(answer(two, s0=9), 0.0)
    assert [t.token_id for t in seq.outputs] == [7, 8, 9] and seq.num_computed == 4


def test_as_many_decode_steps_fly_as_was_asked_for() -> None:
    s = Scheduler(engine_config(), ParallelConfig(), eos_token_ids=frozenset({20}), decode_plans=1)
    decoding(s)
    next_plan(s)
    assert s.next_plan(0.0) is None


@pytest.mark.parametrize("max_tokens", [2, 3, 4, 7])
def test_no_step_is_made_for_a_sequence_that_those_in_flight_end(max_tokens: int) -> None:
    s = scheduler()
    seq, other = decoding(s, max_tokens=max_tokens), decoding(s, max_tokens=10)
    with_seq = 0
    flying = [next_plan(s), next_plan(s)]
    for count in range(12):
        if not flying:
            break
        plan = flying.pop(0)
        with_seq += any(g.slot == seq.slot for g in plan.segments)
        s.apply(answer(plan, **{f"s{g.slot}": 30 + count for g in plan.segments}), 0.0)
        while (more := s.next_plan(0.0)) is not None:
            flying.append(more)
    assert seq.finish is other.finish is FinishReason.LENGTH
    assert (len(seq.outputs), len(other.outputs)) == (max_tokens, 10)
    assert with_seq == max_tokens - 1, "one step for each token behind the first, none in vain"


def test_a_newcomer_waits_for_what_is_in_flight_only() -> None:
    s = scheduler(max_num_batched_tokens=4)
    decoding(s)
    one, two = next_plan(s), next_plan(s)
    new = admitted(s, 6)
    s.start_prefill(new, None)
    assert s.next_plan(0.0) is None
    s.apply(answer(one, s0=8), 0.0)
    first = next_plan(s)
    assert chunks(first) == [(1, 0, 4, False)]
    s.apply(answer(two, s0=9), 0.0)
    last = next_plan(s)
    assert chunks(last) == [(1, 4, 2, True)], "prompts come first"
    assert s.next_plan(0.0) is None
    s.apply(answer(first), 0.0)
    behind = next_plan(s)
    assert behind.phase == "decode" and [g.slot for g in behind.segments] == [0]
    s.apply(answer(last, s1=7), 0.0)
    s.start_decode(new, TokenOutput(7))
    assert [g.slot for g in next_plan(s).segments] == [0, 1]


ENDS = {
    "eos": {},
    "stop token": {"stop_token_ids": (20,), "ignore_eos": True},
    "max_tokens": {"max_tokens": 3, "ignore_eos": True},
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("found", [(18, 20), (18, 20, 21), (18, 20, 21, 22)])
def test_what_comes_late_for_a_sequence_that_has_ended_is_nothing(end: str, found: tuple[int, ...]) -> None:
    """The end is at the border of the run or inside it; the slot has its next tenant when the late output comes."""
    s = scheduler(num_draft_tokens=3, max_num_seqs=1)
    old = decoding(s, num_drafts=3, **{"max_tokens": 9, **ENDS[end]})
    one, late = next_plan(s), next_plan(s)
    ((_, tokens),) = s.apply(run(one, *found), 0.0)
    assert [t.token_id for t in tokens] == [18, 20] and old.stage is Stage.ENDED
    blocks = set(old.blocks)
    assert s.room.figures().blocks["live"] == len(blocks), "the late step may still write there"
    assert next_plan(s).retire == (0,)
    new = admitted(s, 3)
    assert new.slot == 0 and set(new.blocks) & blocks
    s.start_prefill(new, None)
    plan = next_plan(s)
    assert plan.admit[0].slot == 0 and plan.step_id > late.step_id
    assert s.apply(run(late, 23, 24), 0.0) == []
    assert [t.token_id for t in old.outputs] == [7, 18, 20] and old.num_computed == 4
    assert new.outputs == [] and new.num_computed == 0
    s.apply([StepOutput(step_id=late.step_id + 1, rank=0)], 0.0)
    s.apply(run(plan, 9), 0.0)
    assert new.stage is Stage.PREFILLED and new.num_computed == 3


def test_what_was_cancelled_with_two_steps_in_flight_comes_back_once() -> None:
    s = scheduler()
    seq, other = decoding(s), decoding(s)
    one, two = next_plan(s), next_plan(s)
    s.release(seq)
    assert next_plan(s).retire == (0,), "at once, behind what is in flight"
    assert [q for q, _ in s.apply(answer(one, s0=8, s1=9), 0.0)] == [other]
    assert [g.slot for g in next_plan(s).segments] == [1]
    assert [q for q, _ in s.apply(answer(two, s0=8, s1=9), 0.0)] == [other]
    assert [t.token_id for t in seq.outputs] == [7] and [t.token_id for t in other.outputs] == [7, 9, 9]


def test_tokens_behind_the_end_do_not_count() -> None:
    s = scheduler()
    seq = admitted(s, 2, 9)
    s.start_prefill(seq, None)
    s.apply(answer(next_plan(s), s0=7), 0.0)
    s.start_decode(seq, TokenOutput(7))
    plan = next_plan(s)
    several = StepOutput(
        step_id=plan.step_id,
        rank=0,
        slots=(SlotOutput(slot=0, token_ids=(18, 20, 21), logprobs=(-1.0, -2.0, -3.0), top=((), ((20, -2.0),), ())),),
    )
    ((_, tokens),) = s.apply([several], 0.0)
    assert tokens == (TokenOutput(18, -1.0), TokenOutput(20, -2.0, ((20, -2.0),)))
    assert seq.stage is Stage.ENDED and [t.token_id for t in seq.outputs] == [7, 18, 20]


def test_a_window_has_room_for_drafts_and_the_state_that_came_goes_to_the_ranks() -> None:
    s = scheduler(num_draft_tokens=3)
    seq = admitted(s, 6, num_drafts=3)
    s.announce(seq, arrival(seq))
    next_plan(s)
    state = DraftState(hidden=b"abcd", dtype="float32")
    s.start_decode(seq, TokenOutput(7), state)
    plan = next_plan(s)
    assert plan.admit[0].draft_state == state
    assert plan.segments == (Segment(slot=0, start=-1, num_tokens=4, is_last=True),)


def test_a_run_ends_where_the_answer_ends() -> None:
    s = scheduler(num_draft_tokens=3)
    seq = admitted(s, 2, 5, num_drafts=3)
    s.start_prefill(seq, None)
    s.apply(answer(next_plan(s), s0=7), 0.0)
    s.start_decode(seq, TokenOutput(7))
    for run in ((8, 9), (10, 11, 12, 13)):
        plan = next_plan(s)
        out = StepOutput(step_id=plan.step_id, rank=0, slots=(SlotOutput(slot=0, token_ids=run, num_drafts=3),))
        ((_, tokens),) = s.apply([out], 0.0)
    assert [t.token_id for t in seq.outputs] == [7, 8, 9, 10, 11] and seq.finish is FinishReason.LENGTH
    assert [t.token_id for t in tokens] == [10, 11] and next_plan(s).retire == (0,)


def test_what_a_push_hands_over_stays_with_its_sequence() -> None:
    s = scheduler(num_draft_tokens=3)
    seq = admitted(s, 2)
    s.start_prefill(seq, push("t"))
    plan, state = next_plan(s), DraftState(hidden=b"abcd", dtype="float32")
    out = StepOutput(step_id=plan.step_id, rank=0, slots=(SlotOutput(slot=0, token_ids=(7,), draft_state=state),))
    s.apply([out], 0.0)
    assert seq.draft_state == state


def test_a_slot_has_its_next_tenant_while_the_output_for_the_last_one_is_on_its_way() -> None:
    s = scheduler(max_num_seqs=1)
    old = admitted(s, 2)
    s.start_prefill(old, None)
    first = next_plan(s)
    s.release(old)
    assert next_plan(s).retire == (0,)
    new = admitted(s, 3)
    s.start_prefill(new, None)
    assert s.apply(answer(first, s0=7), 0.0) == []
    assert new.num_computed == 0 and new.stage is Stage.PREFILLING


def test_what_ranks_know_comes_back_with_their_next_plan_and_only_once() -> None:
    s = scheduler()
    seq = admitted(s, 8)
    s.start_prefill(seq, None)
    next_plan(s)
    used = s.room.figures().blocks["live"]
    s.release(seq)
    s.release(seq)
    assert s.room.figures().blocks["live"] == used, "ranks may still write there"
    assert next_plan(s).retire == (0,)
    assert s.room.figures().blocks["live"] == 0 and s.room.figures().running == 0
    assert s.next_plan(0.0) is None


def arrival(seq: Sequence) -> Arrival:
    return Arrival(
        transfer_id="t", group=0, peer="p0", peer_incarnation="i", source_cp_size=1, source_layers=(1,),
        prompt_len=seq.num_prompt_tokens, blocks=pack(seq.blocks), split_start=0, generation=seq.generation,
    )  # fmt: skip


def test_an_arrival_is_announced_then_admitted_with_its_prompt_computed() -> None:
    s = scheduler()
    seq = admitted(s, 6, temperature=0.5, seed=9)
    s.announce(seq, arrival(seq))
    assert next_plan(s).arrivals == (arrival(seq),)
    s.start_decode(seq, TokenOutput(7))
    plan = next_plan(s)
    (admit,) = plan.admit
    assert (admit.arrival, admit.num_computed, admit.prompt_len) == ("t", 6, 6)
    assert list(unpack(admit.token_ids)) == [50] * 6 + [7]
    assert (admit.sampling.temperature, admit.sampling.seed) == (0.5, 9)
    assert plan.phase == "decode" and len(plan.segments) == 1


def test_an_arrival_that_is_given_up_is_dropped_and_its_blocks_wait_for_that_plan() -> None:
    s = scheduler()
    seq = admitted(s, 6)
    s.announce(seq, arrival(seq))
    next_plan(s)
    s.release(seq)
    assert s.room.figures().blocks["reserved"] == 3
    plan = next_plan(s)
    assert plan.drop == ("t",) and not plan.retire
    assert s.room.figures().blocks["reserved"] == 0


def test_an_arrival_that_no_plan_has_announced_leaves_no_trace() -> None:
    s = scheduler()
    seq = admitted(s, 6)
    s.announce(seq, arrival(seq))
    s.release(seq)
    assert s.next_plan(0.0) is None and s.room.figures().blocks["reserved"] == 0


def test_a_finished_push_needs_no_quarantine() -> None:
    s = scheduler(ParallelConfig(pp_size=2))
    seq = admitted(s, 6)
    s.start_prefill(seq, push("t"))
    next_plan(s)
    for rank in (1, 0, 0):
        s.room.closed(TransferClosed(transfer_id="t", rank=rank, ok=True))
    s.release(seq)
    assert next_plan(s).cancel_push == ()
    assert s.room.figures().blocks["quarantined"] == 0


def test_a_push_that_ends_between_the_cancel_and_its_plan_frees_once() -> None:
    s = scheduler()
    seq = admitted(s, 6)
    s.start_prefill(seq, push("t"))
    next_plan(s)
    s.release(seq)
    s.room.closed(TransferClosed(transfer_id="t", rank=0, ok=True))
    assert next_plan(s).cancel_push == ("t",)
    blocks = s.room.figures().blocks
    assert (blocks["quarantined"], blocks["live"], blocks["reserved"]) == (0, 0, 0)


def test_ranks_that_answer_out_of_order_or_leave_a_token_out_are_a_fault() -> None:
    s = scheduler()
    seq = admitted(s, 2)
    s.start_prefill(seq, None)
    plan = next_plan(s)
    with pytest.raises(EngineFault, match="no token for slot 0"):
        s.apply(answer(plan), 0.0)
    s = scheduler()
    next_id = s.checkpoint(0.0).step_id
    with pytest.raises(EngineFault, match=f"not {next_id}"):
        s.apply([StepOutput(step_id=next_id + 1, rank=0)], 0.0)


def test_plans_are_numbered_without_a_gap() -> None:
    s = scheduler()
    assert [s.checkpoint(0.0).step_id for _ in range(3)] == [1, 2, 3]


def test_prompts_that_begin_alike_share_a_plan_only_as_far_as_one_rank_of_cp_has_room() -> None:
    """Two blocks of four a rank; the only block of each of these lies on the same one."""
    s = scheduler(ParallelConfig(cp_size=4), max_num_batched_tokens=32, max_num_seqs=8, prefix_cache=False)
    for _ in range(5):
        s.start_prefill(admitted(s, 3), None)
    assert [len(next_plan(s).segments) for _ in range(2)] == [2, 2]


def test_a_long_prompt_is_level_over_cp_and_finds_back_to_whole_rounds() -> None:
    s = scheduler(ParallelConfig(cp_size=2), max_num_batched_tokens=8, max_num_seqs=8, prefix_cache=False)
    short, long = admitted(s, 4), admitted(s, 20)
    for seq in (short, long):
        s.start_prefill(seq, None)
    one, two = next_plan(s), next_plan(s)
    assert short.split.start == long.split.start, "so the short one takes the room of the first block of the long one"
    assert chunks(one) == [(0, 0, 4, True)]
    assert chunks(two) == [(1, 0, 8, False)]
    s.apply(answer(one, s0=7), 0.0)
    assert chunks(next_plan(s)) == [(1, 8, 8, False)]
