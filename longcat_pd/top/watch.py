"""The facts of a balancer's status page over HTTP: one snapshot, or one after the other for as long as it goes.

Owns both routes, what their refusals mean in words, and how a lost connection is taken up again. Draws nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httpx

from longcat_pd.clock import Clock

CONNECT_S = 2.0
ANSWER_S = 10.0  # a snapshot asks every instance first, a second each at the most
SILENCE_S = 15.0  # of events: the server says something every five seconds
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 10.0  # between two tries
PATIENCE_S = 900.0  # without any news; then nobody seems to wait for it

Facts = dict[str, Any]

_LISTS = ("wrong", "instances", "requests", "happened")


class NoFacts(Exception):
    """The balancer has not told them; ``str`` is a sentence. ``is_final``: another try would end the same."""

    def __init__(self, words: str, *, is_final: bool = False) -> None:
        super().__init__(words)
        self.is_final = is_final


@dataclass(frozen=True, kw_only=True)
class Balancer:
    """Whom to ask. ``url``: without a slash at its end; ``key``: of a client, where it wants one."""

    url: str
    key: bytes | None = field(default=None, repr=False)

    @property
    def headers(self) -> dict[bytes, bytes]:
        """What shows the key."""
        return {} if self.key is None else {b"authorization": b"Bearer " + self.key}

    def client(self, *, read_s: float) -> httpx.AsyncClient:
        """Calls of which none waits longer than ``read_s`` for the next byte."""
        limits = httpx.Timeout(CONNECT_S, read=read_s)
        return httpx.AsyncClient(base_url=self.url, headers=self.headers, timeout=limits, trust_env=False)


@dataclass(frozen=True, kw_only=True)
class News:
    """What is to be shown. ``facts``: the latest, None before the first; ``problem``: why there are no newer ones."""

    facts: Facts | None
    problem: str = ""


async def snapshot(balancer: Balancer) -> Facts:
    """The facts as they are now. Raises NoFacts."""
    try:
        async with balancer.client(read_s=ANSWER_S) as client:
            answer = await client.get("/status")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _unanswered(balancer, error) from error
    _check(balancer, answer.status_code)
    return _facts(balancer, answer.text)


async def news(balancer: Balancer, clock: Clock, *, told_to_end: asyncio.Event) -> AsyncGenerator[News, None]:
    """The facts each time that they come, and what is wrong with the connection each time that it is lost.

    Ends when ``told_to_end`` is set. Raises NoFacts for what another try does not mend, and after ``PATIENCE_S`` without.
    """
    facts: Facts | None = None
    heard_at, pause_s = clock.now(), FIRST_PAUSE_S
    while not told_to_end.is_set():
        try:
            async with aclosing(_events(balancer)) as events:
                async for facts in _until(events, told_to_end):
                    heard_at, pause_s = clock.now(), FIRST_PAUSE_S
                    yield News(facts=facts)
            if told_to_end.is_set():
                return
            problem = f"{balancer.url} has ended the connection"  # as it does every quarter of an hour
        except NoFacts as error:
            if error.is_final:
                raise
            problem = str(error)
        if clock.now() - heard_at > PATIENCE_S:
            raise NoFacts(f"{problem}; nothing came for {PATIENCE_S / 60:.0f} minutes", is_final=True)
        yield News(facts=facts, problem=f"{problem}; trying again, for {clock.now() - heard_at:.0f} s now")
        with suppress(TimeoutError):
            await clock.within(pause_s, told_to_end.wait())
        pause_s = min(2.0 * pause_s, LONGEST_PAUSE_S)


async def _until(events: AsyncGenerator[Facts, None], told_to_end: asyncio.Event) -> AsyncGenerator[Facts, None]:
    """The events that come before the end is told."""
    end = asyncio.ensure_future(told_to_end.wait())
    try:
        while True:
            following = asyncio.ensure_future(_next(events))
            try:
                await asyncio.wait({end, following}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not following.done():
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)
            if end.done() or (facts := following.result()) is None:
                return
            yield facts
    finally:
        end.cancel()


async def _next(events: AsyncGenerator[Facts, None]) -> Facts | None:
    return await anext(events, None)


async def _events(balancer: Balancer) -> AsyncGenerator[Facts, None]:
    """Until the server ends them. Raises NoFacts."""
    try:
        async with balancer.client(read_s=SILENCE_S) as client, client.stream("GET", "/status/events") as answer:
            _check(balancer, answer.status_code)
            async for line in answer.aiter_lines():
                if line.startswith("data: "):  # and no comment, which only keeps the connection
                    yield _facts(balancer, line.removeprefix("data: "))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _unanswered(balancer, error) from error


def _unanswered(balancer: Balancer, error: Exception) -> NoFacts:
    why = "it says nothing" if isinstance(error, httpx.TimeoutException) else str(error) or type(error).__name__
    is_final = isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol)
    return NoFacts(f"{balancer.url} does not answer: {why}", is_final=is_final)


def _check(balancer: Balancer, status: int) -> None:
    """Raises NoFacts for anything but 200."""
    if status == HTTPStatus.OK:
        return
    if status == HTTPStatus.UNAUTHORIZED:
        words = "wants a client's key: --key-file FILE" if balancer.key is None else "does not know this key"
        raise NoFacts(f"{balancer.url} {words}", is_final=True)
    if status == HTTPStatus.NOT_FOUND:
        raise NoFacts(f"{balancer.url} is no balancer, or an older one: it has no /status", is_final=True)
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        raise NoFacts(f"{balancer.url} is looked at by as many as may already")
    raise NoFacts(f"{balancer.url} answers with status {status}")


def _facts(balancer: Balancer, text: str) -> Facts:
    """Raises NoFacts for what no balancer says."""
    try:
        facts = json.loads(text)
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or not all(isinstance(facts.get(name), list) for name in _LISTS):
        raise NoFacts(f"{balancer.url} answers with something else than the facts of a cluster", is_final=True)
    return facts
