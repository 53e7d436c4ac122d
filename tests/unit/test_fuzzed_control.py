"""Records on the control sockets of both drivers that nobody sent in good faith: refused and logged, and nothing dies.

Random, cut, altered, repeated, out of order, of a former life, and of strangers, while an answer is being handed over. The
sockets of a cluster with a key let strangers not even speak (tests/integration/test_curve.py).
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from longcat_pd import log
from longcat_pd.errors import TransferFailed
from longcat_pd.faults import Fault
from longcat_pd.kv_transfer.control import CONTROL
from longcat_pd.kv_transfer.messages import Abort, Ack, Beat, Commit, DraftState, Grant, Offer, Refuse
from longcat_pd.wire import pack
from tests.manual_clock import settle
from tests.unit.control_rig import Pair, hello, pair

TAGS = [b"Hello", b"Beat", b"Offer", b"Grant", b"Refuse", b"Commit", b"Ack", b"Abort"]
WHOLE = [0, -1, 1 << 63, -(1 << 63)]
VALUES: list[Any] = [None, True, *WHOLE, 1.5, float("nan"), "", "d0", "x" * 4096, b"", b"\0\1\2", [], {}, [[1, 2.0]]]


def truthful(transfer: str) -> list[Any]:
    """One of each record, of a transfer that is not open."""
    return [
        Beat(name="p0", incarnation="p0-life"),
        Offer(
            transfer_id=transfer, request_id="r", incarnation="p0-life", token_ids=b"\1\0\0\0", max_tokens=1, seed=1,
            deadline_ms=5000,
        ),
        Grant(transfer_id=transfer, incarnation="d0-life", group=0, blocks=b"\1\0\0\0", split_start=0, generation=1),
        Refuse(transfer_id=transfer, code="overloaded", message="m"),
        Commit(transfer_id=transfer, token_id=1, logprob=None, top=()),
        Ack(transfer_id=transfer),
        Abort(transfer_id=transfer, reason="r"),
    ]  # fmt: skip


def wild(pick: random.Random) -> Iterator[list[bytes]]:
    """Frames without an end."""
    while True:
        kind = pick.randrange(5)
        record = CONTROL.encode(pick.choice(truthful(f"t{pick.randrange(1 << 30)}")))
        if kind == 0:
            yield [pick.randbytes(pick.randrange(80)) for _ in range(pick.randrange(5))]
        elif kind == 1:
            yield [pick.choice(TAGS), pick.randbytes(pick.randrange(300))]
        elif kind == 2:
            yield [record[0], record[1][: pick.randrange(len(record[1]))]]
        elif kind == 3:
            flipped = bytearray(record[1])
            for _ in range(pick.randrange(1, 4)):
                flipped[pick.randrange(len(flipped))] = pick.randrange(256)
            yield [pick.choice(TAGS), bytes(flipped)]
        else:
            fields = msgspec.msgpack.decode(record[1])
            name = pick.choice([key for key in fields if key != "transfer_id"] or ["transfer_id"])
            fields[name] = pick.choice(VALUES)
            yield [record[0], msgspec.msgpack.encode(fields)]


async def throw(p: Pair, count: int, seed: int) -> None:
    """At D by a stranger and by P's own name, at P by D's."""
    frames, pick = wild(random.Random(seed)), random.Random(-seed)
    known = p.p_hello.incarnation.encode()
    for _ in range(count):
        p.router.inbox.put_nowait([pick.choice([b"stranger", known, pick.randbytes(8)]), *next(frames)])
        p.dealer.inbox.put_nowait(next(frames))
        if pick.random() < 0.05:
            await settle()
    await settle()
    assert not any(task.done() for task in p.tasks), "a listener has died"


async def an_answer(p: Pair, transfer: str) -> list[int]:
    leg = p.prefill_leg(transfer).send()
    await settle()
    p.close_lanes(transfer)
    assert await leg.ends() == [None, None]
    return leg.tokens


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    text = io.StringIO()
    log.set_up(stream=text)
    yield text
    log.set_up()


async def greeted(p: Pair) -> None:
    """Fuzz may have said hello or gone in P's name; what is true is said again within heartbeats."""
    await p.clock.advance(3.0)
    await settle()
    assert p.offers.states() == {"p0": "up"} and p.offering.states() == {"d0": "up"}


@pytest.mark.parametrize("seed", [1, 2, 3, *(pytest.param(s, marks=pytest.mark.slow) for s in range(4, 40))])
async def test_wild_records_disturb_nobody(seed: int, written: io.StringIO) -> None:
    async with pair() as p:
        undisturbed = await an_answer(p, "before")
        during = p.prefill_leg("during").send()
        await settle()
        await throw(p, 400, seed)
        p.close_lanes("during")
        assert await during.ends() == [None, None]
        assert during.tokens == undisturbed
        await greeted(p)
        assert await an_answer(p, "after") == undisturbed
        await p.clock.advance(80.0)  # offers that nobody wants have ended
        await p.assert_idle()
    lines = written.getvalue().splitlines()
    assert any("malformed_record" in line for line in lines)
    assert sum("malformed_record" in line for line in lines) < 100, "a log that a stranger can fill"


