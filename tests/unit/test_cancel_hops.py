"""A request is given up at every hop by name, and while it ends in another way in the same turn: one outcome, one release.

Failures of kind 19. Both roles on pencils, time on a clock that the test owns; what ranks do between two layers of a push
is in ``test_push.py``, and what the balancer does in ``test_proxy.py``.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from itertools import permutations

import pytest

from longcat_pd.errors import LongcatError
from longcat_pd.kv_transfer.control import CONTROL
from longcat_pd.kv_transfer.messages import Ack, Commit, Grant, Offer
from tests.manual_clock import ManualClock, settle
from tests.unit.control_rig import Leg, Pair, pair

PROMPT = tuple(range(1, 21))  # three chunks
RIGHT = [21, 22, 23, 24]
LIMIT_S = 30.0  # of the request that ends


def right_of(first: int) -> list[int]:
    """The pencil counts on from the last token."""
    return list(range(first, first + len(RIGHT)))


class Scene:
    """A request at a hop; at some hops another one is in front of it, which is not to notice anything."""

    def __init__(self, p: Pair) -> None:
        self.p = p
        self.front: Leg | None = None
        self.leg = self._leg("t", PROMPT)
        p.p_pencil.auto = p.d_pencil.auto = False

    def _leg(self, transfer_id: str, prompt: tuple[int, ...]) -> Leg:
        return self.p.prefill_leg(transfer_id, prompt=prompt, max_tokens=len(RIGHT), ignore_eos=True)

    def send(self) -> None:
        self.leg.send(deadline=self.p.clock.now() + LIMIT_S)

    def said(self, kind: type) -> bool:
        sent = [*self.p.router.sent, *self.p.dealer.sent]
        return any(isinstance(m, kind) and m.transfer_id == "t" for m in sent)  # type: ignore[attr-defined]

    async def step(self, pencil: str) -> None:
        """Let the ranks of one side do all that they were told."""
        side = self.p.p_pencil if pencil == "p" else self.p.d_pencil
        while side.waiting:
            side.step()
            await settle(20)

    async def in_front(self) -> None:
        """Another request has the only slot of both sides: it decodes at D, and at P its first chunk is to be computed."""
        self.front = self._leg("front", (50, 51)).send()
        await settle()
        await self.step("d")

    async def finish(self) -> None:
        """Nobody holds anything up any more."""
        for pencil in (self.p.p_pencil, self.p.d_pencil):
            pencil.auto = True
            while pencil.waiting:
                pencil.step()
        for _ in range(3):
            await settle()
            for transfer in ("front", "t"):
                if transfer in self.p.d_pencil.arrivals and transfer in self.p.p_pencil.pushes:
                    self.p.close_lanes(transfer)
        await self.p.clock.advance(80.0)


async def queued(scene: Scene) -> None:
    await scene.in_front()
    scene.send()
    await settle()
    assert not scene.said(Offer)


async def offered(scene: Scene) -> None:
    await scene.in_front()
    while scene.p.p_pencil.waiting:
        await scene.step("p")
    scene.p.close_lanes("front")
    await settle()
    await scene.step("p")  # P's slot is free, the one in front decodes
    scene.send()
    await settle()
    await scene.step("p")
    assert scene.said(Offer) and not scene.said(Grant)


async def granted(scene: Scene) -> None:
    scene.send()
    await settle()
    await scene.step("d")
    await settle()
    assert scene.said(Grant)


async def chunk_1(scene: Scene) -> None:
    await granted(scene)
    scene.p.p_pencil.step()
    await settle()


async def chunk_2(scene: Scene) -> None:
    await chunk_1(scene)
    scene.p.p_pencil.step()
    await settle()
    assert not scene.said(Commit)


async def committed(scene: Scene) -> None:
    await granted(scene)
    await scene.step("p")
    assert scene.said(Commit) and not scene.said(Ack)


async def acknowledged(scene: Scene) -> None:
    await committed(scene)
    scene.p.close_lanes("t")
    await settle()
    assert scene.said(Ack) and scene.leg.tokens == RIGHT[:1]


async def decoding(scene: Scene) -> None:
    await acknowledged(scene)
    scene.p.d_pencil.step()
    await settle()
    scene.p.d_pencil.step()
    await settle()
    assert RIGHT[:1] != scene.leg.tokens != RIGHT and scene.leg.tokens == RIGHT[: len(scene.leg.tokens)]


HOPS: tuple[Callable[[Scene], Awaitable[None]], ...] = (
    queued,
    offered,
    granted,
    chunk_1,
    chunk_2,
    committed,
    acknowledged,
    decoding,
)


# ---------------------------------------------------------------------- ends, each of which takes no turn of the event loop


def leaves(scene: Scene) -> None:
    """The client goes: the balancer closes both legs."""
    for task in (scene.leg.p, scene.leg.d):
        assert task is not None
        task.cancel()


def runs_out(scene: Scene) -> None:
    """Its deadline is over."""
    _jump(scene.p.clock, LIMIT_S + 0.1)


def goes_on(scene: Scene) -> None:
    """The ranks do what they were told, which may be the normal end of a phase or of the request."""
    for pencil in (scene.p.p_pencil, scene.p.d_pencil):
        while pencil.waiting:
            pencil.step()
    if "t" in scene.p.d_pencil.arrivals and "t" in scene.p.p_pencil.pushes:
        scene.p.close_lanes("t")


def loses_p(scene: Scene) -> None:
    """D learns that P's driver is another one."""
    other = replace(scene.p.p_hello, incarnation="another life of p0")
    scene.p.router.inbox.put_nowait([scene.p.dealer.identity, *CONTROL.encode(other)])


