"""Both roles on pencils, joined by control sockets in memory: a hand-over in every phase, and everything that ends one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from longcat_pd.errors import DeadlineExceeded, LongcatError, Overloaded, TransferFailed, WorkerUnavailable
from longcat_pd.faults import Fault
from longcat_pd.kv_transfer.control import CONTROL
from longcat_pd.kv_transfer.messages import Abort, Commit, DraftState, Grant, Offer, Refuse
from tests.manual_clock import settle
from tests.unit.control_rig import Leg, Pair, hello, pair


def outcome(p: Pair, side: str, name: str) -> float:
    metrics = p.p_metrics if side == "p" else p.d_metrics
    value: float = metrics.transfers.transfers_total(name)._value.get()
    return value


async def to_granted(p: Pair, leg: Leg) -> None:
    """Offered and granted; P's prefill plan waits on its pencil."""
    p.p_pencil.auto = p.d_pencil.auto = False
    leg.send()
    await settle()
    while p.d_pencil.waiting:
        p.d_pencil.step()
    await settle()
    assert any(isinstance(m, Grant) for m in p.router.sent)


async def to_committed(p: Pair, leg: Leg) -> None:
    """The first token is known at D; the lanes are still open."""
    await to_granted(p, leg)
    while p.p_pencil.waiting:
        p.p_pencil.step()
        await settle()
    assert any(isinstance(m, Commit) for m in p.dealer.sent)


async def test_an_answer_goes_over() -> None:
    async with pair() as p:
        assert p.offering.states() == {"d0": "up"}
        assert p.offers.states() == {"p0": "up"}
        leg = p.prefill_leg().send()
        await settle()
        assert leg.tokens == []  # the first token waits for the cache
        p.close_lanes("t")
        assert await leg.ends() == [None, None]
        assert leg.tokens == [6, 7, 8]
        assert leg.finish == "length"
        assert (outcome(p, "p", "committed"), outcome(p, "d", "committed")) == (1, 1)
        await p.assert_idle()


@pytest.mark.parametrize("prompt", [(18, 19), (1, 2)])
async def test_the_first_token_may_be_the_last(prompt: tuple[int, ...]) -> None:
    async with pair() as p:
        leg = p.prefill_leg(prompt=prompt, max_tokens=1 if prompt == (1, 2) else 9).send()
        await settle()
        p.close_lanes("t")
        assert await leg.ends() == [None, None]
        assert (leg.tokens, leg.finish) == (([20], "stop") if prompt == (18, 19) else ([3], "length"))
        assert not any(plan.segments for plan in p.d_pencil.plans)
        await p.assert_idle()


async def test_the_commit_may_overtake_the_cache_and_the_cache_the_commit() -> None:
    async with pair() as p:
        leg = p.prefill_leg()
        await to_committed(p, leg)
        assert leg.tokens == []
        p.d_pencil.auto = True
        p.close_lanes("t")
        assert await leg.ends() == [None, None]
        late = p.prefill_leg("u")
        await to_granted(p, late)
        p.d_pencil.close_transfer("u")
        await settle()
        assert late.tokens == []
        p.p_pencil.auto = p.d_pencil.auto = True
        while p.p_pencil.waiting:
            p.p_pencil.step()
        await settle()
        p.p_pencil.close_transfer("u")
        assert await late.ends() == [None, None]
        assert late.tokens == leg.tokens == [6, 7, 8]
        await p.assert_idle()


@pytest.mark.parametrize("phase", ["queued", "offered", "granted", "committed"])
@pytest.mark.parametrize("who", ["p", "d", "both"])
async def test_a_leg_that_leaves_frees_both_sides(phase: str, who: str) -> None:
    async with pair() as p:
        leg = p.prefill_leg()
        if phase == "granted":
            await to_granted(p, leg)
        elif phase == "committed":
            await to_committed(p, leg)
        else:
            leg.send(d=phase == "queued")
            await settle(0 if phase == "queued" else 60)
        ends = {"p": [leg.p], "d": [leg.d], "both": [leg.p, leg.d]}[who]
        for task in ends:
            if task is not None:
                task.cancel()
        await p.clock.advance(75.0)  # half a pair ends after the pairing time
        for end in await leg.ends():
            assert isinstance(end, asyncio.CancelledError | TransferFailed), end
            if isinstance(end, TransferFailed) and phase in ("granted", "committed"):
                assert end.cause == "peer"
        await p.assert_idle()
        assert p.offering.states() == {"d0": "up"}
        following = p.prefill_leg("next").send()
        await settle()
        p.close_lanes("next")
        assert await following.ends() == [None, None]
        assert following.tokens == [6, 7, 8]


