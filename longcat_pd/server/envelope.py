"""What every answer of every face has in common: the request id, errors as objects, one count in the metrics.

Owns the ASGI layers around an app. Does not know its routes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.datastructures import Headers

from longcat_pd import log
from longcat_pd.metrics import HttpMetrics
from longcat_pd.server.errors import (
    AsgiApp,
    ClientGone,
    ErrorBoundary,
    Message,
    Receive,
    Scope,
    Send,
    method_not_allowed,
    route_not_found,
)
from longcat_pd.server.intake import request_id_of

CLIENT_CLOSED_REQUEST = 499


class Envelope:
    """ASGI middleware, the outermost: names the request, puts its id on the answer, counts it.

    Leaves in ``scope["state"]``: ``request_id`` and ``is_worker``.
    """

    def __init__(self, app: AsgiApp, *, metrics: HttpMetrics, paths: Sequence[str], is_worker: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths
        self._is_worker = is_worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(Headers(scope=scope).get("x-request-id"))
        log.bind_request(request_id)
        scope.setdefault("state", {}).update(request_id=request_id, is_worker=self._is_worker)
        started, status = time.monotonic(), CLIENT_CLOSED_REQUEST

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode("ascii"))]}
            await send(message)

        try:
            await self._app(scope, receive, named)
        except ClientGone:
            status = CLIENT_CLOSED_REQUEST
        finally:
            self._metrics.finished(route=self._label(scope["path"]), status=status, seconds=time.monotonic() - started)

    def _label(self, path: str) -> str:
        for declared in self._paths:
            fixed, brace, _ = declared.partition("{")
            if path == declared or (brace and path.startswith(fixed)):
                return declared
        return "other"


def dress(app: FastAPI, metrics: HttpMetrics, *, paths: Sequence[str], is_worker: bool) -> None:
    """Put both layers around an app, and give unknown paths and methods their error objects.

    ``paths`` are those of the app's routes, as they were declared; metrics call every other path ``other``.
    """
    app.add_exception_handler(404, route_not_found)
    app.add_exception_handler(405, method_not_allowed)
    app.add_middleware(ErrorBoundary, is_worker=is_worker)
    app.add_middleware(Envelope, metrics=metrics, paths=paths, is_worker=is_worker)
