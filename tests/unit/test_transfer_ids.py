"""The ids of transfers: one of them is one hand-over, for both sides, whoever else names it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from longcat_pd.config.schema import PeerAddress
from longcat_pd.errors import DeadlineExceeded, TransferFailed
from longcat_pd.kv_transfer.control import CONTROL
from longcat_pd.kv_transfer.messages import Abort, Grant, Offer
from longcat_pd.kv_transfer.offering import Offering
from longcat_pd.kv_transfer.offers import Offers
from longcat_pd.metrics import Metrics
from longcat_pd.wire import pack
from tests.manual_clock import ManualClock, settle
from tests.unit.control_rig import LIMITS, Pipe, hello
from tests.unit.engine_rig import FAR


def _peer(name: str) -> PeerAddress:
    return PeerAddress(name=name, role="decode", host="h", http_port=1)


def _offer(incarnation: str) -> Offer:
    ids = pack([1, 2])
    return Offer(
        transfer_id="t", request_id="r", incarnation=incarnation, token_ids=ids, max_tokens=1, seed=0, deadline_ms=9
    )


async def test_an_id_is_one_transfer_whoever_it_is_offered_to() -> None:
    """Ranks and blocks know it by its id alone: a second one would be given the place of the first."""
    pipes = {name: Pipe() for name in ("d0", "d1")}
    metrics, clock = Metrics(role="prefill", instance="p0").transfers, ManualClock()
    offering = Offering(
        hello("p0", "prefill"),
        [_peer(name) for name in pipes],
        connect=lambda peer: pipes[peer.name],
        clock=clock,
        metrics=metrics,
    )
    running = asyncio.ensure_future(offering.run())
    for name, pipe in pipes.items():
        pipe.inbox.put_nowait(CONTROL.encode(hello(name, "decode")))
    await settle()
    grant = Grant(transfer_id="t", incarnation="d0-life", group=0, blocks=pack([1]), split_start=0, generation=1)
    pipes["d0"].inbox.put_nowait(CONTROL.encode(grant))

    async def again() -> None:
        with pytest.raises(TransferFailed, match="offered before"):
            await asyncio.wait_for(offering.offer(_offer("p0-life"), peer="d1", deadline=FAR).__aenter__(), 1.0)

    with contextlib.suppress(DeadlineExceeded):
        async with offering.offer(_offer("p0-life"), peer="d0", deadline=FAR):
            await again()
            raise DeadlineExceeded("over")
    await again()  # lanes may still read its blocks
    assert not any(isinstance(m, Offer) for m in pipes["d1"].sent)
    running.cancel()
    await asyncio.wait({running})


async def test_of_two_offers_of_one_id_the_first_is_taken_whoever_makes_the_other() -> None:
    router, clock = Pipe(), ManualClock()
    metrics = Metrics(role="decode", instance="d0").transfers
    offers = Offers(hello("d0", "decode"), ["p0", "p1"], socket=router, limits=LIMITS, clock=clock, metrics=metrics)
    running = asyncio.ensure_future(offers.run())
    dealers = {name: router.dealer(name.encode()) for name in ("p0", "p1")}
    for name, dealer in dealers.items():
        dealer.send(CONTROL.encode(hello(name, "prefill")))
        dealer.send(CONTROL.encode(_offer(f"{name}-life")))
    await settle()
    told = {name: [CONTROL.decode(frames) for frames in drained(dealer)] for name, dealer in dealers.items()}
    assert not any(isinstance(m, Abort) for m in told["p0"]) and offers.num_open == 1
    assert Abort(transfer_id="t", reason="offered twice") in told["p1"]
    running.cancel()
    await asyncio.wait({running})


def drained(pipe: Pipe) -> Iterator[list[bytes]]:
    while not pipe.inbox.empty():
        yield pipe.inbox.get_nowait()