async def test_the_other_leg_ends_at_once() -> None:
    """No time passes: neither side waits for a limit of its own."""
    for first, phase in [("p", to_granted), ("d", to_granted), ("p", to_committed), ("d", to_committed)]:
        async with pair() as p:
            leg = p.prefill_leg()
            await phase(p, leg)
            gone, other = (leg.p, leg.d) if first == "p" else (leg.d, leg.p)
            assert gone is not None and other is not None
            gone.cancel()
            await settle()
            assert other.done()
            await p.assert_idle()


@pytest.mark.parametrize("side", ["p", "d"])
async def test_a_rank_that_gives_up_is_a_failure_of_both(side: str) -> None:
    async with pair() as p:
        leg = p.prefill_leg()
        await to_granted(p, leg)
        pencil = p.p_pencil if side == "p" else p.d_pencil
        pencil.close_transfer("t", ok=False)
        ends = await leg.ends()
        assert all(isinstance(e, TransferFailed) for e in ends), ends
        causes = [e.cause for e in ends if isinstance(e, TransferFailed)]
        assert causes == (["self", "peer"] if side == "p" else ["peer", "self"])
        assert leg.tokens == []
        await p.assert_idle()


@pytest.mark.parametrize("lost", ["Offer", "Grant", "Commit", "Ack"])
async def test_a_lost_record_ends_both_sides(lost: str) -> None:
    async with pair() as p:
        p.switches["d" if lost in ("Grant", "Ack") else "p"].set(Fault(name="drop_record", record=lost))
        leg = p.prefill_leg().send()
        await settle()
        if lost in ("Commit", "Ack"):
            p.close_lanes("t")
        await p.clock.advance(185.0 if lost == "Ack" else 75.0)
        ends = await leg.ends()
        if lost == "Ack":  # D has everything and answers
            assert ends[1] is None
            assert leg.tokens == [6, 7, 8]
            ends = ends[:1]
        assert all(isinstance(e, TransferFailed) for e in ends), ends
        await p.assert_idle()


@pytest.mark.parametrize("only", ["p", "d"])
async def test_half_a_pair(only: str) -> None:
    async with pair() as p:
        leg = p.prefill_leg().send(p=only == "p", d=only == "d")
        await p.clock.advance(9.0)
        assert not (leg.p or leg.d).done()  # type: ignore[union-attr]
        await p.clock.advance(65.0)
        (end,) = await leg.ends()
        assert isinstance(end, TransferFailed)
        assert end.cause == ("peer" if only == "p" else "self")
        await p.assert_idle()
        # the other half comes too late and is told at once
        other = p.prefill_leg().send(p=only != "p", d=only != "d")
        await settle()
        (end,) = await other.ends()
        assert isinstance(end, TransferFailed)
        await p.assert_idle()


async def test_a_full_decode_pool_refuses_and_no_prefill_runs_without_a_grant() -> None:
    async with pair(num_blocks=5, queue_timeout_s=2.0) as p:
        first = p.prefill_leg("a", prompt=tuple(range(1, 9)), max_tokens=8).send()  # all four blocks
        await settle()
        p.close_lanes("a")
        p.d_pencil.auto = False  # it decodes for ever
        await settle()
        plans = len(p.p_pencil.plans)
        second = p.prefill_leg("b").send()
        await settle()
        assert len(p.p_pencil.plans) == plans
        await p.clock.advance(2.1)
        ends = await second.ends()
        assert all(isinstance(e, Overloaded) for e in ends), ends
        assert [e.cause for e in ends if isinstance(e, Overloaded)] == ["peer", "load"]  # what P says is D's answer
        assert any(isinstance(m, Refuse) for m in p.router.sent)
        p.d_pencil.auto = True
        while p.d_pencil.waiting:
            p.d_pencil.step()
        assert await first.ends() == [None, None]
        await p.assert_idle()


