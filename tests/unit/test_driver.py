"""The engine's verbs on a pencil-and-paper executor: tokens, limits, cancelling at every moment, loss, accounts."""

from __future__ import annotations

import asyncio
import io
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise

import pytest

from longcat_pd import log
from longcat_pd.config.schema import ParallelConfig
from longcat_pd.engine.driver import Engine
from longcat_pd.engine.request import FinishReason, Request, TokenOutput
from longcat_pd.errors import DeadlineExceeded, EngineFault, InvalidRequest, Overloaded, RankLost, WorkerUnavailable
from longcat_pd.metrics import Metrics
from tests.manual_clock import ManualClock, settle
from tests.unit.engine_rig import Rig, engine_config, ids, request, rig
from tests.unit.pencil import Pencil


async def test_tokens_and_the_reasons_to_stop() -> None:
    async with rig() as r:
        length = await r.answer(request([5, 6, 7], 3))
        assert ids(length) == [8, 9, 10]
        assert length[-1].finish is FinishReason.LENGTH and not any(d.finish for d in length[:-1])
        eos = await r.answer(request([17], 9))
        assert ids(eos) == [18, 19, 20]
        assert (eos[-1].finish, eos[-1].matched_stop_token) == (FinishReason.STOP, None)
        ignored = await r.answer(request([17], 4, ignore_eos=True))
        assert ids(ignored) == [18, 19, 20, 21] and ignored[-1].finish is FinishReason.LENGTH
        stop = await r.answer(request([30], 9, stop_token_ids=(33,), ignore_eos=True))
        assert ids(stop) == [31, 32, 33]
        assert (stop[-1].finish, stop[-1].matched_stop_token) == (FinishReason.STOP, 33)
        last_is_stop = await r.answer(request([18], 2))
        assert last_is_stop[-1].finish is FinishReason.STOP
        one = await r.answer(request([1], 1))
        assert ids(one) == [2] and one[-1].finish is FinishReason.LENGTH
        await r.assert_idle()


@pytest.mark.parametrize("last", [8, 9, 11])
async def test_an_answer_beyond_its_grammar_ends_alone(last: int) -> None:
    """With the first token and with later ones, while another one goes on; what the ranks' fault came with is no token."""
    async with rig() as r:
        r.pencil.beyond_grammar = {last}
        other = asyncio.create_task(r.answer(request([50], 12)))
        seen = list[int]()
        with pytest.raises(InvalidRequest, match="cannot be followed any further: too many states") as error:
            async with r.engine.reserve(request([7], 9, grammar="start:"), 10) as seq:
                first = await r.engine.prefill(seq)
                async with aclosing(r.engine.decode(seq, first)) as deltas:
                    async for delta in deltas:
                        seen += [token.token_id for token in delta.tokens]
        assert error.value.status == 400 and seen == list(range(8, last))
        assert ids(await other) == list(range(51, 63))
        r.pencil.beyond_grammar = set()
        assert ids(await r.answer(request([7], 3))) == [8, 9, 10]
        await r.assert_idle()


async def test_what_the_ranks_allocated_is_told_once_and_by_rank_to_who_asks() -> None:
    out = io.StringIO()
    log.set_up(level="debug", stream=out)
    async with rig(parallel=ParallelConfig(kvp_size=2, attn_tp_size=2)) as r:
        assert [dict(rank.memory) for rank in r.engine.ready] == [
            {"weights": 100, "n-gram tables": 7},
            {"weights": 200, "n-gram tables": 7},
        ]
    log.set_up(stream=io.StringIO())
    (summary,) = [line for line in out.getvalue().splitlines() if "memory_allocated" in line]
    assert " info " in summary and "max_bytes=207 rank=1 all_bytes=314" in summary
    (first, second) = [line for line in out.getvalue().splitlines() if "rank_memory" in line]
    assert " debug " in first and "rank=0 weights=100 n_gram_tables=7" in first and "rank=1 weights=200" in second


async def test_many_at_once_answer_as_if_alone() -> None:
    async with rig(max_queued_requests=64) as r:
        asked = [request(list(range(100 * i, 100 * i + n)), 5) for i, n in enumerate((1, 3, 4, 5, 8, 9, 20, 31, 2, 17), 1)]
        answers = await asyncio.gather(*(r.answer(a) for a in asked))
        for a, deltas in zip(asked, answers, strict=True):
            last = a.prompt_token_ids[-1]
            assert ids(deltas) == [last + k for k in range(1, 6)]
        decode_sizes = [len(p.segments) for p in r.pencil.plans if p.phase == "decode" and p.segments]
        assert max(decode_sizes) > 1, "rows are batched"
        await r.assert_idle()


