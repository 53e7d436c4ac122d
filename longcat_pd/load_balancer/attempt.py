"""One attempt at a request: the same body to one P and one D at once, and which of their answers counts.

Owns both calls and ends both, however it is left. Does not retry and does not know the client.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from longcat_pd.clock import ECHO_HOLD_S, Clock
from longcat_pd.errors import BadWorkerAnswer, LongcatError
from longcat_pd.load_balancer.events import MAX_ANSWER_BYTES, MAX_EVENT_BYTES, Event, EventReader, Groups
from longcat_pd.load_balancer.pool import Instance, Pair, Pool
from longcat_pd.load_balancer.replies import (
    Failure,
    Usage,
    check_answer,
    check_prefilled,
    check_stream_head,
    error_reply,
    failure_of,
    finish_reason,
    is_event_stream,
    usage_of,
)
from longcat_pd.load_balancer.workers import Incoming, WorkerCut, WorkerRefused, Workers
from longcat_pd.metrics import Metrics
from longcat_pd.server.tracing import Trace, Tracer

TRAILER_S = 1.0  # how long the end of a stream's body may come after its last event
SETTLE_S = 1.0  # how long P's call may go on when D's has answered

Failover = Literal["ids", "resume"]  # D is asked to say the ids of its answer, or to go on with another's


@dataclass(frozen=True, kw_only=True)
class Call:
    """A checked request of a client. ``deadline`` is on the balancer's clock; ``trace`` holds headers that travel on;
    ``traced``: the trace that it belongs to, where this process tells of it.

    ``is_single``: the answer has one choice, so that another pair can go on with it.
    """

    route: str
    body: bytes = field(repr=False)
    request_id: str
    deadline: float
    is_stream: bool
    is_single: bool = False
    trace: Mapping[str, str] = field(default_factory=dict)
    traced: Trace | None = None


class LegFailed(Exception):
    """A call to an instance has no good answer."""

    def __init__(self, instance: Instance, failure: Failure) -> None:
        super().__init__(f"{instance.name}: {failure.code}")
        self.instance = instance
        self.failure = failure


@dataclass(frozen=True)
class Whole:
    """D's answer to a call that does not stream."""

    body: bytes = field(repr=False)
    finish: str | None
    usage: Usage | None


Piece = Whole | list[Event]


@dataclass(frozen=True, kw_only=True)
class Means:
    """What every attempt works with."""

    pool: Pool
    workers: Workers
    clock: Clock
    metrics: Metrics
    tracer: Tracer | None = None