async def test_a_deadline_ends_both() -> None:
    async with pair() as p:
        leg = p.prefill_leg()
        p.p_pencil.auto = p.d_pencil.auto = False
        leg.send(deadline=p.clock.now() + 3.0)
        await settle()
        await p.clock.advance(3.1)
        ends = await leg.ends()
        assert any(isinstance(e, DeadlineExceeded) for e in ends), ends
        assert all(isinstance(e, LongcatError) for e in ends)
        await p.assert_idle()


async def test_slow_is_not_dead() -> None:
    async with pair() as p:
        leg = p.prefill_leg()
        await to_granted(p, leg)
        await p.clock.advance(600.0)  # one step takes ten minutes; heartbeats go on
        p.p_pencil.auto = p.d_pencil.auto = True
        while p.p_pencil.waiting:
            p.p_pencil.step()
        await settle()
        p.close_lanes("t")
        assert await leg.ends() == [None, None]
        assert leg.tokens == [6, 7, 8]


@pytest.mark.parametrize("deaf", ["p", "d"])
async def test_silence_ends_transfers_on_both_sides(deaf: str) -> None:
    async with pair() as p:
        leg = p.prefill_leg()
        await to_granted(p, leg)
        (p.router if deaf == "p" else p.dealer).is_cut = True  # one direction is enough
        await p.clock.advance(7.0)
        ends = await leg.ends()
        assert all(isinstance(e, TransferFailed) and e.cause == "peer" for e in ends), ends
        assert "down" in (p.offering.states()["d0"], p.offers.states()["p0"])
        refused = p.prefill_leg("u").send(d=deaf == "d", p=deaf == "p")
        assert all(isinstance(e, TransferFailed) for e in await refused.ends())
        (p.router if deaf == "p" else p.dealer).is_cut = False
        await p.clock.advance(2.0)
        assert (p.offering.states(), p.offers.states()) == ({"d0": "up"}, {"p0": "up"})
        await p.assert_idle()
        following = p.prefill_leg("v").send()
        await settle()
        p.close_lanes("v")
        assert await following.ends() == [None, None]


async def test_another_life_voids_the_transfers_of_the_old_one() -> None:
    async with pair() as p:
        leg = p.prefill_leg()
        await to_granted(p, leg)
        p.tasks[1].cancel()
        assert leg.p is not None
        leg.p.cancel()
        p.dealer.is_cut = True
        p.start_prefill(hello("p0", "prefill", incarnation="p0-second-life"))
        p.tasks.append(asyncio.ensure_future(p.offering.run()))
        await settle()
        end = (await leg.ends())[1]
        assert isinstance(end, TransferFailed)
        assert end.cause == "peer"
        assert outcome(p, "d", "peer_lost") == 1
        await p.assert_idle()
        following = p.prefill_leg("u").send()
        await settle()
        p.close_lanes("u")
        assert await following.ends() == [None, None]
        assert following.tokens == [6, 7, 8]


async def test_the_link_returns_after_another_process_took_the_name() -> None:
    async with pair() as p:
        impostor = p.router.dealer(b"impostor")
        impostor.send(CONTROL.encode(replace(p.p_hello, incarnation="other")))
        await settle()
        assert p.router.sent[-1] == p.d_hello
        await p.clock.advance(2.0)  # it is gone again; the beats of the right one are not known any more
        assert p.offers.states() == {"p0": "up"}
        leg = p.prefill_leg().send()
        await settle()
        p.close_lanes("t")
        assert await leg.ends() == [None, None]
        greetings = len([m for m in p.dealer.sent if m == p.p_hello])
        await p.clock.advance(5.0)
        assert len([m for m in p.dealer.sent if m == p.p_hello]) == greetings, "one greeting is enough"


