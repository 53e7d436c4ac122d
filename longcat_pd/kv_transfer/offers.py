"""Decode side of hand-overs: links from prefill instances, the offers that come over them, and the legs that want one.

Owns the pairing of an offer with its leg, whichever comes first, and the time-outs of half a pair. Knows nothing of the
engine: what a leg grants is a ``Grant`` record.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from longcat_pd.clock import HEARTBEAT_S, Clock
from longcat_pd.errors import DeadlineExceeded, LongcatError, TransferFailed, WorkerUnavailable
from longcat_pd.kv_transfer.control import CONTROL, ControlSocket, Link, LinkState, OpenTransfer, log_abort
from longcat_pd.kv_transfer.messages import Abort, Ack, Beat, Commit, ControlMessage, Grant, Hello, Offer, Refuse
from longcat_pd.log import Refusals, logger
from longcat_pd.metrics import TransferMetrics
from longcat_pd.wire import MalformedRecord, Unsendable, unpack

_DRAFT_BYTES = {"float32": 4, "bfloat16": 2}  # of a number, by data type
_ENDED_KEPT = 4096  # transfers that are over, so that a late half of the pair is told at once


@dataclass(frozen=True, kw_only=True, slots=True)
class PairLimits:
    """Longest waits: of an offer for its leg, of the arrived cache for its commit.

    ``vocab_size``: ids of tokens are below it. ``hidden_size``: of what drafts start from.
    """

    offer_s: float
    commit_s: float
    vocab_size: int
    hidden_size: int


@dataclass(eq=False)
class _Peer:
    """One prefill instance. ``identity``: of its socket in this life."""

    link: Link
    identity: bytes = b""
    transfers: dict[str, IncomingTransfer] = field(default_factory=dict)


@dataclass(eq=False)
class _Leg:
    """A request whose offer has not come."""

    peer: str
    offer: asyncio.Future[IncomingTransfer]


class IncomingTransfer(OpenTransfer):
    """An offer, from its arrival to its end. Without a leg at first; ``deadline`` is the offer's until then."""

    def __init__(self, offers: Offers, peer: _Peer, offer: Offer, *, deadline: float, clock: Clock) -> None:
        super().__init__(offer.transfer_id, peer.link.name, deadline=deadline, clock=clock)
        assert peer.link.theirs is not None
        self.offer = offer
        self.theirs = peer.link.theirs
        self.since = clock.now()
        self.is_granted = False
        self.is_taken = False
        self.is_acknowledged = False
        self._offers = offers
        self._commit: asyncio.Future[Commit] = asyncio.get_running_loop().create_future()

    def grant(self, grant: Grant) -> None:
        """There is room, and the own ranks have been told or will be before they do anything else."""
        self.is_granted = True
        self._offers.send_to(self.peer, grant)

    async def committed(self, limit_s: float) -> Commit:
        """The commit, once only it is missing. Raises TransferFailed, DeadlineExceeded."""
        commit = await self.within(limit_s, asyncio.shield(self._commit), "commit")
        if fault := self._fault(commit):
            raise TransferFailed(f"transfer {self.id}: the commit {fault}")
        return commit

    def _fault(self, commit: Commit) -> str:
        """What a commit cannot say; "" if it can."""
        state, limits = commit.draft_state, self._offers.limits
        if (state is not None) != (self.theirs.num_draft_tokens > 0):
            return "has what drafts start from, of which there are none" if state else "lacks what drafts start from"
        if state is not None and len(state.hidden) != limits.hidden_size * _DRAFT_BYTES.get(state.dtype, 0):
            told = f"{len(state.hidden)} bytes of {state.dtype[:40]}"
            return f"has {told} for drafts to start from, {limits.hidden_size} numbers are needed"
        wrong = [i for i in (commit.token_id, *(i for i, _ in commit.top)) if not 0 <= i < limits.vocab_size]
        if wrong:
            return f"names token {wrong[0]}, which no vocabulary of ours has"
        num_ids = len(self.offer.token_ids) // 4
        if not 0 <= commit.num_cached_tokens <= num_ids:
            return f"says that {commit.num_cached_tokens} of {num_ids} ids were cached"
        return ""

    def acknowledge(self) -> None:
        """Everything is here."""
        self.is_acknowledged = True
        self._offers.send_to(self.peer, Ack(transfer_id=self.id))

    def end(self, error: LongcatError | None) -> None:
        """Tell the peer that this side has given up, unless it knows. None: the request has left."""
        if self.is_ended_by_peer:
            return
        if error is not None and not self.is_granted:
            self._offers.send_to(self.peer, Refuse(transfer_id=self.id, code=error.code, message=error.message))
            return
        self._offers.send_to(self.peer, Abort(transfer_id=self.id, reason=_reason(error)))

    def heard(self, message: ControlMessage) -> None:
        """What the peer says about this transfer."""
        if isinstance(message, Commit) and not self._commit.done():
            self._commit.set_result(message)
        elif isinstance(message, Abort):
            error = TransferFailed(f"transfer {self.id}: {self.peer} gave up: {message.reason}", peer_gone=True)
            self.fail(error, by_peer=True)


