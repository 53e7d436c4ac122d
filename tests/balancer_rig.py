"""Scripted workers behind the balancer's client library, and a client in front of its app; no sockets.

A worker is a list of scripts, one for each generation call (the last one repeats). A script is an async function from the
call to an answer; it may wait, or raise what the client library raises.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI

from longcat_pd.config.schema import LoadBalancerConfig
from longcat_pd.load_balancer.app import create_app
from longcat_pd.load_balancer.attempt import Means
from longcat_pd.load_balancer.face import Face, Keys
from longcat_pd.load_balancer.overview import Served
from longcat_pd.load_balancer.pool import LegRole, Pool, Target
from longcat_pd.load_balancer.workers import Workers
from longcat_pd.metrics import Metrics
from longcat_pd.server.tracing import Exporter, Tracer
from tests.manual_clock import ManualClock, settle

DONE = b"data: [DONE]\n\n"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@dataclass
class LegCall:
    """One call that a worker got, and what became of it: open, done, or cancelled by the balancer."""

    worker: str
    path: str
    headers: dict[str, str]
    body: bytes
    started: float
    state: str = "open"
    ended: float | None = None


@dataclass
class Reply:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    chunks: Callable[[], AsyncIterator[bytes]] | None = None


Script = Callable[[LegCall], Awaitable[Reply]]


def chunk(text: str, finish: str | None = None) -> bytes:
    value = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}],
    }
    return b"data: " + json.dumps(value).encode() + b"\n\n"


WHOLE = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "好"}, "finish_reason": "stop"}],
}
WHOLE_BYTES = json.dumps(WHOLE, ensure_ascii=False, separators=(",", ":")).encode()


def error(status: int, code: str, cause: str | None, *, kind: str = "server_error", **headers: str) -> Script:
    """An error answer as workers give it."""
    value = {"error": {"message": f"{code} of a worker", "type": kind, "param": None, "code": code}}
    given = {"content-type": "application/json", **({"x-longcat-cause": cause} if cause else {})}
    given |= {name.replace("_", "-"): text for name, text in headers.items()}

    async def script(_: LegCall) -> Reply:
        return Reply(status, json.dumps(value).encode(), given)

    return script


def raises(make: Callable[[], Exception]) -> Script:
    async def script(_: LegCall) -> Reply:
        raise make()

    return script


def raw(status: int, body: bytes, content_type: str = "application/json") -> Script:
    async def script(_: LegCall) -> Reply:
        return Reply(status, body, {"content-type": content_type})

    return script


def refused() -> Exception:
    return httpx.ConnectError("refused")


def unreached() -> Exception:
    return httpx.ConnectTimeout("no answer")


def reset() -> Exception:
    return httpx.ReadError("reset")


async def prefilled(call: LegCall) -> Reply:
    value = {
        "object": "prefill",
        "transfer_id": call.headers["x-longcat-transfer-id"],
        "prompt_tokens": 3,
        "timings_ms": {"queue": 1.0, "prefill": 2.5},
    }
    return Reply(200, json.dumps(value).encode(), {"content-type": "application/json"})


async def never(_: LegCall) -> Reply:
    await asyncio.Event().wait()
    raise AssertionError


whole = raw(200, WHOLE_BYTES)


def stream(*pieces: bytes | Callable[[], Exception] | float, clock: ManualClock | None = None) -> Script:
    """A stream: bytes are sent, numbers are seconds of silence, functions make what is raised."""

    async def chunks() -> AsyncIterator[bytes]:
        for piece in pieces:
            if isinstance(piece, bytes):
                yield piece
                await asyncio.sleep(0)
            elif isinstance(piece, float):
                assert clock is not None
                await clock.sleep(piece)
            else:
                raise piece()

    async def script(_: LegCall) -> Reply:
        return Reply(200, b"", {"content-type": "text/event-stream; charset=utf-8"}, chunks)

    return script


def origin(**changes: Any) -> bytes:
    """The comment in front of an answer whose ids are said."""
    value = {"seed": -5, "created": 1767225600, "prompt_digest": "0f" * 16, **changes}
    return b": answer " + json.dumps(value).encode() + b"\n"


def said(*ids: int) -> bytes:
    """The comment before the last event of a group."""
    return b": ids " + base64.b64encode(struct.pack(f"<{len(ids)}i", *ids)) + b"\n"


good_stream = stream(chunk("a"), chunk("b"), chunk("", "stop"), DONE)


def later(clock: ManualClock, seconds: float, script: Script) -> Script:
    async def delayed(call: LegCall) -> Reply:
        await clock.sleep(seconds)
        return await script(call)

    return delayed


class _Body(httpx.AsyncByteStream):
    """The body of an answer; notes whether it was read to its end or closed before."""

    def __init__(self, call: LegCall, reply: Reply, clock: ManualClock) -> None:
        self._call, self._reply, self._clock = call, reply, clock

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._reply.chunks is None:
            yield self._reply.body
        else:
            async for data in self._reply.chunks():
                yield data
        self._end("done")

    async def aclose(self) -> None:
        self._end("cancelled")

    def _end(self, state: str) -> None:
        if self._call.state == "open":
            self._call.state, self._call.ended = state, self._clock.now()


class Cluster(httpx.AsyncBaseTransport):
    """All workers of a test. ``ready``: what ``/ready`` of each says; change it to change them."""

    def __init__(self, clock: ManualClock, names: str) -> None:
        self.clock = clock
        self.calls: list[LegCall] = []
        self.scripts: dict[str, list[Script]] = {}
        self.ready: dict[str, Any] = {}  # an answer, an exception, or a function that makes an answer
        self.routes: dict[tuple[str, str], Script] = {}
        self.keys: set[str | None] = set()
        every = names.split()
        for name in every:
            others = [other for other in every if other[0] != name[0]]
            self.ready[name] = {
                "ready": True,
                "busy": False,
                "role": role_of(name),
                "instance": name,
                "incarnation": f"{name}-1",
                "config_digest": f"digest-{name}",
                "ranks": {"total": 2, "ok": 2},
                "peers": dict.fromkeys(others, "up"),
                "reasons": [],
            }
            self.scripts[name] = [prefilled if role_of(name) == "prefill" else whole]

    def of(self, name: str) -> list[LegCall]:
        """The generation calls of one worker."""
        return [call for call in self.calls if call.worker == name]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        name, path = request.url.host, request.url.path
        self.keys.add(request.headers.get("authorization"))
        if path == "/ready":
            return await self._say_ready(name)
        call = LegCall(name, path, dict(request.headers), await request.aread(), self.clock.now())
        if path in (CHAT, COMPLETIONS):
            scripts = self.scripts[name]
            self.calls.append(call)
            script = scripts.pop(0) if len(scripts) > 1 else scripts[0]
        else:
            script = self.routes[name, path]
        try:
            reply = await script(call)
        except asyncio.CancelledError:
            call.state, call.ended = "cancelled", self.clock.now()
            raise
        except Exception:
            call.state, call.ended = "done", self.clock.now()
            raise
        return httpx.Response(reply.status, headers=reply.headers, stream=_Body(call, reply, self.clock))

    async def _say_ready(self, name: str) -> httpx.Response:
        said = self.ready[name]
        if isinstance(said, Exception):
            raise said
        if not isinstance(said, dict):
            return httpx.Response(200, json=await said())
        return httpx.Response(200 if said["ready"] else 503, json=said)


def role_of(name: str) -> LegRole:
    return "prefill" if name.startswith("p") else "decode"


@dataclass
class Rig:
    """A balancer over scripted workers, polled once."""

    clock: ManualClock
    cluster: Cluster
    means: Means
    face: Face
    app: FastAPI

    @classmethod
    async def make(
        cls,
        names: str = "p0 d0",
        *,
        keys: Keys | None = None,
        key: str | None = None,
        has_faults: bool = False,
        exporter: Exporter | None = None,
        **config: Any,
    ) -> Rig:
        clock = ManualClock()
        cluster = Cluster(clock, names)
        metrics = Metrics(role="load_balancer", instance="lb")
        workers = Workers(clock, key=key, transport=cluster)
        targets = [Target(name=n, role=role_of(n), url=f"http://{n}", config_digest=f"digest-{n}") for n in names.split()]
        pool = Pool(targets, ask=workers.ask_ready, clock=clock, metrics=metrics)
        tracer = None
        if exporter is not None:
            tracer = Tracer(exporter, sample=1.0, is_first=True, metrics=metrics.tracing, clock=clock)
        means = Means(pool=pool, workers=workers, clock=clock, metrics=metrics, tracer=tracer)
        served = Served(
            name="longcat",
            path="/w/longcat",
            max_model_len=64,
            created=7,
            instance="lb",
            incarnation="i",
            config_digest="c",
        )
        settings = LoadBalancerConfig(**config)
        face = Face.of(means, settings, keys=keys or Keys(), served=served, has_faults=has_faults)
        rig = cls(clock, cluster, means, face, create_app(face))
        await rig.poll()
        return rig

    async def poll(self) -> None:
        await asyncio.gather(*(self.means.pool.poll(i) for i in self.means.pool.instances.values()))

    def script(self, **scripts: Script | list[Script]) -> None:
        for name, given in scripts.items():
            self.cluster.scripts[name] = given if isinstance(given, list) else [given]

    def post(self, body: Any = None, path: str = CHAT, **headers: str) -> Exchange:
        """Start a request; ``await exchange.end()`` for its answer."""
        data = body if isinstance(body, bytes) else json.dumps(BODY if body is None else body).encode()
        return Exchange(self.app, "POST", path, data, {"content-type": "application/json", **headers})

    async def get(self, path: str, method: str = "GET", **headers: str) -> Exchange:
        return await Exchange(self.app, method, path, b"", headers).end()

    def is_idle(self) -> bool:
        """Nothing is counted as open, and no worker has an open call."""
        pool = self.means.pool
        open_calls = [call for call in self.cluster.calls if call.state == "open"]
        legs = [i.open_legs or i.open_bytes for i in pool.instances.values()]
        return not open_calls and not any(legs) and not self.face.gate.num_open


class Exchange:
    """One request at the app, as its ASGI server sees it."""

    def __init__(self, app: FastAPI, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.pieces: list[bytes] = []
        self.is_complete = False
        self.reads = asyncio.Event()  # clear it for a client that does not
        self.reads.set()
        self._gone = asyncio.Event()
        self._unread: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode("latin-1"),
            "root_path": "",
            "scheme": "http",
            "headers": [(name.lower().encode(), value.encode("utf-8")) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8081),
        }
        self.task: asyncio.Task[Any] = asyncio.ensure_future(app(scope, self._receive, self._send))

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def error(self) -> dict[str, Any]:
        """The error object of a JSON answer."""
        value: dict[str, Any] = json.loads(self.body)["error"]
        assert set(value) == {"message", "type", "param", "code"}
        return value

    @property
    def events(self) -> list[str]:
        """The data of the events; the body must consist of whole ones."""
        assert self.body == b"" or self.body.endswith(b"\n\n")
        found = self.body.decode().split("\n\n")[:-1]
        assert all(event.startswith("data: ") for event in found), found
        return [event[6:] for event in found]

    async def end(self) -> Exchange:
        await asyncio.wait_for(asyncio.shield(self.task), 60)
        return self

    async def leave(self) -> None:
        """The client closes its connection."""
        self._gone.set()
        await settle()

    async def _receive(self) -> dict[str, Any]:
        if self._unread:
            return self._unread.pop(0)
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        assert not self.is_complete, "something was sent after the end"
        if message["type"] == "http.response.start":
            assert self.status == 0
            self.status = message["status"]
            self.headers = {name.decode().lower(): value.decode("latin-1") for name, value in message["headers"]}
            return
        assert self.status
        self.pieces.append(message.get("body", b""))
        self.is_complete = not message.get("more_body", False)
        await asyncio.sleep(0)
