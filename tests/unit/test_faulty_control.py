"""A driver's control socket with faults. Lost records of a hand-over: ``test_hand_over.py``."""

from __future__ import annotations

import asyncio

import pytest

from longcat_pd.errors import TransferFailed
from longcat_pd.faults import Fault, Switches
from longcat_pd.kv_transfer.control import CONTROL
from longcat_pd.kv_transfer.faulty_control import FaultySocket, exposed
from longcat_pd.kv_transfer.messages import Ack, Beat, Grant
from longcat_pd.wire import Unsendable
from tests.manual_clock import settle
from tests.unit.control_rig import Pipe, pair

ACK, BEAT = CONTROL.encode(Ack(transfer_id="t")), CONTROL.encode(Beat(name="p0", incarnation="i"))


def test_without_switches_there_is_nothing_in_front() -> None:
    pipe = Pipe()
    assert exposed(pipe, None) is pipe
    assert isinstance(exposed(pipe, Switches()), FaultySocket)


async def test_records_are_lost_by_their_kind() -> None:
    pipe, switches = Pipe(), Switches()
    socket = FaultySocket(pipe, switches)
    switches.set(Fault(name="drop_record", record="Ack", after=1, times=2))
    for frames in (ACK, BEAT, ACK, [b"identity", *ACK], BEAT, ACK):
        socket.send(frames)
    assert [type(record).__name__ for record in pipe.sent] == ["Ack", "Beat", "Beat", "Ack"]
    switches.set(Fault(name="mute_control"))
    socket.send(ACK)
    assert len(pipe.sent) == 4
    switches.clear()
    socket.send(ACK)
    assert len(pipe.sent) == 5


async def test_a_late_record_is_overtaken_and_a_closed_socket_sends_none() -> None:
    pipe, switches = Pipe(), Switches()
    socket = FaultySocket(pipe, switches)
    switches.set(Fault(name="late_record", record="Ack", seconds=0.05, times=2))
    socket.send(ACK)
    socket.send(BEAT)
    await asyncio.sleep(0.2)
    assert [type(record).__name__ for record in pipe.sent] == ["Beat", "Ack"]
    socket.send(ACK)
    socket.close()
    pipe.is_cut = False
    await asyncio.sleep(0.2)
    assert len(pipe.sent) == 2


async def test_a_late_record_to_nobody_is_lost() -> None:
    class Gone(Pipe):
        def send(self, frames: list[bytes]) -> None:
            raise Unsendable("nobody")

    switches = Switches()
    switches.set(Fault(name="late_record", record="Ack", seconds=0.01))
    FaultySocket(Gone(), switches).send(ACK)
    await asyncio.sleep(0.05)  # an exception in a callback of the loop would fail this test
    with pytest.raises(Unsendable):
        FaultySocket(Gone(), switches).send(ACK)


@pytest.mark.parametrize("mute", ["p", "d"])
async def test_a_driver_that_says_nothing_is_down_for_its_peer_alone(mute: str) -> None:
    async with pair() as p:
        p.switches[mute].set(Fault(name="mute_control"))
        await p.clock.advance(7.0)
        states = {"p": p.offering.states()["d0"], "d": p.offers.states()["p0"]}
        assert states == {mute: "up", ("d" if mute == "p" else "p"): "down"}
        (end, *_) = (
            await p.prefill_leg().send(d=False).ends() if mute == "d" else await p.prefill_leg().send(p=False).ends()
        )
        assert isinstance(end, TransferFailed)
        p.switches[mute].clear()
        await p.clock.advance(3.0)
        assert (p.offering.states()["d0"], p.offers.states()["p0"]) == ("up", "up")
        leg = p.prefill_leg("u").send()
        await settle()
        p.close_lanes("u")
        assert await leg.ends() == [None, None]
        await p.assert_idle()


async def test_a_late_grant_is_taken() -> None:
    async with pair() as p:
        p.switches["d"].set(Fault(name="late_record", record="Grant", seconds=1.0))
        leg = p.prefill_leg().send()
        await settle()
        assert not any(isinstance(record, Grant) for record in p.router.sent)
        async with asyncio.timeout(60.0):
            while not any(isinstance(record, Grant) for record in p.router.sent):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await settle()
        p.close_lanes("t")
        assert await leg.ends() == [None, None]
        await p.assert_idle()