async def test_timings_come_from_the_life_events() -> None:
    async with rig(auto=False) as r:
        asked = request([5], 2)
        task = asyncio.create_task(r.answer(asked))
        assert asked.life.hop == "queued"
        await r.clock.advance(0.5)
        assert asked.life.hop == "prefilling"
        r.pencil.step()
        await r.clock.advance(0.25)
        assert asked.life.hop == "decoding"
        r.pencil.step()
        await task
        assert asked.life.timings_ms() == {
            "queue": 0.0, "prefill": 500.0, "first_token": 500.0, "decode": 250.0, "total": 750.0,
        }  # fmt: skip


async def test_a_full_house_refuses_in_time_and_serves_in_order() -> None:
    async with rig(auto=False, max_num_seqs=1, max_queued_requests=2) as r:
        running = asyncio.create_task(r.answer(request([5], 2)))
        await settle()
        served: list[str] = []

        async def wait_in_line(name: str) -> None:
            async with r.engine.reserve(request([5], name=name), 8):
                served.append(name)

        lines = [asyncio.create_task(wait_in_line(n)) for n in ("a", "b")]
        await settle()
        with pytest.raises(Overloaded, match="2 requests are waiting"):
            await r.answer(request([9]))
        r.pencil.step()
        await settle()
        r.pencil.step()
        await settle()
        assert ids(await running) == [6, 7]
        await asyncio.gather(*lines)
        assert served == ["a", "b"]
        await r.assert_idle()


async def test_no_room_within_the_queue_time_is_overloaded() -> None:
    async with rig(auto=False, max_num_seqs=1, queue_timeout_s=60.0) as r:
        running = asyncio.create_task(r.answer(request([5], 2)))
        await settle()
        waiting = asyncio.create_task(r.answer(request([9])))
        await r.clock.advance(59.0)
        assert not waiting.done()
        await r.clock.advance(1.5)
        with pytest.raises(Overloaded) as refused:
            await waiting
        assert 1 <= (refused.value.retry_after_s or 0) <= 30
        running.cancel()
        await settle()
        await r.assert_idle()


async def test_a_patient_request_waits_until_its_deadline() -> None:
    async with rig(auto=False, max_num_seqs=1, queue_timeout_s=60.0) as r:
        running = asyncio.create_task(r.answer(request([5], 2)))
        await settle()
        waiting = asyncio.create_task(r.answer(replace(request([9], deadline=r.clock.now() + 90.0), is_patient=True)))
        await r.clock.advance(80.0)
        assert not waiting.done()
        await r.clock.advance(11.0)
        with pytest.raises(DeadlineExceeded):
            await waiting
        running.cancel()
        await settle()
        await r.assert_idle()


async def test_a_large_request_is_not_starved_by_small_ones() -> None:
    async with rig(num_blocks=17, max_num_seqs=4, max_queued_requests=64) as r:
        order: list[str] = []

        async def ask(name: str, num_tokens: int) -> None:
            async with r.engine.reserve(request([5], name=name), num_tokens):
                order.append(name)
                await r.clock.sleep(1.0)

        tasks = [asyncio.create_task(ask("small", 8)) for _ in range(2)]
        tasks.append(asyncio.create_task(ask("large", 60)))
        tasks += [asyncio.create_task(ask("late", 8)) for _ in range(8)]
        await settle()
        assert order == ["small", "small"], "the ones behind the large one wait with it"
        await r.clock.advance(1.0)
        assert order == ["small", "small", "large"]
        await r.clock.advance(10.0)
        await asyncio.gather(*tasks)
        assert order[3:] == ["late"] * 8
        await r.assert_idle()


async def test_what_can_never_fit_is_the_clients_error() -> None:
    async with rig(num_blocks=9) as r:
        with pytest.raises(InvalidRequest) as refused:
            await r.answer(request([5] * 30, 10))
        assert refused.value.code == "context_length_exceeded"
        await r.assert_idle()


