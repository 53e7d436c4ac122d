"""The status page of the balancer, and the facts that it shows.

Owns ``GET /`` (the page, which holds no facts and is open), ``GET /status`` (one snapshot) and ``GET /status/events`` (one
each second); facts are for who has a client's key. Workers are asked only while somebody looks.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from importlib.resources import files

from fastapi import Request, Response

from longcat_pd.clock import Clock
from longcat_pd.load_balancer.face import Face
from longcat_pd.load_balancer.lookout import Lookout
from longcat_pd.server import sse
from longcat_pd.server.errors import ClientGone, Message, Receive, Scope, Send

READ_S = 10.0  # a page that does not read for so long is given up
_PARTS = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


def status_routes(face: Face) -> dict[str, Callable[[Request], Awaitable[Response]]]:
    """GET routes by path."""
    lookout = face.lookout
    page = (files("longcat_pd.load_balancer") / "status.html").read_bytes()
    headers = {
        "Content-Security-Policy": policy(page),
        "Cache-Control": "no-cache",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }

    async def show(_: Request) -> Response:
        return Response(page, headers=headers, media_type="text/html; charset=utf-8")

    async def status(request: Request) -> Response:
        face.check_client(request)
        snapshot = await sse.while_connected(request.receive, lookout.now())
        return Response(snapshot, media_type="application/json")

    async def events(request: Request) -> Response:
        face.check_client(request)
        return Response(headers=sse.HEADERS) if request.method == "HEAD" else _Views(lookout, face.means.clock)

    return {"/": show, "/status": status, "/status/events": events}


def policy(page: bytes) -> str:
    """The Content-Security-Policy under which the page runs: its own script and style, by their digests, and calls to its
    own server; nothing from anywhere else, no frame around it, no form that leaves it.
    """
    allowed: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _PARTS.findall(page):
        allowed[kind.decode()].append(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'")
    own = [f"{kind}-src {' '.join(digests)}" for kind, digests in allowed.items()]
    closed = ["base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
    return "; ".join(["default-src 'none'", *own, "connect-src 'self'", "img-src data:", *closed])


class _Views(Response):
    """Snapshots as events, until the page is left or its time is over."""

    def __init__(self, lookout: Lookout, clock: Clock) -> None:
        super().__init__(headers=sse.HEADERS)
        del self.headers["content-length"]
        self._lookout = lookout
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them. Raises TooManyRequests before the head, ClientGone for a page that is left or does not read."""

        async def send_in_time(message: Message) -> None:
            try:
                await self._clock.within(READ_S, send(message))
            except TimeoutError:
                raise ClientGone from None

        with self._lookout.looking() as views:
            await sse.while_connected(receive, self._send_all(views, send_in_time))

    async def _send_all(self, views: AsyncGenerator[bytes, None], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(views):
            async for snapshot in views:
                data = b"data: " + snapshot + b"\n\n" if snapshot else sse.KEEP_ALIVE
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
