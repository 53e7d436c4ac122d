"""A client's request from its acceptance to its one end: attempts, the relay of the answer, and what cuts it short.

Owns the retry rule. Knows the client only as something that takes a head and bytes, so that
the end-to-end probe is a client like any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from longcat_pd import log
from longcat_pd.config.schema import LoadBalancerConfig
from longcat_pd.errors import DeadlineExceeded, LongcatError, WorkerUnavailable
from longcat_pd.load_balancer.attempt import Attempt, Call, LegFailed, Means, Piece, Whole
from longcat_pd.load_balancer.pool import Avoid, Pair
from longcat_pd.load_balancer.replies import Event, Failure, failure_of
from longcat_pd.server import sse
from longcat_pd.server.errors import error_headers, error_object, to_json
from longcat_pd.server.gate import Cut

RETRY_LEFT_S = 1.0  # with less than this of the deadline left there is no other attempt
FAREWELL_S = 1.0  # how long a client that does not read may hold up its own error

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


@dataclass(kw_only=True)
class Progress:
    """How far a request has come; written by its own coroutine, read for its log line."""

    started: float
    counts: bool = True  # false for probes, which request metrics and the log leave out
    pair: Pair | None = None
    transfer_id: str = ""
    attempt: int = 0
    first_token: float | None = None
    finish: str | None = None
    prefilled: Mapping[str, Any] | None = None
    failure: Failure | None = None
    failed_at: str | None = None
    is_told: bool = False  # the client has the whole answer
    cut_by: str | None = None  # client, deadline, drain
    last_sent: float = 0.0

    @property
    def pair_names(self) -> tuple[str, ...]:
        """For the log."""
        return self.pair.names if self.pair is not None else ()


@dataclass(frozen=True)
class Proof:
    """The last time that a token came out of a pair."""

    at: float
    pair: tuple[str, str]


class Proxy:
    """Serves clients through the pool."""

    def __init__(self, means: Means, config: LoadBalancerConfig) -> None:
        self.proof: Proof | None = None
        self._means = means
        self._config = config

    async def serve(
        self, call: Call, client: Client, *, gone: Awaitable[Any], cuts: list[Cut], counts: bool = True
    ) -> Progress:
        """Answer one request. Returns when the client has its answer or error, or has gone.

        Args:
            gone: is done when the client has closed its connection.
            cuts: of the gate; to be told when the request has to end with an error.
            counts: false for a probe.
        """
        progress = Progress(started=self._means.clock.now(), counts=counts)
        try:
            await self._until_cut(call, client, progress=progress, gone=gone, cuts=cuts)
        except LegFailed as failed:
            progress.failure, progress.failed_at = failed.failure, failed.instance.name
        except LongcatError as error:
            progress.failure = failure_of(error)
        except asyncio.CancelledError:
            progress.cut_by = "drain"
            raise
        finally:
            if progress.counts:
                self._account(progress)
        if progress.failure is not None:
            await self._tell(call, client, progress.failure)
        return progress

    async def _until_cut(
        self, call: Call, client: Client, *, progress: Progress, gone: Awaitable[Any], cuts: list[Cut]
    ) -> None:
        """Run the request until it ends by itself, the client goes, its time is over, or the gate cuts it."""
        clock = self._means.clock
        cut: asyncio.Future[LongcatError] = asyncio.get_running_loop().create_future()
        cuts.append(lambda error: None if cut.done() else cut.set_result(error))
        work = asyncio.ensure_future(self._attempts(call, client, progress))
        left = asyncio.ensure_future(gone)
        late = asyncio.ensure_future(clock.sleep(call.deadline - clock.now()))
        helpers: list[asyncio.Future[Any]] = [left, late, cut]
        if call.is_stream and self._config.keepalive_comment_s > 0:
            helpers.append(asyncio.ensure_future(self._keep_alive(client, progress)))
        try:
            ends: set[asyncio.Future[Any]] = {work, left, late, cut}
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if progress.is_told and work not in done:  # who has the whole answer may go while the legs are closed
                done, _ = await asyncio.wait(ends - {left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # whatever ended it, the calls to the workers are closed before anything else happens
            await _end(work, *helpers)
        if not work.cancelled():
            work.result()
        elif left in done:
            progress.cut_by = "client"
        elif late in done:
            progress.cut_by = "deadline"
            raise DeadlineExceeded("the time of the request is over")
        else:
            progress.cut_by = "drain"
            raise cut.result()

    async def _attempts(self, call: Call, client: Client, progress: Progress) -> None:
        avoid: Avoid | None = None
        failed: LegFailed | None = None
        while True:
            progress.pair = self._choose(avoid, failed)
            progress.attempt += 1
            try:
                async with Attempt(self._means, call, pair=progress.pair, number=progress.attempt) as attempt:
                    self._note_attempt(attempt, progress)
                    try:
                        await self._relay(attempt, client, progress)
                    finally:
                        progress.prefilled = attempt.prefilled
                    return
            except LegFailed as error:
                failed = error
                _log_leg(error, progress)
                if not self._may_retry(call, client, failure=error.failure, attempt=progress.attempt):
                    raise
            avoid = _lesson(progress.pair, failed)

    def _choose(self, avoid: Avoid | None, failed: LegFailed | None) -> Pair:
        try:
            return self._means.pool.choose(avoid)
        except WorkerUnavailable:
            if failed is None:
                raise
            raise failed from None  # no pair for another attempt: the client is told why the first one failed

    def _may_retry(self, call: Call, client: Client, *, failure: Failure, attempt: int) -> bool:
        left = call.deadline - self._means.clock.now()
        return failure.retryable and attempt <= self._config.retry and not client.is_started and left > RETRY_LEFT_S

    async def _relay(self, attempt: Attempt, client: Client, progress: Progress) -> None:
        """Pass the answer on. Raises LegFailed, before the first byte or after it."""
        first = await attempt.first()
        self._note(first, progress)
        if isinstance(first, Whole):  # when its first token came is not to be seen from here
            await client.start(200, {**JSON_HEAD, "Content-Length": str(len(first.body))})
            await client.finish(first.body)
            progress.is_told = True
            return
        progress.first_token = progress.last_sent
        if not client.is_started:
            await client.start(200, sse.HEADERS)
        await client.send(_raw(first))
        async for piece in attempt.rest():
            assert not isinstance(piece, Whole)
            self._note(piece, progress)
            await client.send(_raw(piece))
        await client.finish()
        progress.is_told = True

    def _note_attempt(self, attempt: Attempt, progress: Progress) -> None:
        old, progress.transfer_id = progress.transfer_id, attempt.transfer_id
        if old:
            self._means.metrics.balancer.retries_total.inc()
            log.logger().warning(
                "retry", attempt=progress.attempt, pair=attempt.pair.names, old_transfer=old, transfer=attempt.transfer_id
            )

    def _note(self, piece: Piece, progress: Progress) -> None:
        assert progress.pair is not None
        now = self._means.clock.now()
        if progress.counts:
            self.proof = Proof(now, progress.pair.names)
        progress.last_sent = now
        for event in (piece,) if isinstance(piece, Whole) else piece:
            progress.finish = event.finish or progress.finish

    async def _keep_alive(self, client: Client, progress: Progress) -> None:
        """A comment after each silent time, which also fixes the status at 200."""
        silent_s = self._config.keepalive_comment_s
        progress.last_sent = self._means.clock.now()
        while True:
            await self._means.clock.sleep(progress.last_sent + silent_s - self._means.clock.now())
            if self._means.clock.now() - progress.last_sent < silent_s:
                continue
            progress.last_sent = self._means.clock.now()
            if not client.is_started:
                await client.start(200, sse.HEADERS)
            await client.send(sse.KEEP_ALIVE)

    async def _tell(self, call: Call, client: Client, failure: Failure) -> None:
        """The failure as a status, or as the last event of a stream that has begun."""
        if failure.error is not None:
            body = to_json(error_object(failure.error, call.request_id))
            headers: Mapping[str, str] = error_headers(failure.error, is_worker=False)
        else:
            body, headers = failure.body, failure.headers
        try:
            await self._means.clock.within(FAREWELL_S, _send_error(client, failure.status, headers=headers, body=body))
        except TimeoutError:
            log.logger().debug("client_does_not_read")

    def _account(self, progress: Progress) -> None:
        """The one log line of a request, and its metrics."""
        failure, cut_by = progress.failure, progress.cut_by
        requests, now = self._means.metrics.requests, self._means.clock.now()
        facts: dict[str, Any] = {
            "transfer": progress.transfer_id,
            "pair": progress.pair_names,
            "attempt": progress.attempt,
            "ms": round((now - progress.started) * 1000),
        }
        hop = "decoding" if progress.first_token is not None else "prefilling"
        if cut_by is not None:
            requests.cancels_total(cut_by).inc()
        if failure is not None:
            requests.requests_total(failure.code).inc()
            is_defect = failure.status >= 500 and failure.cause == "self"
            tell = log.logger().error if is_defect else log.logger().warning
            tell("request_failed", status=failure.status, code=failure.code, cause=failure.cause, hop=hop, **facts)
        elif cut_by is not None:
            requests.requests_total("cancelled").inc()
            log.logger().info("request_cancelled", by=cut_by, hop=hop, **facts)
        else:
            requests.requests_total(progress.finish or "stop").inc()
            requests.request_seconds.observe(now - progress.started)
            if progress.first_token is not None:
                facts["ttft_ms"] = round((progress.first_token - progress.started) * 1000)
                requests.first_token_seconds.observe(progress.first_token - progress.started)
            log.logger().info("request_finished", finish=progress.finish, **facts, **_prefill_facts(progress.prefilled))


async def _send_error(client: Client, status: int, *, headers: Mapping[str, str], body: bytes) -> None:
    if client.is_started:
        await client.finish(b"data: " + body + b"\n\n")
    else:
        await client.start(status, {**JSON_HEAD, "Content-Length": str(len(body)), **headers})
        await client.finish(body)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what is not done yet and wait until nothing of it runs."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _raw(events: list[Event]) -> bytes:
    return b"".join(event.raw for event in events)


def _lesson(pair: Pair, failed: LegFailed) -> Avoid:
    """What the next attempt keeps away from. An echo blames the side that is gone, not the one that tells it."""
    blamed = failed.instance
    if failed.failure.cause == "peer":
        blamed = pair.decode if blamed is pair.prefill else pair.prefill
    return Avoid(
        pair=pair,
        blamed=blamed,
        same_pair=failed.failure.code == "transfer_failed",
        never=failed.failure.cause == "load",
    )


def _log_leg(failed: LegFailed, progress: Progress) -> None:
    is_clients = failed.failure.cause == "client"  # such a message quotes the request
    log.logger().warning(
        "leg_failed",
        leg=failed.instance.target.role,
        target=failed.instance.name,
        cause=failed.failure.cause,
        code=failed.failure.code,
        reason=None if is_clients else failed.failure.reason,
        attempt=progress.attempt,
        transfer=progress.transfer_id,
    )


def _prefill_facts(prefilled: Mapping[str, Any] | None) -> dict[str, Any]:
    """The figures of P's account that are numbers, under the names of the log."""
    if prefilled is None:
        return {}
    given = prefilled.get("timings_ms")
    timings = given if isinstance(given, dict) else {}
    facts = {f"{name}_ms": timings.get(name) for name in ("queue", "prefill", "transfer")}
    facts["prompt"] = prefilled.get("prompt_tokens")
    return {name: round(value, 1) for name, value in facts.items() if isinstance(value, (int, float))}