def ends_everywhere() -> list[tuple[Request, list[int]]]:
    """Every kind of end at every place of a run and behind it, and what is to be said. The pencil counts on from 9."""
    found = []
    for count in range(1, 11):
        said = list(range(10, 10 + count))
        found.append((request([9] * count, count, ignore_eos=True), said))
        found.append((request([19 - count], 30), list(range(20 - count, 21))))
        found.append((request([9], 30, stop_token_ids=(9 + count,), ignore_eos=True), said))
    return found


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
async def test_every_end_with_a_step_ahead_is_that_without(accepted: int) -> None:
    """One after the other and all at once; figures of drafts do not tell either how far the driver was ahead."""
    figures = []
    for decode_plans, max_num_seqs in ((1, 1), (1, 4), (2, 1), (2, 4)):
        sizes = {"num_draft_tokens": 3, "max_num_seqs": max_num_seqs, "max_queued_requests": 64, "num_blocks": 65}
        async with rig(decode_plans=decode_plans, **sizes) as r:
            r.pencil.accepted = accepted
            asked = ends_everywhere()
            answers = await asyncio.gather(*(r.answer(a) for a, _ in asked))
            for (a, said), deltas in zip(asked, answers, strict=True):
                assert ids(deltas) == said and deltas[-1].finish is not None, a
            await r.assert_idle()
            text = r.metrics.render().decode()
            counts = re.findall(r"longcat_pd_(?:draft|accepted)_tokens_total{.*} (.*)", text)
            figures.append((r.engine.acceptance.mean(), counts))
            steps = [p for p in r.pencil.plans if p.phase == "decode" and p.segments]
            assert decode_plans == 1 or any(b.step_id == a.step_id + 1 for a, b in pairwise(steps))
    assert figures[0][0] is not None and all(f == figures[0] for f in figures)


async def test_the_face_stops_with_steps_in_flight_and_the_next_one_has_the_slot() -> None:
    async with rig(auto=False, max_num_seqs=1) as r:

        async def until_stopped() -> list[int]:
            async with r.engine.reserve(request([30], 20), 21) as seq:
                first = await r.engine.prefill(seq)
                async with aclosing(r.engine.decode(seq, first)) as deltas:
                    said: list[int] = []
                    async for delta in deltas:
                        said += [t.token_id for t in delta.tokens]
                        if 32 in said:
                            return said
            raise AssertionError("no end")

        stopped, follower = asyncio.create_task(until_stopped()), asyncio.create_task(r.answer(request([50], 3)))
        await settle()
        r.pencil.step()
        await settle()
        assert [p.phase for p, _ in r.pencil.waiting] == ["decode", "decode"] and not stopped.done()
        r.pencil.step()
        await settle()
        assert stopped.result() == [31, 32]
        late = [(len(p.segments), p.retire) for p, _ in r.pencil.waiting]
        assert late == [(1, ()), (1, ()), (0, (0,))], "two late steps, then the plan that retires"
        r.pencil.auto = True
        while r.pencil.waiting:
            r.pencil.step()
        assert ids(await follower) == [51, 52, 53]
        await r.assert_idle()


async def test_closing_and_loss_with_steps_in_flight_end_everything() -> None:
    for is_lost in (True, False):
        async with rig(auto=False) as r:
            task = asyncio.create_task(r.answer(request([30], 9)))
            await settle()
            r.pencil.step()
            await settle()
            assert [len(p.segments) for p, _ in r.pencil.waiting] == [1, 1]
            if is_lost:
                r.pencil.lose(RankLost("rank 0 ended with status -9"))
            else:
                await r.engine.close()
            with pytest.raises(RankLost if is_lost else WorkerUnavailable):
                await task


async def test_the_longest_wait_of_a_rank_is_what_counts() -> None:
    async with rig(auto=False, parallel=ParallelConfig(kvp_size=2)) as r:
        task = asyncio.create_task(r.answer(request([5], 2)))
        await settle()
        r.pencil.step()
        await settle()
        r.pencil.durations_ms = {0: (1.0, 8.0), 1: (2.0, 6.0)}
        r.pencil.step()
        await task
        text = r.metrics.render().decode()
        assert 'step_wait_seconds_sum{instance="s0",role="standalone"} 0.002' in text
        assert 'step_compute_seconds_sum{instance="s0",role="standalone"} 0.006' in text


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
async def test_the_deadline_ends_a_request_in_every_phase(num_steps: int) -> None:
    async with rig(auto=False) as r:
        task = asyncio.create_task(r.answer(request(list(range(40, 52)), 9, deadline=r.clock.now() + 5.0)))
        await settle()
        for _ in range(num_steps):
            r.pencil.step()
            await settle()
        await r.clock.advance(4.9)
        assert not task.done()
        await r.clock.advance(0.2)
        with pytest.raises(DeadlineExceeded):
            await task
        await r.assert_idle()


async def _standalone(r: Rig) -> None:
    await r.answer(request(list(range(40, 60)), 4))


