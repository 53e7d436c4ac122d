"""Driver side of hand-overs, what both pools share: the link to a peer, and a transfer while it is open.

Owns the judgement of a link (greeting, heartbeat, silence, another incarnation) and how the coroutine of a request hears
that its transfer has failed. Knows neither sockets nor who offers: ``offering.py`` and ``offers.py`` do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Literal, Protocol, TypeVar

from longcat_pd.clock import LINK_SILENT_S, Clock
from longcat_pd.errors import DeadlineExceeded, LongcatError, TransferFailed
from longcat_pd.kv_transfer.hello import Mismatch, mismatches
from longcat_pd.kv_transfer.messages import (
    Abort,
    Ack,
    Beat,
    Commit,
    ControlMessage,
    Grant,
    Hello,
    Offer,
    Refuse,
    TransferClosed,
)
from longcat_pd.log import logger
from longcat_pd.wire import Codec

T = TypeVar("T")

LinkState = Literal["up", "down", "mismatch"]
Outcome = Literal["committed", "aborted", "timed_out", "digest_mismatch", "peer_lost"]

CONTROL = Codec[ControlMessage](Hello, Beat, Offer, Grant, Refuse, Commit, Ack, Abort)
_OUTCOMES: dict[str, Outcome] = {"timed_out": "timed_out", "digest_mismatch": "digest_mismatch", "peer_lost": "peer_lost"}


class ControlSocket(Protocol):
    """What is needed of ``wire.AsyncSocket``."""

    def send(self, frames: list[bytes]) -> None:
        """Hand over one message; raises wire.Unsendable."""
        ...

    async def recv(self) -> list[bytes]:
        """Wait for a message."""
        ...

    def close(self) -> None:
        """Close."""
        ...


class Link:
    """What is known of one peer. Judges only; the owner sends and ends transfers."""

    def __init__(self, name: str, ours: Hello, clock: Clock) -> None:
        self.name = name
        self.state: LinkState = "down"
        self.theirs: Hello | None = None
        self.mismatch: tuple[Mismatch, ...] = ()
        self._ours = ours
        self._clock = clock
        self._heard_at = clock.now()

    @property
    def incarnation(self) -> str:
        """Of the peer; empty before its first hello."""
        return self.theirs.incarnation if self.theirs is not None else ""

    def greeted(self, theirs: Hello) -> bool:
        """A hello has come. True if it is that of another life of the peer: transfers with the old one are void."""
        is_new = theirs.incarnation != self.incarnation
        self._heard_at = self._clock.now()
        pair = (self._ours, theirs) if self._ours.role == "prefill" else (theirs, self._ours)
        self.mismatch = (*self._of_another_name(theirs), *mismatches(*pair))
        self.theirs = theirs
        before, self.state = self.state, "mismatch" if self.mismatch else "up"
        if is_new and theirs.code_version != self._ours.code_version:
            ours_version = self._ours.code_version
            logger().warning("peer_version", peer=self.name, ours=ours_version, theirs=theirs.code_version)
        if (is_new or before != "mismatch") and self.mismatch:
            for m in self.mismatch:
                ours, theirs_said = (m.prefill, m.decode) if pair[0] is self._ours else (m.decode, m.prefill)
                logger().error("peer_mismatch", peer=self.name, field=m.field, ours=ours, theirs=theirs_said)
        elif self.state == "up" and (is_new or before != "up"):
            logger().info("peer_up", peer=self.name, incarnation=theirs.incarnation)
        return is_new

    def _of_another_name(self, theirs: Hello) -> tuple[Mismatch, ...]:
        """Whether another instance answers where this peer should be: what it is called by its own side, and by ours."""
        if theirs.name == self.name:
            return ()
        ours_decodes = self._ours.role == "decode"
        return (Mismatch("name", *((theirs.name, self.name) if ours_decodes else (self.name, theirs.name))),)

    def beat(self, incarnation: str) -> bool:
        """A heartbeat has come. False if the peer must greet (again) first."""
        if incarnation != self.incarnation:
            return False
        self._heard_at = self._clock.now()
        if self.state == "down":
            self.state = "up"
            logger().info("peer_up", peer=self.name, incarnation=incarnation)
        return True

    def is_silent(self) -> bool:
        """True once, when the peer has been silent for too long: its transfers end."""
        if self.state != "up" or self._clock.now() - self._heard_at <= LINK_SILENT_S:
            return False
        self.state = "down"
        logger().warning("peer_down", peer=self.name, incarnation=self.incarnation)
        return True

    def forgive(self, seconds: float) -> None:
        """This process itself stood still for so long; what the peer sent meanwhile is unread."""
        self._heard_at += seconds


class OpenTransfer:
    """A hand-over that has no end yet. Belongs to the coroutine of one request.

    ``during`` makes every wait of that coroutine end when the hand-over fails elsewhere.
    """

    def __init__(self, transfer_id: str, peer: str, *, deadline: float, clock: Clock) -> None:
        self.id = transfer_id
        self.peer = peer
        self.error: LongcatError | None = None
        self.outcome: Outcome = "aborted"
        self.is_ended_by_peer = False
        self._deadline = deadline
        self._clock = clock
        self._has_failed = asyncio.Event()

    def has_leg(self, deadline: float) -> None:
        """The request's own deadline counts from now on."""
        self._deadline = deadline

    def fail(self, error: LongcatError, outcome: Outcome = "aborted", *, by_peer: bool = False) -> None:
        """The first failure counts. ``by_peer``: the peer knows, it need not be told."""
        if self.error is None:
            self.error, self.outcome, self.is_ended_by_peer = error, outcome, by_peer
            self._has_failed.set()

    async def during(self, awaitable: Awaitable[T]) -> T:
        """Await, unless the transfer fails first: then the awaitable is cancelled and the reason raised."""
        task = asyncio.ensure_future(awaitable)
        failed = asyncio.ensure_future(self._has_failed.wait())
        try:
            await asyncio.wait({task, failed}, return_when=asyncio.FIRST_COMPLETED)
            if self.error is not None and not task.done():
                raise self.error
            return await task
        finally:
            unfinished = {t for t in (task, failed) if not t.done()}
            if task.done() and not task.cancelled():
                task.exception()  # of which nobody else hears if a cancellation comes in its turn
            for t in unfinished:
                t.cancel()
            if unfinished:
                await asyncio.wait(unfinished)

    async def within(self, seconds: float, awaitable: Awaitable[T], what: str) -> T:
        """``during``, for at most ``seconds``. Raises TransferFailed (timed out) or DeadlineExceeded."""
        left = self._deadline - self._clock.now()
        try:
            return await self.during(self._clock.within(min(seconds, left), awaitable))
        except TimeoutError:
            if left < seconds:
                raise DeadlineExceeded("the deadline of this request is over") from None
            error = TransferFailed(f"transfer {self.id}: no {what} of {self.peer} within {seconds:g} s")
            self.fail(error, "timed_out")
            raise error from None

    def check(self, reports: list[TransferClosed]) -> None:
        """What the own ranks have reported. Raises TransferFailed if one of them failed."""
        bad = next((r for r in reports if not r.ok), None)
        if bad is None:
            return
        word = bad.reason.partition(":")[0]
        error = TransferFailed(
            f"transfer {self.id}: rank {bad.rank}: {bad.reason}", peer_gone=word in ("peer_lost", "peer_aborted")
        )
        self.fail(error, _OUTCOMES.get(word, "aborted"))
        raise error


def log_abort(transfer: OpenTransfer, reason: str) -> None:
    """The one line about a hand-over that failed."""
    logger().warning("transfer_aborted", transfer=transfer.id, peer=transfer.peer, reason=reason)
