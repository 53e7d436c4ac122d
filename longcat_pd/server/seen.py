"""What a worker shows of itself and of its latest requests to who looks at the status page of the balancer.

Owns that answer, ``GET /debug/seen``: figures, names and times, never a prompt, a text, a token id or a key. Times are
ages, seconds before the answer, so that nobody needs the clock of this machine. Asks no rank.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import Request, Response

from longcat_pd.server.errors import json_response
from longcat_pd.server.face import Face
from longcat_pd.server.service import Service

PATH = "/debug/seen"


def seen_routes(face: Face, service: Service) -> dict[str, Callable[[Request], Awaitable[Response]]]:
    """Of a worker; an engine alone has no page that would ask."""

    async def seen(_: Request) -> Response:
        told = {"role": service.role, "instance": service.name, "incarnation": service.readiness().incarnation}
        return json_response({**told, **service.glance(), "requests": face.recent()})

    return {} if service.role == "standalone" else {PATH: seen}
