"""Requests that workers answer: checked here, before a worker is called, and then relayed.

Knows one client at a time; attempts, retries and failover are ``course.py``'s.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Request, Response

from longcat_pd.errors import BadWorkerAnswer, DeadlineExceeded
from longcat_pd.load_balancer.attempt import Call
from longcat_pd.load_balancer.face import Face
from longcat_pd.load_balancer.replies import error_reply, is_json
from longcat_pd.load_balancer.workers import Reply, WorkerRefused
from longcat_pd.server.errors import ClientGone, Receive, Scope, Send
from longcat_pd.server.intake import read_bytes, time_limit_of
from longcat_pd.server.openai import decode_body, read_body
from longcat_pd.server.sse import while_connected
from longcat_pd.server.text_bodies import TEXT_READERS


async def forward(face: Face, request: Request) -> Response:
    """A route that a prefill instance answers whole."""
    limit_s = time_limit_of(request, face.config.request_timeout_s)
    began = face.means.clock.now()
    body = await _body(face, request, limit_s)
    TEXT_READERS[request.scope["path"]](decode_body(body), face.served.name)
    request_id = request.scope["state"]["request_id"]
    headers = {**_trace_of(request), "content-type": "application/json", "x-request-id": request_id}
    asking = _of_a_prefill(face, request.scope["path"], body, headers)
    try:
        reply = await while_connected(
            request.receive, face.means.clock.within(began + limit_s - face.means.clock.now(), asking)
        )
    except TimeoutError:
        raise DeadlineExceeded("the time of the request is over") from None
    if reply.status != 200:
        failure = error_reply(reply)
        if failure.error is not None:
            raise failure.error
        return Response(failure.body, failure.status, dict(failure.headers), media_type="application/json")
    if not is_json(reply.headers):
        raise BadWorkerAnswer("a prefill instance answered with something else than JSON")
    return Response(reply.body, media_type="application/json")


async def _of_a_prefill(face: Face, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
    """The answer of an instance that can be reached: one that refuses is out, and so not asked again here."""
    while True:
        instance = face.means.pool.a_prefill()
        try:
            return await face.means.workers.fetch(instance.target.url + path, body=body, headers=headers)
        except WorkerRefused:
            face.means.pool.refused(instance)


class Generation(Response):
    """A generation request from its key to its last byte: the answer begins when D's does, so it sends itself."""

    def __init__(self, face: Face) -> None:
        super().__init__()
        self._face = face

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, relay, and raise ClientGone if the client did not stay for the end."""
        face, request = self._face, Request(scope, receive)
        arrived = face.means.clock.now()
        face.check_client(request)
        with face.gate.enter() as cuts, face.means.metrics.http.inflight_requests.track_inprogress():
            limit_s = time_limit_of(request, face.config.request_timeout_s)
            body = await _body(face, request, limit_s)
            checked = read_body(scope["path"], decode_body(body), face.served.name)
            trace, traced = _trace_of(request), None
            if face.means.tracer is not None:
                traced = face.means.tracer.begin(trace.get("traceparent", ""))
            call = Call(
                route=scope["path"],
                body=body,
                request_id=scope["state"]["request_id"],
                deadline=arrived + limit_s,
                is_stream=checked.stream,
                is_single=checked.num_choices == 1,
                trace=trace if traced is None or traced.parent_id else {},  # what belongs to no trace says nothing
                traced=traced,
            )
            progress = await face.proxy.serve(call, _AsgiClient(send), gone=_gone(receive), cuts=cuts)
        if progress.cut_by == "client":
            raise ClientGone


class _AsgiClient:
    """The client behind an ASGI connection."""

    def __init__(self, send: Send) -> None:
        self.is_started = False
        self._send = send

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the head."""
        self.is_started = True
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def send(self, data: bytes) -> None:
        """Send a part of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        """Send the last part of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})


async def _body(face: Face, request: Request, limit_s: float) -> bytes:
    """The request's time counts from its arrival: one whose body does not come does not hold a place for ever."""
    try:
        return await face.means.clock.within(limit_s, read_bytes(request, face.config.max_body_bytes))
    except TimeoutError:
        raise DeadlineExceeded("the body did not come within the time of the request") from None


def _trace_of(request: Request) -> dict[str, str]:
    """The client's headers that travel on to the workers, beside the request id; not what no header may hold."""
    given = {name: request.headers.get(name, "") for name in ("traceparent", "tracestate")}
    return {name: value for name, value in given.items() if value and value.isascii() and value.isprintable()}


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