def loses_d(scene: Scene) -> None:
    """P learns that D's driver is another one."""
    other = replace(scene.p.d_hello, incarnation="another life of d0")
    scene.p.dealer.inbox.put_nowait(list(CONTROL.encode(other)))


ENDS = (leaves, runs_out, goes_on, loses_p, loses_d)


def _jump(clock: ManualClock, seconds: float) -> None:
    """Time passes at once; who has waited long enough wakes in the next turn."""
    clock._now += seconds
    while clock._sleepers and clock._sleepers[0][0] <= clock._now:
        _, _, woken = heapq.heappop(clock._sleepers)
        if not woken.done():
            woken.set_result(None)


def _outcomes(p: Pair) -> Iterator[float]:
    """How many transfers have ended, at P and at D."""
    for metrics in (p.p_metrics, p.d_metrics):
        names = ("committed", "aborted", "timed_out", "digest_mismatch", "peer_lost")
        yield sum(metrics.transfers.transfers_total(name)._value.get() for name in names)
        assert metrics.transfers.transfers_open._value.get() == 0


async def one_end(p: Pair, scene: Scene) -> None:
    """Of each leg; what it held is back once, whoever was in front has noticed nothing, the next one is served."""
    await scene.finish()
    ends = await scene.leg.ends()
    for end in ends:
        assert end is None or isinstance(end, asyncio.CancelledError | LongcatError), repr(end)
    assert scene.leg.tokens == RIGHT[: len(scene.leg.tokens)]
    assert (ends[1] is None) == (scene.leg.tokens == RIGHT and scene.leg.finish == "length")
    num_fronts = 0
    if scene.front is not None:
        num_fronts = 1
        if "front" not in _voided(scene):
            assert await scene.front.ends() == [None, None]
            assert scene.front.tokens == right_of(52)
    assert all(count <= 1 + num_fronts for count in _outcomes(p))
    await p.assert_idle()
    assert (p.offering.states(), p.offers.states()) == ({"d0": "up"}, {"p0": "up"})
    following = scene._leg("next", (70, 71)).send()
    await settle()
    p.close_lanes("next")
    assert await following.ends() == [None, None]
    assert following.tokens == right_of(72)
    await p.assert_idle()


def _voided(scene: Scene) -> set[str]:
    """Another life of a peer ends everybody's transfer, also that of the one in front."""
    front = scene.front
    assert front is not None and front.p is not None and front.d is not None
    is_ended = any(task.done() and not task.cancelled() and task.exception() for task in (front.p, front.d))
    return {"front"} if is_ended else set()


@pytest.mark.parametrize("end", [leaves, runs_out])
@pytest.mark.parametrize("hop", HOPS)
async def test_given_up_at_each_hop(hop: Callable[[Scene], Awaitable[None]], end: Callable[[Scene], None]) -> None:
    async with pair(max_num_seqs=1) as p:
        scene = Scene(p)
        await hop(scene)
        end(scene)
        await settle()
        for task in (scene.leg.p, scene.leg.d):
            assert task is not None and task.done(), "no leg waits for a limit of its own"
        if scene.front is not None:
            assert "front" not in _voided(scene)
        await one_end(p, scene)
        assert scene.leg.finish is None
        if scene.front is not None:
            assert scene.front.tokens == right_of(52)


@pytest.mark.parametrize("ends", list(permutations(ENDS, 2)), ids=lambda ends: "-".join(end.__name__ for end in ends))
@pytest.mark.parametrize("hop", HOPS)
async def test_two_ends_in_one_turn_are_one(
    hop: Callable[[Scene], Awaitable[None]], ends: tuple[Callable[[Scene], None], ...]
) -> None:
    async with pair(max_num_seqs=1) as p:
        scene = Scene(p)
        await hop(scene)
        for end in ends:
            end(scene)
        await one_end(p, scene)
