"""``POST /admin/fault`` where ``faults`` is true: the balancer passes it on to the instance that it names, or to all.

Knows no switches: what they are is for the instance to say.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from fastapi import Request, Response

from longcat_pd.errors import InvalidRequest, WorkerUnavailable
from longcat_pd.load_balancer.face import Face
from longcat_pd.load_balancer.workers import Reply
from longcat_pd.server.errors import json_response
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

    async def pass_on(request: Request) -> Response:
        face.check_faults(request)
        told = decode_body(await read_bytes(request, _MAX_BODY_BYTES) or b"{}")
        known = face.means.pool.instances
        name = told.get("instance")
        if name is None and told.keys() <= {"clear"}:  # of all instances
            replies = {each.name: (await ask(each.target.url, told)).json_object() for each in known.values()}
            return json_response({"instances": replies})
        if not isinstance(name, str) or name not in known:
            raise InvalidRequest(f"instance = {name!r} is not one of {', '.join(known)}", param="instance")
        reply = await ask(known[name].target.url, told)
        return json_response(reply.json_object(), status=reply.status)

    return {PATH: pass_on}
