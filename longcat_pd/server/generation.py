"""The two generation routes of an instance, for clients of a standalone server and for the legs of a balancer.

Owns the way from an HTTP request to a body and a call, and who is let in. What the answer is belongs to ``face.py``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import Request, Response

from longcat_pd.config.schema import LoadBalancerConfig
from longcat_pd.errors import LongcatError
from longcat_pd.metrics import HttpMetrics
from longcat_pd.server.errors import json_response
from longcat_pd.server.face import Face
from longcat_pd.server.intake import read_in_time, time_limit_of
from longcat_pd.server.leg import read_leg
from longcat_pd.server.openai import Body, decode_body
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
        return await self._generate(request, self._face.call(_request_id(request), limit_s), limit_s)

    async def for_decode_leg(self, request: Request) -> Response:
        """A leg to a decode worker: the answer is the client's."""
        call, limit_s = self._call_of_leg(request)
        return await self._generate(request, call, limit_s)

    async def for_prefill_leg(self, request: Request) -> Response:
        """A leg to a prefill worker: the answer says that the hand-over is done, also where the body asks for a stream."""
        call, limit_s = self._call_of_leg(request)
        body = await self._read(request, limit_s)
        return await self._whole(request, self._face.prefilled(body, call))

    async def _generate(self, request: Request, call: Call, limit_s: float) -> Response:
        body = await self._read(request, limit_s)
        if not body.stream:
            return await self._whole(request, self._face.answer(body, call))
        return EventStream(
            self._events(body, call),
            call.request_id,
            on_error=_ignore,  # the face's journal has told of it
            keepalive_s=self._front.keepalive_comment_s,
        )

    def _call_of_leg(self, request: Request) -> tuple[Call, float]:
        leg = read_leg(request.headers, front=f"http://{self._front.host}:{self._front.port}")
        call = self._face.call(_request_id(request), leg.time_left_s)
        return replace(call, transfer=leg.transfer, attempt=leg.attempt), leg.time_left_s

    async def _read(self, request: Request, limit_s: float) -> Body:
        """The checked body, if it comes in time; what would be refused anyway is refused before the body is read."""
        self._face.admit()
        raw = await read_in_time(request, self._front.max_body_bytes, limit_s)
        return self._face.read(request.scope["path"], decode_body(raw))

    async def _whole(self, request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
        with self._metrics.inflight_requests.track_inprogress():
            return json_response(await while_connected(request.receive, work))

    async def _events(self, body: Body, call: Call) -> AsyncGenerator[bytes, None]:
        with self._metrics.inflight_requests.track_inprogress():
            async with aclosing(self._face.chunks(body, call)) as chunks:
                async for chunk in chunks:
                    yield event(chunk)
        yield DONE


def _request_id(request: Request) -> str:
    request_id: str = request.scope["state"]["request_id"]
    return request_id


def _ignore(_: LongcatError) -> None:
    pass
