"""Any exception as an OpenAI error: a status with headers and a body before the first byte, an event inside a stream.

Owns the form of errors on the wire. Does not know what can go wrong: that is ``longcat_pd/errors.py``. The one place
above the rank where any exception at all is caught, so that nothing is answered with silence or with a trace.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing, suppress
from typing import Any

from fastapi import Request, Response

from longcat_pd import log
from longcat_pd.clock import MonotonicClock
from longcat_pd.errors import AuthenticationFailed, EngineFault, LongcatError, NotAccepted, NotFound

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

LINGER_S = 5.0  # for a body that is too long
_log = log.logger()
_LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class ClientGone(Exception):
    """The client has closed its connection. Nothing is answered; logs and metrics call it 499."""


def to_json(value: Any) -> bytes:
    """Compact UTF-8 on one line. What some readers of lines take for a line break is escaped, the rest is not."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return (text if text.isascii() else text.translate(_LINE_BREAKS)).encode("utf-8")


def json_response(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer in JSON."""
    return Response(to_json(value), status_code=status, headers=headers, media_type="application/json")


def known(error: BaseException) -> LongcatError:
    """The exception itself if it is one of ours, else an EngineFault; what is foreign goes to the log with its trace."""
    if isinstance(error, LongcatError):
        return error
    _log.error("request_failed", status=500, code="engine_fault", cause="self", exc_info=error)
    return EngineFault("unexpected")


def error_object(error: LongcatError, request_id: str) -> dict[str, Any]:
    """``{"error": {message, type, param, code}}``. A 5xx names the request and tells nothing of our inside."""
    message = "the engine failed" if isinstance(error, EngineFault) else error.message
    if error.status >= 500:
        message = f"{message} (request {request_id})"
    return {"error": {"message": message, "type": error.kind, "param": error.param, "code": error.code}}


def error_headers(error: LongcatError, *, is_worker: bool) -> dict[str, str]:
    """What a client, its SDK or the balancer is told beside the body."""
    headers: dict[str, str] = {}
    if error.should_retry is not None:
        headers["x-should-retry"] = "true" if error.should_retry else "false"
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, AuthenticationFailed):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, NotAccepted) and error.code == "body_too_large":
        headers["Connection"] = "close"  # the rest of the body is not read
    if is_worker:
        headers["X-Longcat-Cause"] = error.cause
    return headers


def error_response(error: BaseException, request_id: str, *, is_worker: bool = False) -> Response:
    """The answer for an exception before the first byte."""
    ours = known(error)
    answer = json_response(
        error_object(ours, request_id), status=ours.status, headers=error_headers(ours, is_worker=is_worker)
    )
    return _Parting(answer) if ours.code == "body_too_large" else answer


class _Parting(Response):
    """An answer that closes the connection while the client may still be sending its body.

    What comes of it is thrown away for a while: closed at once, the connection would be reset and the answer lost.
    """

    def __init__(self, answer: Response) -> None:
        super().__init__(answer.body, answer.status_code, dict(answer.headers))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, then read what is left."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(TimeoutError):
            await MonotonicClock().within(LINGER_S, _discard(receive))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    while (await receive()).get("more_body", False):
        pass


def error_event(error: BaseException, request_id: str) -> bytes:
    """The last event of a stream that breaks."""
    return b"data: " + to_json(error_object(known(error), request_id)) + b"\n\n"


async def ending_in_error_event(
    events: AsyncGenerator[bytes, None],
    request_id: str,
    has_begun: Callable[[], bool],
    on_error: Callable[[LongcatError], None],
) -> AsyncGenerator[bytes, None]:
    """The events; if they break off after the first byte has left, one error event more, and ``on_error`` is told.

    Before that the exception is passed on, for it can still become a status.
    """
    async with aclosing(events):
        try:
            async for event in events:
                yield event
        except Exception as error:
            if not has_begun():
                raise
            ours = known(error)
            on_error(ours)
            yield error_event(ours, request_id)


class ErrorBoundary:
    """ASGI middleware: every exception of the app inside becomes an answer, unless one has begun already."""

    def __init__(self, app: AsgiApp, *, is_worker: bool) -> None:
        self._app = app
        self._is_worker = is_worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app."""
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = has_begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if has_begun or isinstance(error, ClientGone) or scope["type"] != "http":
                raise
            request_id = scope["state"]["request_id"]
            await error_response(error, request_id, is_worker=self._is_worker)(scope, receive, send)


async def route_not_found(request: Request, _: Exception) -> Response:
    """Raised as one of ours, for the boundary: no such path."""
    raise NotFound(f"no route {request.scope['path']}")


async def method_not_allowed(request: Request, error: Exception) -> Response:
    """405 with the methods that the path has, which the router put into its own exception."""
    allow: str = (vars(error).get("headers") or {}).get("Allow", "")
    refused = NotAccepted(f"{request.method} is not allowed on {request.scope['path']}")
    state = request.scope["state"]
    response = error_response(refused, state["request_id"], is_worker=state["is_worker"])
    response.headers["Allow"] = ", ".join(sorted(allow.split(", ")))
    return response
