"""How a client hears that it gets no answer: a status, or the last event of a stream that has begun."""

from __future__ import annotations

from collections.abc import Mapping

from longcat_pd import log
from longcat_pd.clock import Clock
from longcat_pd.load_balancer.course import JSON_HEAD, Client
from longcat_pd.load_balancer.replies import Failure
from longcat_pd.server.errors import error_headers, error_object, to_json
from longcat_pd.server.sse import FAREWELL_S


async def tell_failure(client: Client, failure: Failure, *, request_id: str, clock: Clock) -> None:
    """Tell it, as far as the client reads."""
    if failure.error is not None:
        body = to_json(error_object(failure.error, request_id))
        headers: Mapping[str, str] = error_headers(failure.error, is_worker=False)
    else:
        body, headers = failure.body, failure.headers
    try:
        await clock.within(FAREWELL_S, _send(client, failure.status, headers=headers, body=body))
    except TimeoutError:
        log.logger().debug("client_does_not_read")


async def _send(client: Client, status: int, *, headers: Mapping[str, str], body: bytes) -> None:
    if client.is_started:
        await client.finish(b"data: " + body + b"\n\n")
    else:
        await client.start(status, {**JSON_HEAD, "Content-Length": str(len(body)), **headers})
        await client.finish(body)