async def _prefill_role(r: Rig) -> None:
    acknowledged = asyncio.Event()
    task = asyncio.create_task(r.prefill(request(list(range(40, 60))), "t", acknowledged))
    try:
        while "t" not in r.pencil.pushes:
            await settle(1)
        for rank in range(r.pencil.parallel.world_size):
            await asyncio.sleep(0)
            r.pencil.close_transfer("t", ranks=range(rank, rank + 1))
        acknowledged.set()
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _decode_role(r: Rig) -> None:
    task = asyncio.create_task(r.receive(request(list(range(40, 60)), 4), "t", TokenOutput(60)))
    try:
        while "t" not in r.pencil.arrivals:
            await settle(1)
        r.pencil.close_transfer("t")
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("role", [_standalone, _prefill_role, _decode_role])
@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(pp_size=2, cp_size=2), ParallelConfig(kvp_size=3)])
async def test_cancelled_at_every_turn_of_the_loop_all_blocks_come_back(
    role: Callable[[Rig], asyncio.Future[None]], parallel: ParallelConfig
) -> None:
    """After k turns of the event loop, for every k until the request has ended by itself."""
    for turns in range(400):
        async with rig(parallel=parallel) as r:
            other = asyncio.create_task(r.answer(request([70, 71], 3)))
            task = asyncio.create_task(role(r))
            for _ in range(turns):
                await asyncio.sleep(0)
            was_done = task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert ids(await other) == [72, 73, 74]
            await settle()
            for transfer in list(r.pencil.pushes):
                r.pencil.close_transfer(transfer, ok=False)
            await r.assert_idle()
            if was_done:
                assert turns > 10
                return
    pytest.fail("the request never ended")


async def test_cancel_and_last_token_in_one_turn() -> None:
    for cancel_first in (True, False):
        async with rig(auto=False) as r:
            task = asyncio.create_task(r.answer(request([5], 1)))
            await settle()
            if cancel_first:
                task.cancel()
                r.pencil.step()
            else:
                r.pencil.step()
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await r.assert_idle()


async def test_blocks_of_an_unfinished_push_are_nobodys_until_all_ranks_are_quiet() -> None:
    async with rig(num_blocks=6, parallel=ParallelConfig(pp_size=2)) as r:
        task = asyncio.create_task(r.prefill(request([5] * 20), "t", asyncio.Event()))
        await settle()
        task.cancel()
        await settle()
        assert any("t" in p.cancel_push for p in r.pencil.plans)
        follower = asyncio.create_task(r.answer(request([9], 2)))
        await settle()
        assert not follower.done(), "its blocks are in quarantine"
        assert (await r.engine.accounting())["mismatch"] == []
        r.pencil.close_transfer("t", ok=False, ranks=range(1))
        await settle()
        assert not follower.done(), "one rank is not quiet yet"
        r.pencil.close_transfer("t", ok=False, ranks=range(1, 2))
        assert ids(await follower) == [10, 11]
        await r.assert_idle()


async def test_a_push_that_the_ranks_never_heard_of_needs_no_quarantine() -> None:
    async with rig(auto=False, max_num_batched_tokens=4) as r:
        first = asyncio.create_task(r.answer(request([5] * 8, 1)))
        await settle()
        task = asyncio.create_task(r.prefill(request([5] * 8), "t", asyncio.Event()))
        await settle()
        task.cancel()
        await settle()
        first.cancel()
        await settle()
        await r.assert_idle()
        assert all(not p.cancel_push for p in r.pencil.plans)


async def test_a_decode_side_that_is_over_with_the_first_token_never_admits() -> None:
    async with rig() as r:
        task = asyncio.create_task(r.receive(request([18, 19], 9), "t", TokenOutput(20)))
        await settle()
        r.pencil.close_transfer("t")
        deltas = await task
        assert ids(deltas) == [20] and deltas[-1].finish is FinishReason.STOP
        assert not any(p.admit for p in r.pencil.plans)
        await r.assert_idle()


async def test_one_failed_rank_is_enough_to_know_that_a_transfer_failed() -> None:
    async with rig(parallel=ParallelConfig(kvp_size=3)) as r:
        task = asyncio.create_task(r.receive(request([5, 6]), "t", TokenOutput(7)))
        await settle()
        r.pencil.close_transfer("t", ok=False, ranks=range(1, 2))
        with pytest.raises(AssertionError, match="ok=False"):
            await task
        await r.assert_idle()