def _reason(error: LongcatError | None) -> str:
    return "the request has left" if error is None else error.message


class Offers:
    """The links of a decode driver.

    Args:
        hello: what this instance says of itself.
        names: the prefill instances of the configuration.
        socket: where they connect (a ROUTER).
    """

    def __init__(
        self,
        hello: Hello,
        names: Iterable[str],
        *,
        socket: ControlSocket,
        limits: PairLimits,
        clock: Clock,
        metrics: TransferMetrics,
    ) -> None:
        self.limits = limits
        self.news = asyncio.Event()  # set when a peer has greeted
        self._hello = hello
        self._socket = socket
        self._clock = clock
        self._metrics = metrics
        self._peers = {name: _Peer(Link(name, hello, clock)) for name in names}
        self._legs: dict[str, _Leg] = {}  # that wait for their offer
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._refusals = Refusals()

    def states(self) -> dict[str, LinkState]:
        """By name of the peer."""
        return {name: peer.link.state for name, peer in self._peers.items()}

    def links(self) -> list[Link]:
        """For the greeting at the start."""
        return [peer.link for peer in self._peers.values()]

    @property
    def num_open(self) -> int:
        """Transfers without an end, and legs that wait for one."""
        return sum(len(peer.transfers) for peer in self._peers.values()) + len(self._legs)

    async def run(self) -> None:
        """Listen and beat; until cancelled."""
        tasks = [asyncio.ensure_future(self._beat()), asyncio.ensure_future(self._listen())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._socket.close()

    async def expect(
        self, transfer_id: str, *, peer: str, deadline: float, num_said: int = 0, is_patient: bool = False
    ) -> IncomingTransfer:
        """The offer of this transfer, for its leg. Call ``take`` soon after. ``num_said``: as the leg has it.
        ``is_patient``: only the deadline ends the wait, as that of the prefill side for its room.

        Raises:
            WorkerUnavailable: no such peer in the configuration.
            TransferFailed: the offer does not come, was ended already or goes on elsewhere in the answer; DeadlineExceeded.
        """
        there = self._peers.get(peer)
        if there is None:
            raise WorkerUnavailable(f"{peer} is not in the configuration of {self._hello.name}", param="X-Longcat-Peer")
        if transfer_id in self._ended:
            raise TransferFailed(f"transfer {transfer_id}: {self._ended[transfer_id]}", peer_gone=True)
        if there.link.state != "up":
            raise TransferFailed(f"the link of {peer} is {there.link.state}", peer_gone=True)
        if transfer_id in self._legs:
            raise TransferFailed(f"transfer {transfer_id} has a leg already")
        transfer = there.transfers.get(transfer_id)
        if transfer is None:
            assert there.link.theirs is not None, "a link that is up"
            limit_s = math.inf if is_patient else there.link.theirs.pairs_within_s
            transfer = await self._wait_for_offer(transfer_id, peer, deadline, limit_s)
        if transfer.is_taken:
            raise TransferFailed(f"transfer {transfer_id} has a leg already")
        if transfer.offer.num_said != num_said:
            error = TransferFailed(
                f"transfer {transfer_id}: {peer} goes on behind {transfer.offer.num_said} ids of the answer, "
                f"this leg behind {num_said}"
            )
            if transfer.error is None:
                self._end(transfer, error)
            raise error
        transfer.since = self._clock.now()
        transfer.has_leg(deadline)
        return transfer

    @asynccontextmanager
    async def take(self, transfer_id: str, *, peer: str) -> AsyncIterator[IncomingTransfer]:
        """The transfer while its leg works on it. Leaving it unacknowledged, in any way, ends it on both sides."""
        transfer = self._peers[peer].transfers.get(transfer_id)
        if transfer is None:
            raise TransferFailed(f"transfer {transfer_id}: {self._ended.get(transfer_id, 'unknown')}", peer_gone=True)
        transfer.is_taken = True
        error: LongcatError | None = None
        try:
            yield transfer
        except LongcatError as raised:
            error = raised
            raise
        finally:
            self._end(transfer, transfer.error or error)

    def send_to(self, peer: str, message: ControlMessage) -> None:
        """To a peer that is away: silence ends what waits for an answer."""
        try:
            self._socket.send([self._peers[peer].identity, *CONTROL.encode(message)])
        except Unsendable as error:
            logger().debug("control_not_sent", peer=peer, reason=str(error))

    async def _wait_for_offer(self, transfer_id: str, peer: str, deadline: float, limit_s: float) -> IncomingTransfer:
        leg = self._legs[transfer_id] = _Leg(peer, asyncio.get_running_loop().create_future())
        left = deadline - self._clock.now()
        try:
            return await self._clock.within(min(limit_s, left), leg.offer)
        except TimeoutError:
            self._note_ended(transfer_id, "no offer came in time")
            if left < limit_s:
                raise DeadlineExceeded("the deadline of this request is over") from None
            raise TransferFailed(f"transfer {transfer_id}: no offer of {peer} within {limit_s:g} s") from None
        except asyncio.CancelledError:
            self._note_ended(transfer_id, "the request has left")
            raise
        finally:
            del self._legs[transfer_id]

    def _end(self, transfer: IncomingTransfer, error: LongcatError | None) -> None:
        """Of a transfer in ``_Peer.transfers``: take it out, tell the peer, count it."""
        del self._peers[transfer.peer].transfers[transfer.id]
        self._metrics.transfers_open.dec()
        self._note_ended(transfer.id, "committed" if transfer.is_acknowledged else _reason(error))
        if not transfer.is_acknowledged:
            transfer.end(error)
            log_abort(transfer, _reason(error))
        self._metrics.transfers_total("committed" if transfer.is_acknowledged else transfer.outcome).inc()

    def _note_ended(self, transfer_id: str, reason: str) -> None:
        self._ended[transfer_id] = reason
        if len(self._ended) > _ENDED_KEPT:
            self._ended.popitem(last=False)

    async def _beat(self) -> None:
        before = self._clock.now()
        while True:
            now = self._clock.now()
            for peer in self._peers.values():
                peer.link.forgive(max(now - before - 2 * HEARTBEAT_S, 0.0))
                if peer.link.is_silent():
                    self._void(peer, f"{peer.link.name} is silent")
                if peer.link.state == "up":
                    self.send_to(peer.link.name, Beat(name=self._hello.name, incarnation=self._hello.incarnation))
                self._end_unpaired(peer, now)
            before = now
            await self._clock.sleep(HEARTBEAT_S)

    def _end_unpaired(self, peer: _Peer, now: float) -> None:
        for transfer in list(peer.transfers.values()):
            if not transfer.is_taken and now - transfer.since > self.limits.offer_s:
                error = TransferFailed(f"transfer {transfer.id}: no leg came within {self.limits.offer_s:g} s")
                transfer.fail(error, "timed_out")
                transfer.is_granted = True  # an abort, not a refusal: the balancer knows better than to repeat it
                self._end(transfer, error)

    async def _listen(self) -> None:
        while True:
            identity, *frames = await self._socket.recv()
            try:
                message = CONTROL.decode(frames)
            except MalformedRecord as error:
                self._refusals.tell(repr(identity), str(error))
                continue
            self._heard(identity, message)

    def _heard(self, identity: bytes, message: ControlMessage) -> None:
        if isinstance(message, Hello):
            self._greeted(identity, message)
            return
        peer = next((p for p in self._peers.values() if p.identity == identity), None)
        if peer is None or (isinstance(message, Beat) and not peer.link.beat(message.incarnation)):
            self._answer(identity, self._hello)
        elif isinstance(message, Offer):
            self._offered(peer, message)
        elif not isinstance(message, Beat):
            self._told(peer, message)

    def _greeted(self, identity: bytes, hello: Hello) -> None:
        peer = self._peers.get(hello.name)
        if peer is None:
            logger().error("peer_mismatch", peer=hello.name, field="name", ours="not configured", theirs=hello.name)
            return
        peer.identity = identity
        self.news.set()
        if peer.link.greeted(hello):
            self._void(peer, f"{hello.name} was started again")
        self._answer(identity, self._hello)

    def _answer(self, identity: bytes, message: ControlMessage) -> None:
        try:
            self._socket.send([identity, *CONTROL.encode(message)])
        except Unsendable as error:
            logger().debug("control_not_sent", peer=repr(identity), reason=str(error))

    def _offered(self, peer: _Peer, offer: Offer) -> None:
        refusal = ""
        if peer.link.state != "up" or offer.incarnation != peer.link.incarnation:
            refusal = f"the link of {peer.link.name} is {peer.link.state}"
        elif offer.transfer_id in self._ended:
            refusal = self._ended[offer.transfer_id]
        elif any(offer.transfer_id in other.transfers for other in self._peers.values()):
            refusal = "offered twice"
        elif fault := self._fault(offer):
            refusal = fault
            self._refusals.tell(peer.link.name, f"Offer: {fault}")
            self._note_ended(offer.transfer_id, fault)
        if refusal:
            self.send_to(peer.link.name, Abort(transfer_id=offer.transfer_id, reason=refusal))
            return
        deadline = self._clock.now() + offer.deadline_ms / 1000
        transfer = IncomingTransfer(self, peer, offer, deadline=deadline, clock=self._clock)
        peer.transfers[offer.transfer_id] = transfer
        self._metrics.transfers_open.inc()
        leg = self._legs.get(offer.transfer_id)
        if leg is not None and leg.peer == peer.link.name and not leg.offer.done():
            leg.offer.set_result(transfer)

    def _fault(self, offer: Offer) -> str:
        """What an offer cannot mean; "" if it can."""
        if len(offer.token_ids) % 4 or not 4 <= len(offer.token_ids) <= 4 * self._hello.max_model_len:
            return f"{len(offer.token_ids)} bytes of ids"
        ids = unpack(offer.token_ids)
        if min(ids) < 0 or max(ids) >= self.limits.vocab_size or offer.max_tokens < 1:
            return "ids outside the vocabulary, or nothing to be answered"
        if len(ids) + offer.max_tokens > self._hello.max_model_len:
            return f"{len(ids)} ids and {offer.max_tokens} to come, of {self._hello.max_model_len} at most"
        if not 0 <= offer.num_said < len(ids):
            return f"{offer.num_said} of {len(ids)} ids belong to the answer"
        return ""

    def _told(self, peer: _Peer, message: ControlMessage) -> None:
        assert not isinstance(message, Hello | Beat)
        transfer = peer.transfers.get(message.transfer_id)
        if transfer is None:
            if isinstance(message, Abort):
                self._note_ended(message.transfer_id, message.reason)
            return
        transfer.heard(message)
        self._end_if_nobody_waits(transfer)

    def _void(self, peer: _Peer, reason: str) -> None:
        for transfer in list(peer.transfers.values()):
            transfer.fail(TransferFailed(f"transfer {transfer.id}: {reason}", peer_gone=True), "peer_lost")
            self._end_if_nobody_waits(transfer)
        for leg in self._legs.values():
            if leg.peer == peer.link.name and not leg.offer.done():
                leg.offer.set_exception(TransferFailed(reason, peer_gone=True))

    def _end_if_nobody_waits(self, transfer: IncomingTransfer) -> None:
        """A failed transfer that no leg works on has nobody else to end it."""
        if transfer.error is not None and not transfer.is_taken:
            self._end(transfer, transfer.error)