async def test_unknown_peers_and_other_roles() -> None:
    async with pair() as p:
        offer = Offer(transfer_id="x", request_id="r", incarnation="i", token_ids=b"", max_tokens=1, seed=0, deadline_ms=1)
        with pytest.raises(WorkerUnavailable):
            async with p.offering.offer(offer, peer="d9", deadline=1e9):
                raise AssertionError
        with pytest.raises(WorkerUnavailable):
            await p.offers.expect("x", peer="p9", deadline=1e9)


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"wire_version": 2}, ("wire_version", "1", "2")),
        ({"model_digest": "other"}, ("model_digest", "m", "other")),
        ({"tokenizer_digest": "other"}, ("tokenizer_digest", "t", "other")),
        ({"block_size": 8}, ("block_size", "4", "8")),
        (
            {"cache_entries": (("latent.0", 9, "float32"),)},
            ("cache_entries", "latent.0 8 x float32", "latent.0 9 x float32"),
        ),
        ({"digest_mode": "all"}, ("digest_mode", "off", "all")),
        ({"num_draft_tokens": 3}, ("num_draft_tokens", "0", "3")),
        ({"max_model_len": 63}, ("max_model_len", "64", "63")),
        ({"layers_per_stage": (7,)}, ("layers_per_stage", "(1,)", "(7,)")),
        ({"device": "npu"}, ("device", "cpu", "npu")),
        ({"lane_port": 70000}, ("lane_port", "7", "70000")),
        ({"pairs_within_s": float("nan")}, ("pairs_within_s", "70.0", "nan")),
        ({"acks_within_s": float("inf")}, ("acks_within_s", "180.0", "inf")),
    ],
)
async def test_pools_that_do_not_match_refuse_each_other(changes: dict[str, object], shown: tuple[str, str, str]) -> None:
    async with pair(decode=hello("d0", "decode", **changes)) as p:
        assert (p.offering.states(), p.offers.states()) == ({"d0": "mismatch"}, {"p0": "mismatch"})
        for link in (*p.offering.links(), *p.offers.links()):
            assert [(m.field, m.prefill, m.decode) for m in link.mismatch] == [shown]
        ends = await p.prefill_leg().send().ends()
        assert all(isinstance(e, TransferFailed) for e in ends)
        await p.assert_idle()


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (None, "lacks what drafts start from"),
        (DraftState(hidden=bytes(8), dtype="float16"), "8 bytes of float16 for drafts to start from, 2 numbers are needed"),
        (DraftState(hidden=bytes(8), dtype="bfloat16"), "8 bytes of bfloat16"),
        (DraftState(hidden=bytes(3), dtype="float32"), "3 bytes of float32"),
        (DraftState(hidden=b"", dtype="float32"), "0 bytes of float32"),
    ],
    ids=str,
)
async def test_a_commit_that_drafts_cannot_start_from_ends_the_transfer(state: DraftState | None, told: str) -> None:
    sides = {"prefill": hello("p0", "prefill", num_draft_tokens=3), "decode": hello("d0", "decode", num_draft_tokens=3)}
    async with pair(**sides) as p:
        p.switches["p"].set(Fault(name="drop_record", record="Commit"))
        leg = p.prefill_leg().send()
        await settle()
        p.close_lanes("t")
        await settle()
        commit = Commit(transfer_id="t", token_id=6, logprob=None, top=(), draft_state=state)
        p.router.inbox.put_nowait([p.p_hello.incarnation.encode(), *CONTROL.encode(commit)])
        ends = await leg.ends()
        assert all(isinstance(e, TransferFailed) for e in ends) and any(told in str(e) for e in ends), ends
        assert not any(admit.arrival for plan in p.d_pencil.plans for admit in plan.admit)
        await p.assert_idle()


async def test_another_instance_at_the_address_of_a_peer_is_no_peer() -> None:
    async with pair(decode=hello("d9", "decode")) as p:
        assert p.offering.states() == {"d0": "mismatch"}
        (link,) = p.offering.links()
        assert [(m.field, m.prefill, m.decode) for m in link.mismatch] == [("name", "d0", "d9")]
        (end,) = await p.prefill_leg().send(d=False).ends()
        assert isinstance(end, TransferFailed) and "the link to d0 is mismatch" in str(end)