class Attempt:
    """Both calls of one attempt, as a context: open from entry, closed on both sides when it is left."""

    def __init__(self, means: Means, call: Call, *, pair: Pair, number: int, failover: Failover | None = None) -> None:
        self.transfer_id = secrets.token_hex(16)
        self.pair = pair
        self.prefilled: Mapping[str, Any] | None = None  # P's account, once it has given it
        self._means = means
        self._call = call
        self._number = number
        self._failover = failover
        self._counted = (ExitStack(), ExitStack())
        self._pieces = self._decode()
        self._tasks: tuple[asyncio.Task[None], asyncio.Task[Piece]]

    @property
    def span_id(self) -> str:
        """Of the attempt, of which both calls are parts."""
        return self.transfer_id[:16]

    async def __aenter__(self) -> Attempt:
        for counted, instance in zip(self._counted, (self.pair.prefill, self.pair.decode), strict=True):
            counted.enter_context(self._means.pool.leg(instance, len(self._call.body)))
        self._tasks = (asyncio.create_task(self._prefill()), asyncio.create_task(self._first_piece()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        closing = asyncio.ensure_future(self._close())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing  # a leg counts until it is closed, whatever else ends meanwhile
            raise

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._pieces.aclose()
        for counted in self._counted:
            counted.close()
        del self._tasks  # what they ended with holds their frames, and so this object

    async def first(self) -> Piece:
        """D's first piece: from here on this attempt is the answer. Raises LegFailed with the cause, not with its echo.

        Of a call that does not stream the piece may be ids alone. An error that only says that the other side is gone is
        held for 200 ms, in which the other leg may give the cause.
        """
        prefill, decode = self._tasks
        waiting: set[asyncio.Task[Any]] = {prefill, decode}
        hold: asyncio.Task[None] | None = None
        echo: LegFailed | None = None
        try:
            while True:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if decode in done and decode.exception() is None:
                    return decode.result()
                echo = _judge([task for task in (prefill, decode) if task in done], echo)
                waiting -= done
                if echo is not None and (hold in done or not waiting & {prefill, decode}):
                    raise echo
                if echo is not None and hold is None:
                    hold = asyncio.create_task(self._means.clock.sleep(ECHO_HOLD_S))
                    waiting.add(hold)
        finally:
            if hold is not None:
                hold.cancel()

    def rest(self) -> AsyncIterator[Piece]:
        """The pieces after the first. Raises LegFailed."""
        return self._pieces

    async def settle(self) -> None:
        """Once D's answer is whole: P's call may end by itself, so that its account is complete, for a short time.

        D hears of the last arrival as soon as P of the last sending, and a call that is closed before looks like a cancel.
        """
        prefill, _ = self._tasks
        late = asyncio.create_task(self._means.clock.sleep(SETTLE_S))
        try:
            await asyncio.wait({prefill, late}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            late.cancel()

    async def _prefill(self) -> None:
        pair = self.pair
        with self._counted[0]:
            async with self._leg(pair.prefill, peer=pair.decode) as incoming:
                self.prefilled = check_prefilled(await incoming.whole())

    async def _first_piece(self) -> Piece:
        return await anext(self._pieces)

    async def _decode(self) -> AsyncGenerator[Piece, None]:
        """D's pieces; a whole answer comes last, when its call has been closed."""
        pair = self.pair
        whole: Whole | None = None
        with self._counted[1]:
            async with (
                self._leg(pair.decode, peer=pair.prefill) as incoming,
                aclosing(self._read(incoming)) as pieces,
            ):
                async for piece in pieces:
                    if isinstance(piece, Whole):
                        whole = piece
                    else:
                        yield piece
            if whole is not None:
                yield whole

    async def _read(self, incoming: Incoming) -> AsyncGenerator[Piece, None]:
        """Groups of events, and a whole answer in either form. Raises LegFailed, WorkerCut, BadWorkerAnswer."""
        is_whole, hears = not self._call.is_stream, self._failover == "ids"
        if not is_whole:
            check_stream_head(incoming.headers)
        elif not hears or not is_event_stream(incoming.headers):
            reply = await incoming.whole()
            answer = check_answer(reply)
            yield Whole(reply.body, finish_reason(answer["choices"]), usage_of(answer.get("usage")))
            return
        reader = EventReader(hears=hears, max_bytes=MAX_ANSWER_BYTES if is_whole else MAX_EVENT_BYTES)
        groups = Groups(is_whole=is_whole)
        async with aclosing(incoming.chunks()) as chunks:
            async for chunk in chunks:
                events = reader.feed(chunk)
                failure = events[-1].failure if events else None
                if group := groups.take(events if failure is None else events[:-1]):
                    yield _assembled(group) if is_whole and group[-1].is_done else group
                if failure is not None:
                    raise LegFailed(self.pair.decode, failure)
                if reader.is_over:
                    # read on to the end of the body: closing before it would look like a cancel to the worker
                    await self._trailer(chunks)
                    return
        reader.end()

    async def _trailer(self, chunks: AsyncGenerator[bytes, None]) -> None:
        try:
            await self._means.clock.within(TRAILER_S, _drained(chunks))
        except (TimeoutError, WorkerCut):
            return  # the answer is complete

    @asynccontextmanager
    async def _leg(self, instance: Instance, *, peer: Instance) -> AsyncIterator[Incoming]:
        """One call whose good head is here; its failure and its good end are reported to the pool."""
        try:
            url = instance.target.url + self._call.route
            async with self._means.workers.open(
                url, body=self._call.body, headers=self._headers(peer), worker=instance.name
            ) as incoming:
                if incoming.status != 200:
                    raise LegFailed(instance, error_reply(await incoming.whole()))
                yield incoming
        except LegFailed as failed:
            self._report(failed)
            raise
        except LongcatError as error:
            if isinstance(error, WorkerRefused):
                self._means.pool.refused(instance)
            translated = LegFailed(instance, failure_of(error))
            self._report(translated)
            raise translated from error
        self._means.pool.succeeded(instance)

    def _report(self, failed: LegFailed) -> None:
        role, cause = failed.instance.target.role, failed.failure.cause
        self._means.metrics.balancer.leg_failures_total(role, cause).inc()
        if failed.failure.counts:
            self._means.pool.failed(failed.instance)

    def _headers(self, peer: Instance) -> dict[str, str]:
        traced = self._call.traced
        left_ms = int((self._call.deadline - self._means.clock.now()) * 1000)
        return {
            **self._call.trace,
            **({} if traced is None else {"traceparent": traced.passed_on(self.span_id)}),
            **({"x-longcat-failover": self._failover} if self._failover else {}),
            "content-type": "application/json",
            "x-request-id": self._call.request_id,
            "x-longcat-transfer-id": self.transfer_id,
            "x-longcat-peer": peer.name,
            "x-longcat-deadline-ms": str(max(left_ms, 1)),
            "x-longcat-attempt": str(self._number),
        }


def _assembled(group: list[Event]) -> Whole:
    """The one answer that a worker sent as a stream. Raises BadWorkerAnswer."""
    answers = [event for event in group[:-1] if event.raw]
    if len(answers) != 1:
        raise BadWorkerAnswer(f"a decode instance sent {len(answers)} answers to one call")
    usage = next((event.usage for event in group if event.usage is not None), None)
    return Whole(answers[0].data, answers[0].finish, usage)


def _judge(done: list[asyncio.Task[Any]], echo: LegFailed | None) -> LegFailed | None:
    """Raise the cause among the legs that have ended, the client's own first; else what is only an echo."""
    own: list[LegFailed] = []
    for task in done:
        error = task.exception()
        if error is None:
            continue
        if not isinstance(error, LegFailed):
            raise error
        if error.failure.cause == "peer":
            echo = echo or error
        else:
            own.append(error)
    if own:
        raise min(own, key=lambda failed: failed.failure.cause != "client")
    return echo


async def _drained(chunks: AsyncGenerator[bytes, None]) -> None:
    async for _ in chunks:
        pass