async def test_replayed_records_change_nothing() -> None:
    """Everything that was ever said, again and backwards: by P's own name, by a stranger, in a later life."""
    async with pair() as p:
        undisturbed = await an_answer(p, "first")
        told = [CONTROL.encode(r) for r in p.dealer.sent], [CONTROL.encode(r) for r in p.router.sent]
        during = p.prefill_leg("second").send()
        await settle()
        for frames in [*told[0], *reversed(told[0])]:
            if frames[0] != b"Hello":
                p.router.inbox.put_nowait([b"stranger", *frames])
            p.router.inbox.put_nowait([p.p_hello.incarnation.encode(), *frames])
        for frames in [*told[1], *reversed(told[1])]:
            p.dealer.inbox.put_nowait(frames)
        await settle()
        assert not any(task.done() for task in p.tasks)
        p.close_lanes("second")
        assert await during.ends() == [None, None]
        assert during.tokens == undisturbed
        assert await an_answer(p, "third") == undisturbed
        await p.clock.advance(80.0)
        await p.assert_idle()


@pytest.mark.parametrize(
    "changes",
    [
        {"blocks": b"\1\0\0"},
        {"blocks": b""},
        {"blocks": b"\xff\xff\xff\xff" * 4},
        {"group": 1},
        {"group": -1},
        {"split_start": -1},
        {"first_block": 99},
        {"generation": -1},
        {"incarnation": "another"},
    ],
    ids=str,
)
async def test_a_grant_that_cannot_be_ends_its_transfer_before_a_rank_hears_of_it(changes: dict[str, Any]) -> None:
    async with pair() as p:
        undisturbed = await an_answer(p, "before")
        p.switches["d"].set(Fault(name="drop_record", record="Grant"))
        leg = p.prefill_leg("t").send()
        await settle()
        grant = Grant(transfer_id="t", incarnation="d0-life", group=0, blocks=b"\1\0\0\0" * 2, split_start=0, generation=1)
        p.dealer.inbox.put_nowait(CONTROL.encode(_with(grant, changes)))
        await settle()
        ends = await leg.ends()
        assert all(isinstance(end, TransferFailed) for end in ends)
        assert "t" not in p.p_pencil.pushes
        p.switches["d"].clear()
        assert await an_answer(p, "after") == undisturbed
        await p.assert_idle()


def _with(grant: Grant, changes: dict[str, Any]) -> Grant:
    values = {name: getattr(grant, name) for name in Grant.__dataclass_fields__}
    return Grant(**(values | changes))


async def test_an_offer_that_can_mean_nothing_is_refused() -> None:
    async with pair() as p:
        known = p.p_hello.incarnation.encode()
        one, odd = pack([1]), ((b"", 0, 1), (b"\1\0\0", 0, 1), (pack([-1]), 0, 1), (pack([1 << 17]), 0, 1))
        longest = p.d_hello.max_model_len
        cases = (*odd, (one, 1, 1), (one, -1, 1), (one, 0, 0), (one, 0, longest), (one, 0, 1 << 40))
        for number, (ids, num_said, max_tokens) in enumerate(cases):
            offer = Offer(
                transfer_id=f"t{number}", request_id="r", incarnation="p0-life", token_ids=ids, max_tokens=max_tokens,
                seed=1, deadline_ms=5000, num_said=num_said,
            )  # fmt: skip
            p.router.inbox.put_nowait([known, *CONTROL.encode(offer)])
            await settle()
            assert p.offers.num_open == 0
            leg = p.prefill_leg(f"t{number}").send(p=False)
            (end,) = await leg.ends()
            assert isinstance(end, TransferFailed)
        await p.assert_idle()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        *((c, "no vocabulary of ours") for c in ({"token_id": -1}, {"token_id": 1 << 17}, {"top": ((1 << 40, -1.0),)})),
        *(({"num_cached_tokens": n}, f"{n} of 5 ids were cached") for n in (-1, 6)),
        ({"draft_state": DraftState(hidden=b"", dtype="float32")}, "of which there are none"),
    ],
    ids=str,
)
async def test_a_commit_that_cannot_be_ends_its_transfer(changes: dict[str, Any], told: str) -> None:
    async with pair() as p:
        undisturbed = await an_answer(p, "before")
        p.switches["p"].set(Fault(name="drop_record", record="Commit"))
        leg = p.prefill_leg("t").send()
        await settle()
        p.close_lanes("t")
        await settle()
        commit = {"transfer_id": "t", "token_id": 1, "logprob": None, "top": (), **changes}
        p.router.inbox.put_nowait([p.p_hello.incarnation.encode(), *CONTROL.encode(Commit(**commit))])
        await settle()
        ends = await leg.ends()
        assert all(isinstance(end, TransferFailed) for end in ends)
        assert any(told in str(end) for end in ends)
        assert not any(admit.draft_state for plan in p.d_pencil.plans for admit in plan.admit)
        p.switches["p"].clear()
        assert await an_answer(p, "after") == undisturbed
        await p.assert_idle()


async def test_a_name_is_not_taken_over_by_another_role() -> None:
    async with pair() as p:
        p.router.inbox.put_nowait([b"stranger", *CONTROL.encode(hello("nobody", "prefill"))])
        p.router.inbox.put_nowait([b"stranger", *CONTROL.encode(hello("d0", "decode"))])
        await settle()
        assert p.offers.states() == {"p0": "up"}
        assert await an_answer(p, "after")
