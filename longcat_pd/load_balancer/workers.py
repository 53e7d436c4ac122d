"""Calls to the workers over HTTP. The one place that knows the client library; it translates what that raises.

Knows no attempts, no retries and no verdicts. Reads are without time-outs: silence on a call is not failure, and every
caller has a limit of its own.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import httpx

from longcat_pd.clock import CONNECT_TIMEOUT_S, Clock
from longcat_pd.errors import BadWorkerAnswer, Overloaded, WorkerUnavailable
from longcat_pd.load_balancer.transport import NoRoom, WorkerTransport

# a worker's server closes idle connections after 5 s; ours are given up well before, so that no call meets the closing
IDLE_CONNECTION_S = 2.0
READY_TIMEOUT_S = 1.0


class WorkerUnreached(WorkerUnavailable):
    """The connection could not be made in time."""


class WorkerCut(WorkerUnavailable):
    """The connection ended before the answer did."""


class WorkerRefused(WorkerUnavailable):
    """Nobody listens at the worker's address."""


class NoRoomHere(Overloaded):
    """The balancer itself has no room for a connection, to whomever: another attempt would only take more."""

    retryable_codes = frozenset()


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    def json_object(self) -> dict[str, Any]:
        """The body as a JSON object. Raises BadWorkerAnswer."""
        return parse_object(self.body)


@dataclass(frozen=True, kw_only=True)
class Incoming:
    """An answer whose head is here and whose body is still to come. ``whole`` and ``chunks`` raise WorkerCut.

    ``worker``: what errors call the one that answers.
    """

    worker: str
    status: int
    headers: Mapping[str, str]
    response: httpx.Response = field(repr=False)

    async def whole(self) -> Reply:
        """All of it."""
        with _translated(self.worker):
            body = await self.response.aread()
        return Reply(status=self.status, headers=self.headers, body=body)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body in pieces as they come."""
        raw = cast(AsyncGenerator[bytes, None], self.response.aiter_raw())
        async with aclosing(raw) as chunks:
            with _translated(self.worker):
                async for chunk in chunks:
                    yield chunk


class Workers:
    """The client side of all instances.

    Args:
        key: the cluster key that workers demand, if any.
        transport: replaces the network, for tests.
    """

    def __init__(self, clock: Clock, *, key: str | None = None, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._clock = clock
        headers = {"accept-encoding": "identity"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            transport=transport or WorkerTransport(IDLE_CONNECTION_S),
            trust_env=False,  # a proxy of the environment must not come between us and the workers
        )

    @asynccontextmanager
    async def open(
        self,
        url: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        worker: str = "a worker",
    ) -> AsyncIterator[Incoming]:
        """GET, or POST if there is a body; the head of the answer is here on entry. Leaving closes the connection
        unless the answer was read to its end. Raises NoRoomHere; WorkerRefused, WorkerUnreached, WorkerCut, which name
        ``worker``.
        """
        request = self._http.build_request("GET" if body is None else "POST", url, content=body, headers=headers)
        with _translated(worker):
            response = await self._http.send(request, stream=True)
        try:
            yield Incoming(worker=worker, status=response.status_code, headers=response.headers, response=response)
        finally:
            await response.aclose()
            response.stream = httpx.ByteStream(b"")  # the one it had knows it: neither would go before the collector comes

    async def fetch(self, url: str, *, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> Reply:
        """The whole answer to a GET, or to a POST if there is a body. Raises WorkerUnavailable, NoRoomHere."""
        async with self.open(url, body=body, headers=headers) as incoming:
            return await incoming.whole()

    async def ask_ready(self, url: str) -> Mapping[str, Any]:
        """What ``/ready`` says, with whatever status. Raises WorkerUnavailable, NoRoomHere, BadWorkerAnswer,
        TimeoutError."""
        reply = await self._clock.within(READY_TIMEOUT_S, self.fetch(f"{url}/ready"))
        return reply.json_object()

    async def close(self) -> None:
        """End all connections."""
        await self._http.aclose()


def parse_object(data: bytes) -> dict[str, Any]:
    """``data`` as a JSON object. Raises BadWorkerAnswer."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadWorkerAnswer("the answer of a worker is not JSON") from error
    if not isinstance(value, dict):
        raise BadWorkerAnswer("the answer of a worker is not a JSON object")
    return value


@contextmanager
def _translated(worker: str) -> Iterator[None]:
    try:
        yield
    except NoRoom as error:
        raise NoRoomHere("the balancer has no room for another connection") from error
    except httpx.ConnectError as error:
        raise WorkerRefused(f"connection to {worker} refused") from error
    except httpx.ConnectTimeout as error:
        raise WorkerUnreached(f"no connection to {worker} within {CONNECT_TIMEOUT_S:g} s") from error
    except httpx.TransportError as error:
        raise WorkerCut(f"connection to {worker} was cut ({type(error).__name__})") from error
    except httpx.DecodingError as error:
        raise BadWorkerAnswer(f"an answer of {worker} is not in the encoding that it names") from error
