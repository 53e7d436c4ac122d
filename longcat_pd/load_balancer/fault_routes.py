"""``POST /admin/fault`` where ``faults`` is true: the balancer passes it on to the instance that it names, or to all.

Knows no switches: what they are is for the instance to say.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response

from longcat_pd.errors import InvalidRequest, LongcatError, WorkerUnavailable
from longcat_pd.load_balancer.face import Face
from longcat_pd.load_balancer.workers import Reply
from longcat_pd.server.errors import error_object, json_response
from longcat_pd.server.intake import read_bytes
from longcat_pd.server.openai import decode_body

PATH = "/admin/fault"
ANSWER_S = 5.0
_MAX_BODY_BYTES = 4096


def fault_routes(face: Face) -> dict[str, Callable[[Request], Awaitable[Response]]]:
    """The one route, by its path."""

    async def ask(url: str, told: dict[str, object]) -> Reply:
        fetch = face.means.workers.fetch(url + PATH, body=json.dumps(told).encode())
        try:
            return await face.means.clock.within(ANSWER_S, fetch)
        except TimeoutError:
            raise WorkerUnavailable(f"no answer of {url} within {ANSWER_S:g} s") from None

    async def answer_of(url: str, told: dict[str, object], request_id: str) -> dict[str, Any]:
        """Of one among all: an error object where there is none, for one that is gone keeps nothing from the others."""
        try:
            return (await ask(url, told)).json_object()
        except LongcatError as error:
            return error_object(error, request_id)

    async def pass_on(request: Request) -> Response:
        face.check_faults(request)
        told = decode_body(await read_bytes(request, _MAX_BODY_BYTES) or b"{}")
        known = face.means.pool.instances
        name = told.get("instance")
        if name is None and told.keys() <= {"clear"}:  # of all instances
            request_id = request.scope["state"]["request_id"]
            answers = await asyncio.gather(*(answer_of(each.target.url, told, request_id) for each in known.values()))
            return json_response({"instances": dict(zip(known, answers, strict=True))})
        if not isinstance(name, str) or name not in known:
            raise InvalidRequest(f"instance = {name!r} is not one of {', '.join(known)}", param="instance")
        reply = await ask(known[name].target.url, told)
        return json_response(reply.json_object(), status=reply.status)

    return {PATH: pass_on}
