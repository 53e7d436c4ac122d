"""Running the requests of one body in the service, from the first token to the last.

Owns that choices run at once but stand in line one at a time, that one failing ends all, and that whatever ends the reading
closes what is open in the service. Does not know what an answer looks like.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from longcat_pd.engine.request import Delta, Request
from longcat_pd.errors import EngineFault, WorkerUnavailable
from longcat_pd.metrics import RequestMetrics
from longcat_pd.server.choice import ChoiceText, Piece
from longcat_pd.server.gate import Cut, Gate
from longcat_pd.server.journal import Journal, Record
from longcat_pd.server.merge import merged
from longcat_pd.server.openai import Body
from longcat_pd.server.requests import Call, PromptSource, RequestOf
from longcat_pd.server.service import NOTHING, Kept, Service, pair_of

T = TypeVar("T")

ReaderOf = Callable[[Body, Sequence[int], int], ChoiceText]


@dataclass(frozen=True, slots=True)
class _Begun:
    """The request of a choice is made."""

    index: int
    request: Request


class _Choices:
    """The requests of one body. Each is made when the one before it has room: a body has one place in every line, however
    many choices it has, so that nobody waits behind all of them, and a line is never full of one body.

    The first one opens the prompts, as part of its source: what ends a request ends also the wait for that.
    """

    def __init__(self, body: Body, open_prompts: Callable[[], Awaitable[RequestOf]]) -> None:
        self.body = body
        self._open_prompts = open_prompts
        self._request_of: RequestOf | None = None
        self._turns = [asyncio.Event() for _ in range(body.num_choices + 1)]
        self._turns[0].set()

    async def begin(self, index: int) -> _Begun:
        """Raises LongcatError."""
        await self._turns[index].wait()
        if self._request_of is None:
            self._request_of = await self._open_prompts()
        request = await self._request_of(index)
        return _Begun(index, replace(request, on_room=self._turns[index + 1].set, is_patient=index > 0))


class Running:
    """Runs bodies.

    Args:
        service: the instance.
        reader_of: the reader of a choice of a body, from the prompt's ids and the choice's number.
        gate: counts the bodies that run, and can cut them.
        metrics: where they are counted; None offline.
        kept: what is kept of each.
    """

    def __init__(
        self,
        service: Service,
        reader_of: ReaderOf,
        *,
        gate: Gate,
        metrics: RequestMetrics | None,
        kept: Kept = NOTHING,
    ) -> None:
        self._service = service
        self._reader_of = reader_of
        self._gate = gate
        self._journal = Journal(metrics, service.now, kept=kept, pair_with=partial(pair_of, service))

    @property
    def last_token(self) -> float | None:
        """When any request got a token, on the service's clock."""
        return self._journal.last_token

    @property
    def recent(self) -> list[dict[str, Any]]:
        """The bodies that came last, as they went so far; oldest first."""
        return self._journal.recent()

    def admit(self) -> None:
        """Raise what a new body is refused with now: draining, too many, starting."""
        self._gate.check()
        if self._service.readiness().is_starting:
            raise WorkerUnavailable("this server is starting", code="starting")

    async def pieces(
        self, body: Body, call: Call, prompts: PromptSource, *, begin: Callable[[int, Request], None]
    ) -> AsyncGenerator[Piece, None]:
        """The pieces of all choices, interleaved; ``begin`` is told of each request before. Raises LongcatError."""
        num_tokens: dict[int, int] = {}
        num_said = len(call.said_token_ids)
        with self._gate.enter() as cuts, self._journal.request(call) as record:
            choices = _Choices(body, partial(prompts.open, body, call))
            sources = [self._choice(choices, index, call, record=record) for index in range(body.num_choices)]
            async with aclosing(self._merged(sources, call, cuts=cuts, record=record)) as items:
                async for item in items:
                    if isinstance(item, _Begun):
                        record.prompts.begin(item.index // body.n, item.request)
                        begin(item.index, item.request)
                        continue
                    self._journal.token(record)
                    num_tokens[item.index] = item.num_tokens
                    record.num_output = max(sum(num_tokens.values()) - num_said, 0)
                    record.finish = item.finish_reason or record.finish
                    yield item

    async def hand_over(self, body: Body, call: Call, prompts: PromptSource) -> Record:
        """Prefill all choices and wait until their hand-overs are acknowledged. Raises LongcatError."""
        with self._gate.enter() as cuts, self._journal.request(call) as record:
            choices = _Choices(body, partial(prompts.open, body, call))
            sources = [self._hand_over(choices, index) for index in range(body.num_choices)]
            async with aclosing(self._merged(sources, call, cuts=cuts, record=record)) as items:
                async for item in items:
                    if isinstance(item, _Begun):
                        record.prompts.begin(item.index // body.n, item.request)
            record.finish = "stop"
        return record

    def _merged(
        self, sources: list[AsyncGenerator[T, None]], call: Call, *, cuts: list[Cut], record: Record
    ) -> AsyncGenerator[T, None]:
        left = call.deadline - self._service.now()
        leaving = partial(self._journal.leaving, record)
        return merged(sources, time_left_s=left, cuts=cuts, on_cut=call.cut.set, on_leaving=leaving)

    async def _choice(
        self, choices: _Choices, index: int, call: Call, *, record: Record
    ) -> AsyncGenerator[_Begun | Piece, None]:
        begun = await choices.begin(index)
        yield begun
        take = self._journal.take(record, begun.request, attempt=call.attempt)
        choice = self._reader_of(choices.body, begun.request.asked_token_ids, index)
        pieces: list[Piece] = []
        if call.resume is not None:  # a stream has been told what came of these ids
            pieces = choice.replay(begun.request.said_token_ids, were_sent=choices.body.stream)
        source = _nothing() if choice.is_finished else self._service.generate(begun.request)
        async with aclosing(source) as deltas:
            async for delta in deltas:
                if take is not None:
                    take.read(delta)
                pieces += choice.push(delta)
                if choice.is_finished:
                    break  # also in mid-generation: closing the generator frees what it holds, before the client is told
                for piece in pieces:
                    yield piece
                pieces = []
        if not choice.is_finished:
            raise EngineFault("an answer ended without a reason")
        if take is not None:
            num_replayed = 0 if call.resume is None else len(begun.request.said_token_ids)
            take.end(choice.finish_reason, choice.num_tokens - num_replayed)
        for piece in pieces:
            yield piece

    async def _hand_over(self, choices: _Choices, index: int) -> AsyncGenerator[_Begun | Delta, None]:
        begun = await choices.begin(index)
        yield begun
        async with aclosing(self._service.generate(begun.request)) as deltas:
            async for delta in deltas:
                yield delta


async def _nothing() -> AsyncGenerator[Delta, None]:
    """What is generated behind an end."""
    deltas: tuple[Delta, ...] = ()
    for delta in deltas:
        yield delta