async def test_a_lost_rank_ends_every_request_with_the_cause() -> None:
    async with rig(auto=False, max_num_seqs=2) as r:
        tasks = [asyncio.create_task(r.receive(request([5], 2), "t", TokenOutput(6)))]
        tasks += [asyncio.create_task(r.answer(request([5], 2))) for _ in range(3)]
        await settle()
        r.pencil.lose(RankLost("rank 0 ended with status -9"))
        await settle()
        assert all(isinstance(task.exception(), RankLost) for task in tasks), "waiting, transferring, computing"
        with pytest.raises(RankLost):
            await r.answer(request([5]))
        with pytest.raises(RankLost):
            await asyncio.wait_for(r.engine.failed(), 30.0)
        health = r.engine.health()
        assert health.is_lost and health.reasons[0]["code"] == "rank_lost"


async def test_while_machines_are_waited_for_they_are_named() -> None:
    config, parallel, clock = engine_config(), ParallelConfig(kvp_size=4), ManualClock()
    pencil = Pencil(config, parallel, True, absent={2: "node 1 (h1) of d0", 3: "node 1 (h1) of d0"})
    metrics = Metrics(role="decode", instance="d0")
    engine = Engine(config, parallel, executor=pencil, eos_token_ids=frozenset({20}), clock=clock, metrics=metrics)
    assert [reason["detail"] for reason in engine.health().reasons] == ["waits for node 1 (h1) of d0"]
    pencil.absent.clear()
    assert [reason["detail"] for reason in engine.health().reasons] == ["the ranks are not ready yet"]


async def test_a_defect_ends_every_request_and_shows_no_inside() -> None:
    async with rig(auto=False) as r:
        r.pencil.fault_at = 1
        task = asyncio.create_task(r.answer(request([5], 2)))
        await settle()
        r.pencil.step()
        with pytest.raises(EngineFault) as fault:
            await task
        assert "pencil" not in fault.value.message
        assert r.engine.health().is_lost


async def test_closing_ends_what_is_open_as_draining() -> None:
    async with rig(auto=False) as r:
        task = asyncio.create_task(r.answer(request([5], 2)))
        await settle()
        await r.engine.close()
        with pytest.raises(WorkerUnavailable) as gone:
            await task
        assert gone.value.code == "draining" and r.pencil.is_closed
        assert not r.engine.health().is_lost


async def test_accounts_show_what_is_held_and_what_differs() -> None:
    async with rig(auto=False, parallel=ParallelConfig(kvp_size=2)) as r:
        task = asyncio.create_task(r.answer(request([5] * 9, 3)))
        await settle()
        r.pencil.step()
        await settle()
        r.pencil.miscount = {1: -1}
        asking = asyncio.create_task(r.engine.accounting(transfers=1, request_sockets=2))
        await settle()
        r.pencil.step()
        r.pencil.step()
        account = await asking
        assert account["driver"] == {
            "requests_waiting": 0, "requests_running": 1, "transfers": 1, "request_sockets": 2,
        }  # fmt: skip
        assert not account["idle"]
        assert account["mismatch"] == ["rank 1: blocks.live is 0, the driver says 1"]
        assert account["ranks"][0]["blocks"]["live"] == 2
        assert account["outstanding"] == 1 + 1 + 2 + 2 + 2
        task.cancel()
        await settle()


async def test_ranks_that_do_not_answer_in_two_seconds_are_shown_as_last_heard() -> None:
    async with rig(auto=False) as r:
        r.pencil.silent = {0}
        asking = asyncio.create_task(r.engine.accounting())
        await r.clock.advance(1.9)
        assert not asking.done()
        await r.clock.advance(0.2)
        account = await asking
        assert not account["idle"] and account["ranks"][0]["silent"]
        assert r.engine.health().reasons[0] == {"code": "rank_silent", "detail": "no heartbeat for 0.0 s", "rank": 0}


async def test_gauges_follow_the_room() -> None:
    async with rig(auto=False) as r:
        task = asyncio.create_task(r.answer(request([5] * 6, 3)))
        await settle()
        text = r.metrics.render().decode()
        assert 'longcat_pd_sequences{instance="s0",role="standalone",state="running"} 1.0' in text
        assert 'longcat_pd_blocks{instance="s0",role="standalone",state="live"} 3.0' in text
        assert 'longcat_pd_slots{instance="s0",role="standalone",state="free"} 3.0' in text
        task.cancel()
        await settle()


def test_a_driver_knows_no_torch() -> None:
    code = "import sys; import longcat_pd.engine.driver; import longcat_pd.server.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