async def test_each_side_waits_as_long_as_the_other_says() -> None:
    async with pair(decode=hello("d0", "decode", pairs_within_s=130.0)) as p:
        leg = p.prefill_leg().send(d=False)  # D's leg is late, and stands in a line for long
        p.switches["d"].set(Fault(name="drop_record", record="Grant"))
        await settle()
        p.prefill_leg().send(p=False)
        await p.clock.advance(130.5)
        assert leg.p is not None and not leg.p.done()
        await p.clock.advance(1.0)
        (end,) = await leg.ends()
        assert "no answer to the offer of d0 within 131 s" in str(end)
        await p.assert_idle()
    async with pair(prefill=hello("p0", "prefill", pairs_within_s=130.0)) as p:
        leg = p.prefill_leg().send(p=False)
        await p.clock.advance(129.5)
        assert leg.d is not None and not leg.d.done()
        await p.clock.advance(1.0)
        (end,) = await leg.ends()
        assert "no offer of p0 within 130 s" in str(end)
        await p.assert_idle()


async def test_a_later_choice_waits_at_both_sides_for_the_room_of_the_first() -> None:
    """P has room for one prompt, whose prefill takes long: the offer of the next one comes late, and nobody is blamed."""
    async with pair(max_num_seqs=4, num_blocks=5, max_model_len=16) as p:
        p.p_pencil.auto = False
        prompt = tuple(range(1, 13))
        first = p.prefill_leg("t.0", prompt=prompt).send()
        await settle()
        assert any(isinstance(m, Grant) for m in p.router.sent)
        second = p.prefill_leg("t.1", prompt=prompt, is_patient=True).send()
        await p.clock.advance(200.0)
        assert not any(t.done() for leg in (first, second) for t in (leg.p, leg.d) if t is not None)
        p.p_pencil.auto = True
        while p.p_pencil.waiting:
            p.p_pencil.step()
        for leg, name in ((first, "t.0"), (second, "t.1")):
            await settle()
            p.close_lanes(name)
            assert await leg.ends() == [None, None]
        await p.assert_idle()


async def test_a_step_that_is_slow_does_not_lose_the_acknowledgement() -> None:
    """D's ranks hear of an arrival between steps. P has sent everything and waits, as long as such a step may take."""
    async with pair() as p:
        other = p.prefill_leg("a", max_tokens=9).send()
        await settle()
        p.d_pencil.auto = False
        p.close_lanes("a")
        await settle()
        while not any(plan.segments for plan, _ in p.d_pencil.waiting):
            p.d_pencil.step()
            await settle()
        leg = p.prefill_leg().send()
        await settle()
        p.p_pencil.close_transfer("t")
        await p.clock.advance(110.0)
        assert leg.p is not None and not leg.p.done()
        p.d_pencil.auto = True
        while p.d_pencil.waiting:
            p.d_pencil.step()
        await settle()
        p.d_pencil.close_transfer("t")
        assert await leg.ends() == [None, None] and await other.ends() == [None, None]
        await p.assert_idle()


async def test_a_longer_decode_side_and_another_version_fit() -> None:
    async with pair(decode=hello("d0", "decode", max_model_len=65, code_version="9")) as p:
        assert p.offering.states() == {"d0": "up"}


async def test_an_abort_of_a_transfer_that_nobody_has_met_is_remembered() -> None:
    async with pair() as p:
        p.offering._peers["d0"].send(Abort(transfer_id="t", reason="over"))
        await settle()
        leg = p.prefill_leg().send(p=False)
        (end,) = await leg.ends()
        assert isinstance(end, TransferFailed)


async def test_rubbish_on_the_control_socket_disturbs_nobody() -> None:
    async with pair() as p:
        p.router.inbox.put_nowait([b"x", b"Nonsense", b"\x00"])
        p.dealer.inbox.put_nowait([b"Hello", b"\xc1"])
        leg = p.prefill_leg().send()
        await settle()
        p.close_lanes("t")
        assert await leg.ends() == [None, None]
