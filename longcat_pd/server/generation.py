"""The two generation routes for the clients of an instance, and what the legs of a balancer (``legs.py``) share with them.

Owns the way from an HTTP request to a body, and from an answer to a response. What the answer is belongs to ``face.py``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response

from longcat_pd.config.schema import LoadBalancerConfig
from longcat_pd.errors import LongcatError
from longcat_pd.metrics import HttpMetrics
from longcat_pd.server.answers import Step
from longcat_pd.server.errors import json_response
from longcat_pd.server.face import Face
from longcat_pd.server.intake import read_in_time, time_limit_of
from longcat_pd.server.openai import decode_body
from longcat_pd.server.requests import Call
from longcat_pd.server.sse import DONE, EventStream, event, while_connected


class Generation:
    """Answers a POST on a generation route.

    Args:
        face: of this instance.
        front: limits, and the balancer's address.
        metrics: of this process.
    """

    def __init__(self, face: Face, front: LoadBalancerConfig, metrics: HttpMetrics) -> None:
        self._face = face
        self._front = front
        self._metrics = metrics

    async def for_client(self, request: Request) -> Response:
        """A client of a standalone server."""
        limit_s = time_limit_of(request, self._front.request_timeout_s)
        call = self._face.call(request_id_of(request), limit_s, traceparent=traceparent_of(request))
        body = self._face.read(request.scope["path"], await self.read(request, limit_s))
        if not body.stream:
            return await self.whole(request, self._face.answer(body, call))
        return self.stream(request, encoded(self._face.chunks(body, call)), call)

    async def read(self, request: Request, limit_s: float) -> dict[str, Any]:
        """The fields of the body, if it comes in time; what would be refused anyway is refused before it is read."""
        self._face.admit()
        return decode_body(await read_in_time(request, self._front.max_body_bytes, limit_s))

    async def whole(self, request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
        """An answer as one record."""
        with self._metrics.inflight_requests.track_inprogress():
            return json_response(await while_connected(request.receive, work))

    def stream(self, request: Request, events: AsyncGenerator[bytes, None], call: Call) -> Response:
        """An answer as encoded events; the last one, which says that it is whole, is added here."""
        return EventStream(
            self._ended(events),
            request_id_of(request),
            on_error=_ignore,  # the face's journal has told of it
            time_left_s=self._face.time_left_s(call),
            cut=call.cut,
            keepalive_s=self._front.keepalive_comment_s,
        )

    async def _ended(self, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        with self._metrics.inflight_requests.track_inprogress():
            async with aclosing(events):
                async for data in events:
                    yield data
        yield DONE


async def encoded(steps: AsyncGenerator[Step, None]) -> AsyncGenerator[bytes, None]:
    """The events of a stream; those of one step together."""
    async with aclosing(steps):
        async for step in steps:
            if step.records:
                yield b"".join(map(event, step.records))


def request_id_of(request: Request) -> str:
    """As it was given or made when the request came."""
    request_id: str = request.scope["state"]["request_id"]
    return request_id


def traceparent_of(request: Request) -> str:
    """The header of a trace, or nothing."""
    return request.headers.get("traceparent", "")


def _ignore(_: LongcatError) -> None:
    pass
