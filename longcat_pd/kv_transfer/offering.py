"""Prefill side of hand-overs: a link to every decode instance, and offers made over it.

Owns the sockets and the transfers that are open. Knows nothing of the engine: a granted offer is a ``Push`` record.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from longcat_pd.clock import HEARTBEAT_S, Clock
from longcat_pd.config.schema import PeerAddress
from longcat_pd.errors import LongcatError, Overloaded, TransferFailed, WorkerUnavailable
from longcat_pd.kv_transfer.control import CONTROL, ControlSocket, Link, LinkState, OpenTransfer, log_abort
from longcat_pd.kv_transfer.messages import (
    Abort,
    Ack,
    Beat,
    Commit,
    ControlMessage,
    Grant,
    Hello,
    Offer,
    Push,
    Refuse,
)
from longcat_pd.log import Refusals, logger
from longcat_pd.metrics import TransferMetrics
from longcat_pd.wire import MalformedRecord, Unsendable, unpack

GRANT_MARGIN_S = 1.0  # the decode side judges first
_OFFERED_KEPT = 4096  # more than are open, or have ended and ranks know of, at once


class OutgoingTransfer(OpenTransfer):
    """A hand-over that was offered. ``push`` is set once it is granted. ``grant_s``: the longest wait for that."""

    def __init__(self, offer: Offer, peer: _Peer, *, deadline: float, clock: Clock, grant_s: float) -> None:
        super().__init__(offer.transfer_id, peer.link.name, deadline=deadline, clock=clock)
        self.push: Push | None = None
        self.is_acknowledged = False
        self._offer = offer
        self._peer = peer
        self._grant_s = grant_s
        self._granted: asyncio.Future[Push] = asyncio.get_running_loop().create_future()
        self._acknowledged = asyncio.Event()

    async def grant(self) -> Push:
        """Offer, and wait for the answer. Raises what the decode side refuses with."""
        self._peer.send(self._offer)
        self.push = await self.within(self._grant_s, self._granted, "answer to the offer")
        return self.push

    def commit(self, commit: Commit) -> None:
        """The prompt is computed; the cache may still be on its way."""
        self._peer.send(commit)

    async def acknowledged(self) -> None:
        """Wait until everything has arrived. Raises TransferFailed."""
        await self.within(self._peer.greeting.acks_within_s, self._acknowledged.wait(), "acknowledgement")
        self.is_acknowledged = True

    def abort(self, reason: str) -> None:
        """Tell the peer, unless it knows."""
        if not self.is_ended_by_peer:
            self._peer.send(Abort(transfer_id=self.id, reason=reason))

    def heard(self, message: ControlMessage) -> None:
        """What the peer says about this transfer."""
        if isinstance(message, Grant) and not self._granted.done():
            try:
                self._granted.set_result(self._peer.push_for(message, self._offer))
            except MalformedRecord as refused:
                self.fail(TransferFailed(f"transfer {self.id}: the grant of {self.peer} cannot be: {refused}"))
        elif isinstance(message, Refuse):
            self.fail(_refusal(message, self.peer), by_peer=True)
        elif isinstance(message, Ack):
            self._acknowledged.set()
        elif isinstance(message, Abort):
            error = TransferFailed(f"transfer {self.id}: {self.peer} gave up: {message.reason}", peer_gone=True)
            self.fail(error, by_peer=True)


def _refusal(message: Refuse, peer: str) -> LongcatError:
    """What the decode side answers to its own leg, repeated: the balancer must blame that side and not this one."""
    text = f"{peer}: {message.message}"
    if message.code == "overloaded":
        error: LongcatError = Overloaded(text)
    elif message.code in ("starting", "draining"):
        error = WorkerUnavailable(text, code=message.code)
    else:
        error = TransferFailed(text)
    error.cause = "peer"
    return error


@dataclass(eq=False)
class _Peer:
    """One decode instance."""

    link: Link
    socket: ControlSocket
    transfers: dict[str, OutgoingTransfer] = field(default_factory=dict)
    greeted_at: float = -math.inf

    @property
    def greeting(self) -> Hello:
        """What it has said of itself; of a link that is or was up."""
        assert self.link.theirs is not None, "before the greeting"
        return self.link.theirs

    def greet(self, hello: Hello, now: float) -> None:
        """Say who we are; the answer is a greeting too. Once for each heartbeat, or the two would never fall silent."""
        if now - self.greeted_at >= HEARTBEAT_S:
            self.greeted_at = now
            self.send(hello)

    def send(self, message: ControlMessage) -> None:
        """To a peer that is away: silence ends what waits for an answer."""
        try:
            self.socket.send(CONTROL.encode(message))
        except Unsendable as error:
            logger().debug("control_not_sent", peer=self.link.name, reason=str(error))

    def push_for(self, grant: Grant, offer: Offer) -> Push:
        """Where the cache goes. Raises MalformedRecord for a grant that no rank could follow."""
        theirs = self.greeting
        blocks, needed = unpack(grant.blocks), -(-len(offer.token_ids) // (4 * theirs.block_size))
        if grant.incarnation != theirs.incarnation:
            raise MalformedRecord(f"it is of another life, {grant.incarnation[:40]}")
        if not 0 <= grant.group < theirs.dp_size or not 0 <= grant.split_start < theirs.kvp_size or grant.generation < 0:
            raise MalformedRecord(f"group {grant.group}, split_start {grant.split_start}, generation {grant.generation}")
        if len(blocks) < needed or min(blocks, default=0) < 1 or not 0 <= grant.first_block <= needed:
            raise MalformedRecord(f"{len(blocks)} blocks from {grant.first_block} on, {needed} needed")
        return Push(
            transfer_id=grant.transfer_id,
            peer=self.link.name,
            peer_incarnation=grant.incarnation,
            lane_host=theirs.lane_host,
            lane_port=theirs.lane_port,
            kvp_size=theirs.kvp_size,
            first_rank=grant.group * theirs.kvp_size,
            blocks=grant.blocks,
            split_start=grant.split_start,
            generation=grant.generation,
            first_block=grant.first_block,
        )


class Offering:
    """The links of a prefill driver.

    Args:
        hello: what this instance says of itself.
        peers: the decode instances of the configuration.
        connect: makes the socket to one of them (a DEALER).
    """

    def __init__(
        self,
        hello: Hello,
        peers: Sequence[PeerAddress],
        *,
        connect: Callable[[PeerAddress], ControlSocket],
        clock: Clock,
        metrics: TransferMetrics,
    ) -> None:
        self.news = asyncio.Event()  # set when a peer has greeted
        self._hello = hello
        self._clock = clock
        self._metrics = metrics
        self._refusals = Refusals()
        self._peers = {p.name: _Peer(Link(p.name, hello, clock), connect(p)) for p in peers}
        self._offered: OrderedDict[str, None] = OrderedDict()  # ids of transfers, to whomever

    def states(self) -> dict[str, LinkState]:
        """By name of the peer."""
        return {name: peer.link.state for name, peer in self._peers.items()}

    def links(self) -> list[Link]:
        """For the greeting at the start."""
        return [peer.link for peer in self._peers.values()]

    @property
    def num_open(self) -> int:
        """Transfers without an end."""
        return sum(len(peer.transfers) for peer in self._peers.values())

    async def run(self) -> None:
        """Greet, beat and listen; until cancelled."""
        work = [self._listen(peer) for peer in self._peers.values()]
        tasks = [asyncio.ensure_future(w) for w in [self._beat(), *work]]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for peer in self._peers.values():
                peer.socket.close()

    @asynccontextmanager
    async def offer(
        self, offer: Offer, *, peer: str, deadline: float, is_patient: bool = False
    ) -> AsyncIterator[OutgoingTransfer]:
        """A granted transfer. Leaving it unacknowledged, in any way, ends it on both sides. ``is_patient``: only the
        deadline ends the wait for the grant.

        Raises:
            WorkerUnavailable: no such peer in the configuration.
            TransferFailed, Overloaded, DeadlineExceeded.
        """
        there = self._peers.get(peer)
        if there is None:
            raise WorkerUnavailable(f"{peer} is not in the configuration of {self._hello.name}", param="X-Longcat-Peer")
        if there.link.state != "up":
            raise TransferFailed(f"the link to {peer} is {there.link.state}", peer_gone=True)
        if offer.transfer_id in self._offered:  # ranks and blocks know a transfer by its id alone
            raise TransferFailed(f"transfer {offer.transfer_id} was offered before")
        self._offered[offer.transfer_id] = None
        if len(self._offered) > _OFFERED_KEPT:
            self._offered.popitem(last=False)
        grant_s = math.inf if is_patient else there.greeting.pairs_within_s + GRANT_MARGIN_S
        transfer = OutgoingTransfer(offer, there, deadline=deadline, clock=self._clock, grant_s=grant_s)
        there.transfers[offer.transfer_id] = transfer
        self._metrics.transfers_open.inc()
        try:
            await transfer.grant()
            yield transfer
        finally:
            del there.transfers[offer.transfer_id]
            self._metrics.transfers_open.dec()
            if not transfer.is_acknowledged:
                reason = transfer.error.message if transfer.error is not None else "the request has left"
                transfer.abort(reason)
                log_abort(transfer, reason)
            self._metrics.transfers_total("committed" if transfer.is_acknowledged else transfer.outcome).inc()

    async def _beat(self) -> None:
        before = self._clock.now()
        while True:
            now = self._clock.now()
            for peer in self._peers.values():
                peer.link.forgive(max(now - before - 2 * HEARTBEAT_S, 0.0))
                if peer.link.is_silent():
                    self._void(peer, f"{peer.link.name} is silent")
                is_up = peer.link.state == "up"
                beat = Beat(name=self._hello.name, incarnation=self._hello.incarnation)
                if is_up:
                    peer.send(beat)
                else:
                    peer.greet(self._hello, now)
            before = now
            await self._clock.sleep(HEARTBEAT_S)

    async def _listen(self, peer: _Peer) -> None:
        while True:
            frames = await peer.socket.recv()
            try:
                message = CONTROL.decode(frames)
            except MalformedRecord as error:
                self._refusals.tell(peer.link.name, str(error))
                continue
            self._heard(peer, message)

    def _heard(self, peer: _Peer, message: ControlMessage) -> None:
        if isinstance(message, Hello):
            self.news.set()
            if peer.link.greeted(message):
                self._void(peer, f"{peer.link.name} was started again")
            peer.greet(self._hello, self._clock.now())  # if this is no answer, it does not know our socket (any more)
            return
        if isinstance(message, Beat):
            if not peer.link.beat(message.incarnation):
                peer.greet(self._hello, self._clock.now())
            return
        transfer = peer.transfers.get(message.transfer_id)
        if transfer is not None:
            transfer.heard(message)

    def _void(self, peer: _Peer, reason: str) -> None:
        for transfer in peer.transfers.values():
            transfer.fail(TransferFailed(f"transfer {transfer.id}: {reason}", peer_gone=True), "peer_lost")
