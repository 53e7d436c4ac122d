"""The attempts at one request, one after another: which pair, whether another follows, and what the client gets of each.

Owns the retry rule and failover: an answer that breaks after its beginning is finished by another pair, once, from the
ids that its worker has said. Does not know what cuts a request short: whoever runs a course may cancel it anywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from longcat_pd import log
from longcat_pd.clock import FAILOVER_WAIT_S
from longcat_pd.config.schema import LoadBalancerConfig
from longcat_pd.errors import WorkerUnavailable
from longcat_pd.load_balancer.attempt import Attempt, Call, Failover, LegFailed, Means, Piece, Whole
from longcat_pd.load_balancer.ledger import Ledger
from longcat_pd.load_balancer.pool import Avoid, Pair
from longcat_pd.load_balancer.progress import Progress, Tried, log_leg
from longcat_pd.load_balancer.replies import Failure
from longcat_pd.server import sse

RETRY_LEFT_S = 1.0  # with less than this of the deadline left there is no other attempt
MAX_DEATHS = 2  # of workers under one request, which may be their cause

JSON_HEAD = {"Content-Type": "application/json"}


class Client(Protocol):
    """Where an answer goes. ``is_started``: the head has been sent, so the status is fixed."""

    is_started: bool

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the head."""
        ...

    async def send(self, data: bytes) -> None:
        """Send a part of the body; waits while the client reads slowly."""
        ...

    async def finish(self, data: bytes = b"") -> None:
        """Send the last part of the body."""
        ...


