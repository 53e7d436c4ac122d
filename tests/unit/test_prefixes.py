"""engine/prefixes.py under the scheduler and the driver: what is found, when, by whom; and that it is right and comes back.

The pencil of the driver tests knows from which tokens each place of the cache was computed, and refuses any other sharing.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from longcat_pd.config.schema import ParallelConfig
from longcat_pd.engine.plan import SlotOutput, StepOutput, StepPlan
from longcat_pd.engine.request import TokenOutput
from longcat_pd.engine.scheduler import Scheduler
from longcat_pd.engine.sequence import Sequence
from longcat_pd.kv_transfer.messages import Arrival
from longcat_pd.wire import pack
from tests.manual_clock import settle
from tests.unit.engine_rig import Rig, engine_config, ids, request, rig

BLOCK = 4


def scheduler(parallel: ParallelConfig | None = None, **changes: Any) -> Scheduler:
    return Scheduler(engine_config(**changes), parallel or ParallelConfig(), eos_token_ids=frozenset({20}))


def enter(s: Scheduler, prompt: list[int], max_tokens: int = 4, *, num_drafts: int = 0) -> Sequence:
    seq = s.room.enqueue(request(prompt, max_tokens), len(prompt) + max_tokens + num_drafts)
    assert s.room.admit_waiting() == [seq]
    return seq


def next_plan(s: Scheduler) -> StepPlan:
    plan = s.next_plan(0.0)
    assert plan is not None
    return plan


def run(s: Scheduler, plan: StepPlan, *tokens: int) -> None:
    """All segments that are last answer with the same tokens."""
    slots = tuple(SlotOutput(slot=g.slot, token_ids=tokens) for g in plan.segments if g.is_last)
    s.apply([StepOutput(step_id=plan.step_id, rank=0, slots=slots)], 0.0)


def leave(s: Scheduler, seq: Sequence) -> None:
    s.release(seq)
    run(s, next_plan(s))


def prefill(s: Scheduler, seq: Sequence, first: int = 30) -> list[tuple[int, int]]:
    """What is computed of the prompt: (start, number of tokens) of its chunks."""
    s.start_prefill(seq, None)
    seen = []
    while seq.num_computed < seq.num_prompt_tokens:
        plan = next_plan(s)
        seen += [(g.start, g.num_tokens) for g in plan.segments if g.slot == seq.slot]
        run(s, plan, first)
    return seen


def cached(seq: Sequence) -> int | None:
    return seq.request.life.num_cached_tokens


def arrival(seq: Sequence, name: str = "t") -> Arrival:
    return Arrival(
        transfer_id=name, group=0, peer="p0", peer_incarnation="i", source_cp_size=1, source_layers=(1,),
        prompt_len=seq.num_prompt_tokens, blocks=pack(seq.blocks), split_start=0, generation=seq.generation,
        first_block=seq.num_shared,
    )  # fmt: skip


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 12, 13])
def test_the_same_prompt_again_computes_its_last_position_only_as_far_as_blocks_go(length: int) -> None:
    s, prompt = scheduler(max_num_batched_tokens=64), list(range(100, 100 + length))
    first = enter(s, prompt)
    assert prefill(s, first) == [(0, length)] and cached(first) == 0
    again = enter(s, prompt)
    hit = (length - 1) // BLOCK * BLOCK
    assert prefill(s, again) == [(hit, length - hit)] and cached(again) == hit
    assert again.blocks[: hit // BLOCK] == first.blocks[: hit // BLOCK]
    assert not set(again.blocks[hit // BLOCK :]) & set(first.blocks)


def test_a_longer_prompt_finds_the_block_that_another_prompt_ended_with() -> None:
    s = scheduler(max_num_batched_tokens=64)
    prefill(s, enter(s, list(range(100, 108))))
    seq = enter(s, [*range(100, 108), 1])
    assert prefill(s, seq) == [(8, 1)]


def test_other_tokens_anywhere_before_are_another_prefix() -> None:
    s, prompt = scheduler(max_num_batched_tokens=64), list(range(100, 113))
    prefill(s, enter(s, prompt))
    for place, hit in ((0, 0), (3, 0), (4, 4), (11, 8), (12, 12)):
        other = list(prompt)
        other[place] = 7
        seq = enter(s, other)
        assert prefill(s, seq) == [(hit, 13 - hit)], place
        leave(s, seq)
        s.room.prefixes.flush()
        again = enter(s, prompt)
        prefill(s, again)
        leave(s, again)


def test_entries_of_a_draft_layer_depend_on_the_token_behind_them() -> None:
    s, prompt = scheduler(max_num_batched_tokens=64, num_draft_tokens=3), list(range(100, 109))
    prefill(s, enter(s, prompt, num_drafts=3))
    assert prefill(s, enter(s, [*prompt[:8], 7], num_drafts=3)) == [(4, 5)], "its second block has another next token"
    assert prefill(s, enter(s, prompt, num_drafts=3)) == [(8, 1)]


def test_off_means_off() -> None:
    s, prompt = scheduler(max_num_batched_tokens=64, prefix_cache=False), list(range(100, 113))
    for _ in range(2):
        seq = enter(s, prompt)
        assert prefill(s, seq) == [(0, 13)] and cached(seq) == 0
        leave(s, seq)
        assert s.room.figures().blocks["cached"] == 0 and s.room.figures().blocks["free"] == 16


def test_a_chunk_is_found_while_its_sequence_goes_on_and_not_before_it_is_reported() -> None:
    s, prompt = scheduler(num_blocks=32), list(range(100, 120))  # chunks of two blocks
    first = enter(s, prompt)
    s.start_prefill(first, None)
    plan = next_plan(s)
    early = enter(s, [*prompt[:8], 1])
    assert early.num_shared == 0
    s.release(early)
    run(s, plan, 30)
    late = enter(s, [*prompt[:8], 1])
    assert late.num_shared == 2 and late.blocks[:2] == first.blocks[:2]


def test_of_a_burst_the_first_computes_what_they_have_in_common_and_the_rest_wait_for_it() -> None:
    s, common = scheduler(ParallelConfig(pp_size=2), num_blocks=64, max_num_seqs=8), list(range(100, 116))
    burst = [enter(s, [*common, tail, tail]) for tail in (1, 2, 3)]
    for seq in burst:
        s.start_prefill(seq, None)
    seen: list[tuple[int, int, int]] = []
    while any(seq.num_computed < seq.num_prompt_tokens for seq in burst):
        flying = [next_plan(s)]
        while (more := s.next_plan(0.0)) is not None:
            flying.append(more)
        for plan in flying:
            seen += [(g.slot, g.start, g.num_tokens) for g in plan.segments]
            run(s, plan, 30)
    computed = {seq.slot: [(start, n) for slot, start, n in seen if slot == seq.slot] for seq in burst}
    assert computed[burst[0].slot][0] == (0, 8) and [cached(seq) for seq in burst] == [0, 16, 16]
    assert [computed[seq.slot] for seq in burst[1:]] == [[(16, 2)], [(16, 2)]]


def test_who_has_nothing_in_common_overtakes_those_who_wait() -> None:
    s, prompt = scheduler(ParallelConfig(pp_size=2), num_blocks=64), list(range(100, 109))
    first, second, stranger = enter(s, prompt), enter(s, prompt), enter(s, [7, 8])
    for seq in (first, second, stranger):
        s.start_prefill(seq, None)
    one, two = next_plan(s), next_plan(s)
    assert [(g.slot, g.start) for g in one.segments] == [(first.slot, 0)]
    assert [(g.slot, g.start) for g in two.segments] == [(first.slot, 8), (stranger.slot, 0)]
    run(s, one, 30)
    assert [(g.slot, g.start) for g in next_plan(s).segments] == [(second.slot, 8)]


def test_who_waits_for_another_goes_on_without_it_when_it_leaves() -> None:
    s, common = scheduler(num_blocks=64), list(range(100, 116))
    first, second = enter(s, [*common, 1]), enter(s, [*common, 2])
    s.start_prefill(first, None)
    s.start_prefill(second, None)
    run(s, next_plan(s), 30)
    assert not second.is_admitted
    late = next_plan(s)  # the third and fourth block of the first
    s.release(first)
    plan = next_plan(s)
    assert plan.retire == (first.slot,)
    run(s, late)
    run(s, plan, 30)
    assert second.is_admitted
    assert cached(second) == 8, "what the ranks had reported of the first"


def test_an_answer_is_found_but_not_what_its_last_window_may_have_touched() -> None:
    for num_drafts, found in ((0, 3), (3, 2)):
        s = scheduler(max_num_batched_tokens=64, num_draft_tokens=num_drafts)
        seq = enter(s, [100, 101, 102], 12, num_drafts=num_drafts)
        prefill(s, seq)
        s.start_decode(seq, TokenOutput(30))
        for token in range(31, 42):
            run(s, next_plan(s), token)
        assert seq.finish and seq.num_computed == 14
        next_plan(s)
        follow_up = [100, 101, 102, *range(30, 42), 5, 6, 7]
        again = enter(s, follow_up, 1, num_drafts=num_drafts)
        assert again.num_shared == found
        other = enter(s, [100, 101, 102, 30, 99, *range(32, 42)], 1, num_drafts=num_drafts)
        assert other.num_shared == (0 if num_drafts else 1)


def test_tokens_behind_the_end_are_not_found() -> None:
    s = scheduler(max_num_batched_tokens=64, num_draft_tokens=3)
    seq = enter(s, [100, 101, 102], 9, num_drafts=3)
    prefill(s, seq)
    s.start_decode(seq, TokenOutput(30))
    for tokens in ((31, 32, 33, 34), (20, 35, 36, 37)):  # 20 ends the answer; what was accepted behind it does not count
        plan = next_plan(s)
        s.apply([StepOutput(step_id=plan.step_id, rank=0, slots=(SlotOutput(slot=seq.slot, token_ids=tokens),))], 0.0)
    assert seq.num_computed == 8
    next_plan(s)
    again = enter(s, [100, 101, 102, 30, 31, 32, 33, 34, 20, 35, 36, 37, 1], 1, num_drafts=3)
    assert again.num_shared == 1


def test_what_arrives_is_found_once_it_is_complete_and_never_if_it_failed() -> None:
    s, prompt = scheduler(), list(range(100, 109))
    broken = enter(s, prompt)
    s.announce(broken, arrival(broken))
    next_plan(s)
    waiting = enter(s, prompt)
    assert waiting.num_shared == 0
    s.release(broken)
    assert next_plan(s).drop == ("t",)
    assert s.room.figures().blocks["cached"] == 0
    s.announce(waiting, arrival(waiting, "u"))
    next_plan(s)
    s.start_decode(waiting, TokenOutput(30))
    third = enter(s, prompt, 1)
    assert third.num_shared == 2
    s.announce(third, arrival(third, "v"))
    plan = next_plan(s)
    assert plan.arrivals[0].first_block == 2
    live, reserved = s.room.by_rank()[0].live, s.room.by_rank()[0].reserved
    assert (live, reserved) == (4, 1), "what is shared is nobody's reservation"


def test_what_is_evictable_is_room_and_a_large_one_gets_it() -> None:
    s = scheduler(num_blocks=9, max_num_batched_tokens=64, max_num_seqs=8)
    for start in (100, 200):
        seq = enter(s, list(range(start, start + 15)), 1)
        prefill(s, seq)
        leave(s, seq)
    assert s.room.figures().blocks == {"free": 2, "cached": 6, "live": 0, "reserved": 0, "quarantined": 0}
    large = enter(s, list(range(300, 330)), 2)
    assert len(large.blocks) == 8 and s.room.figures().blocks["cached"] == 0


async def test_a_follow_up_of_a_conversation_computes_only_what_is_new() -> None:
    async with rig(num_blocks=33) as r:
        deltas = await r.answer(request(list(range(40, 50)), 9))
        so_far = [*range(40, 50), *ids(deltas)]
        await settle()
        asked = request([*so_far, 30, 31], 3)
        assert ids(await r.answer(asked)) == [32, 33, 34]
        assert asked.life.num_cached_tokens == 16
        r.engine.prefixes.flush()
        fresh = request([*so_far, 30, 31], 3)
        assert ids(await r.answer(fresh)) == [32, 33, 34] and fresh.life.num_cached_tokens == 0
        await r.assert_idle()


def _prompt(rng: random.Random) -> list[int]:
    """From a few stems, of all lengths around block borders."""
    base, length = 100 * rng.randrange(1, 4), rng.choice((1, 3, 4, 5, 8, 9, 12, 13, 16, 17, 23))
    return list(range(base, base + length)) + [1000 + rng.randrange(3) for _ in range(rng.randrange(3))]


async def _client(r: Rig, rng: random.Random, number: int) -> int:
    """One request in one of three roles; cancelled at some turn or not. Tokens of its prompt that were not computed."""
    prompt, role = _prompt(rng), rng.choice(("alone", "alone", "prefill", "decode"))
    asked, transfer = request(prompt, rng.randrange(1, 9), name=f"r{number}"), f"t{number}"
    if role == "alone":
        task: asyncio.Task[Any] = asyncio.create_task(r.answer(asked))
    elif role == "prefill":
        acknowledged = asyncio.Event()
        task = asyncio.create_task(r.prefill(asked, transfer, acknowledged))
    else:
        task = asyncio.create_task(r.receive(asked, transfer, TokenOutput(prompt[-1] + 1)))
    patience = rng.randrange(5, 60) if rng.random() < 0.4 else 10_000
    for turn in range(10_000):
        if task.done() or turn == patience:
            break
        await asyncio.sleep(0)
        if role == "decode" and transfer in r.pencil.arrivals and rng.random() < 0.2:
            r.pencil.close_transfer(transfer)
        elif role == "prefill" and transfer in r.pencil.pushes and rng.random() < 0.1:
            r.pencil.close_transfer(transfer)
            acknowledged.set()
    task.cancel()
    (result,) = await asyncio.gather(task, return_exceptions=True)
    if transfer in r.pencil.pushes:
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(0)
        r.pencil.close_transfer(transfer, ok=False)
    if isinstance(result, asyncio.CancelledError):
        return 0
    assert not isinstance(result, BaseException), result
    if role != "prefill":
        last = prompt[-1]
        expected = [last + 1 + n for n in range(asked.sampling.max_tokens)]
        assert ids(result) == (expected[: expected.index(20) + 1] if 20 in expected else expected)
    return asked.life.num_cached_tokens or 0


async def _watch(r: Rig) -> None:
    """At all times ranks hold what the driver says that they hold: what several share counts once on both sides."""
    while True:
        account = await r.engine.accounting()
        assert account["mismatch"] == [], account
        for rank in account["ranks"]:
            assert min(rank["blocks"].values()) >= 0, rank
        await asyncio.sleep(0)


CROWDED = {
    "alone": ParallelConfig(),
    "prefill": ParallelConfig(pp_size=2, cp_size=2),
    "kvp": ParallelConfig(kvp_size=3),
    "groups": ParallelConfig(dp_size=2, kvp_size=2, attn_tp_size=2),
    "whole": ParallelConfig(dp_size=3, attn_tp_size=2),
}


@pytest.mark.parametrize("parallel", CROWDED.values(), ids=CROWDED)
async def test_a_crowd_with_few_blocks_is_answered_right_and_leaves_nothing(parallel: ParallelConfig) -> None:
    rng = random.Random(5)
    async with rig(parallel=parallel, num_blocks=21, max_num_seqs=6, max_queued_requests=64, max_model_len=128) as r:
        hits = 0
        for number in range(0, 240, 12):
            watching = asyncio.ensure_future(_watch(r))
            hits += sum(await asyncio.gather(*(_client(r, rng, number + i) for i in range(12))))
            watching.cancel()
            await asyncio.wait({watching})
            assert watching.cancelled(), watching.exception()
            for transfer in list(r.pencil.pushes):
                r.pencil.close_transfer(transfer, ok=False)
            await settle()
            account = await r.engine.accounting()
            assert account["mismatch"] == [] and account["idle"], account
            await r.assert_idle()
    assert hits > 400


def test_nobody_waits_for_what_was_found_elsewhere_in_the_meantime() -> None:
    s, prompt = scheduler(num_blocks=64), list(range(100, 109))
    talking = enter(s, prompt[:2], 12)
    prefill(s, talking, 102)
    s.start_decode(talking, TokenOutput(102))
    for token in range(103, 109):
        run(s, next_plan(s), token)
    short, waiting = enter(s, [1, 2, 3, 4, 5], 1), enter(s, prompt, 1)
    for seq in (short, waiting):
        s.start_prefill(seq, None)
    plan = next_plan(s)
    assert [g.slot for g in plan.segments] == [short.slot], "three tokens are left of the budget, no block"
    s.release(talking)  # what it said is how the other one begins
    run(s, plan, 30)
    plan = next_plan(s)
    assert [(g.slot, g.start) for g in plan.segments] == [(waiting.slot, 4)]
    run(s, plan, 30)
    leave(s, waiting)
    s.room.prefixes.flush()
    again = enter(s, prompt, 1)
    assert prefill(s, again)[0] == (0, 8)