class Course:
    """One request's way through its attempts, of which no two overlap.

    Args:
        progress: is kept up to date.
        on_piece: called for each piece of an answer that comes.
    """

    def __init__(
        self,
        means: Means,
        config: LoadBalancerConfig,
        *,
        call: Call,
        client: Client,
        progress: Progress,
        on_piece: Callable[[], None],
    ) -> None:
        self._means = means
        self._config = config
        self._call = call
        self._client = client
        self._progress = progress
        self._on_piece = on_piece
        self._ledger = Ledger()
        self._has_begun = False  # a piece of this attempt's answer has come
        self._num_deaths = 0

    async def run(self) -> None:
        """Until the client has its answer. Raises LegFailed, or WorkerUnavailable where there is no pair to begin with."""
        avoid: Avoid | None = None
        failed: LegFailed | None = None
        asks: Failover | None = "ids" if self._config.failover and self._call.is_single else None
        while True:
            pair = self._choose(avoid, failed)
            self._ledger = Ledger()
            incarnations = {instance: instance.incarnation for instance in (pair.prefill, pair.decode)}
            try:
                await self._attempt(Attempt(self._means, self._call, pair=pair, number=self._next(), failover=asks))
                return
            except LegFailed as error:
                failed = error
            self._learn(failed)
            avoid = _lesson(pair, failed)
            if self._can_resume(failed.failure):
                assert avoid.blamed is not None
                known = incarnations[avoid.blamed]
                await self._resume(failed, dataclasses.replace(avoid, never=True, incarnation=known))
                return
            if not self._may_retry(failed.failure):
                raise failed

    async def _attempt(self, attempt: Attempt) -> None:
        """One attempt, both of whose calls are closed when it is over. Raises LegFailed."""
        progress, self._has_begun = self._progress, False
        progress.pair = attempt.pair
        tried = Tried(
            number=progress.attempt,
            pair=attempt.pair.names,
            transfer_id=attempt.transfer_id,
            span_id=attempt.span_id,
            resumes=progress.failover is not None,
            began=self._means.clock.now(),
        )
        progress.tries.append(tried)
        try:
            async with attempt:
                self._tell_attempt(attempt)
                try:
                    await self._relay(attempt)
                    await attempt.settle()
                finally:
                    if progress.failover is None:  # else P's account is of another prompt
                        progress.prefilled = attempt.prefilled
        except LegFailed as failed:
            tried.error, tried.failed_at = failed.failure.name, failed.instance.name
            raise
        finally:
            tried.ended = self._means.clock.now()

    def _next(self) -> int:
        self._progress.attempt += 1
        return self._progress.attempt

    def _learn(self, failed: LegFailed) -> None:
        log_leg(failed, self._progress)
        self._num_deaths += failed.failure.is_death

    # ------------------------------------------------------------------ another attempt

    def _choose(self, avoid: Avoid | None, failed: LegFailed | None) -> Pair:
        try:
            return self._means.pool.choose(avoid)
        except WorkerUnavailable:
            if failed is None:
                raise
            raise failed from None  # no pair for another attempt: the client is told why the first one failed

    def _may_retry(self, failure: Failure) -> bool:
        """Whether the whole request may be tried again: the client has nothing of it."""
        is_retryable = failure.retryable or (self._config.failover and failure.code == "rank_lost")
        is_left = self._progress.attempt <= self._config.retry and self._num_deaths < MAX_DEATHS
        return is_retryable and is_left and not self._client.is_started and self._left_s() > RETRY_LEFT_S

    def _can_resume(self, failure: Failure) -> bool:
        """Whether the answer, whose beginning has come, may be finished by another pair."""
        is_known = self._has_begun and self._ledger.can_go_on
        return is_known and failure.is_break and self._num_deaths < MAX_DEATHS and self._left_s() > RETRY_LEFT_S

    def _left_s(self) -> float:
        return self._call.deadline - self._means.clock.now()

    async def _resume(self, broken: LegFailed, avoid: Avoid) -> None:
        """Finish the answer elsewhere. Raises ``broken`` if that does not even begin, else the LegFailed that ends it.

        A pair of which one refuses the connection is not there, so that the wait for one goes on.
        """
        broke_at = self._means.clock.now()
        until = broke_at + min(FAILOVER_WAIT_S, self._left_s() - RETRY_LEFT_S)
        call = dataclasses.replace(self._call, body=self._ledger.added_to(self._call.body))
        while True:
            self._progress.failover = "no_pair"
            pair = await self._another_pair(broken, avoid, until=until)
            self._progress.failover = "resumed"
            attempt = Attempt(self._means, call, pair=pair, number=self._next(), failover="resume")
            self._tell_failover(attempt, waited_s=self._means.clock.now() - broke_at)
            try:
                await self._attempt(attempt)
                return
            except LegFailed as error:
                failed = error
            self._learn(failed)
            if not failed.failure.is_refusal:
                raise failed if self._has_begun else broken

    async def _another_pair(self, broken: LegFailed, avoid: Avoid, *, until: float) -> Pair:
        """The first that can go on, as soon as there is one; to be used at once. Raises ``broken`` if none is in time."""
        clock, pool = self._means.clock, self._means.pool
        while (left_s := until - clock.now()) > 0:
            with suppress(WorkerUnavailable):
                return pool.choose(avoid)
            with suppress(TimeoutError):
                await clock.within(left_s, pool.news())
        raise broken

    def _tell_failover(self, attempt: Attempt, *, waited_s: float) -> None:
        log.logger().warning(
            "failover",
            old_transfer=self._progress.transfer_id,
            transfer=attempt.transfer_id,
            pair=attempt.pair.names,
            ids=len(self._ledger.ids),
            ms=round(waited_s * 1000),
        )

    def _tell_attempt(self, attempt: Attempt) -> None:
        old, self._progress.transfer_id = self._progress.transfer_id, attempt.transfer_id
        if old and self._progress.failover is None:
            self._means.metrics.balancer.retries_total.inc()
            log.logger().warning(
                "retry",
                attempt=self._progress.attempt,
                pair=attempt.pair.names,
                old_transfer=old,
                transfer=attempt.transfer_id,
            )

    # ------------------------------------------------------------------ the answer

    async def _relay(self, attempt: Attempt) -> None:
        """Pass the answer on. Raises LegFailed, before the first byte or after it."""
        await self._pass_on(await attempt.first())
        async for piece in attempt.rest():
            await self._pass_on(piece)
        if self._progress.told_at is None:
            await self._client.finish()
            self._progress.told_at = self._means.clock.now()

    async def _pass_on(self, piece: Piece) -> None:
        client, progress = self._client, self._progress
        self._has_begun = True
        self._on_piece()
        progress.last_sent = self._means.clock.now()
        if isinstance(piece, Whole):  # when its first token came is not to be seen from here
            progress.finish, progress.usage = piece.finish, piece.usage
            await client.start(200, {**JSON_HEAD, "Content-Length": str(len(piece.body))})
            await client.finish(piece.body)
            progress.told_at = self._means.clock.now()
            return
        self._ledger.note(piece)
        for event in piece:
            progress.finish = event.finish or progress.finish
            progress.usage = event.usage or progress.usage
        if not self._call.is_stream:
            return
        progress.first_token = progress.first_token or progress.last_sent
        if not client.is_started:
            await client.start(200, sse.HEADERS)
        await client.send(b"".join(event.raw for event in piece))


def _lesson(pair: Pair, failed: LegFailed) -> Avoid:
    """What the next attempt keeps away from. An echo blames the side that is gone, not the one that tells it."""
    blamed = failed.instance
    if failed.failure.cause == "peer":
        blamed = pair.decode if blamed is pair.prefill else pair.prefill
    return Avoid(
        pair=pair,
        blamed=blamed,
        same_pair=failed.failure.code == "transfer_failed",
        never=failed.failure.is_load or failed.failure.code == "rank_lost",
    )
