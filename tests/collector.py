"""A collector of traces in the test's own process: OTLP over HTTP, read with the classes of the protocol's package."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Seen:
    """A span as it came; times are nanoseconds. ``events``: name and time, in the order in which they stand."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began: int
    ended: int
    attributes: dict[str, Any]
    events: tuple[tuple[str, int], ...]
    is_error: bool
    said: str  # of the error


@dataclass
class Collector:
    """``mode``: takes spans, refuses them, or does not answer before it is closed."""

    url: str = ""
    mode: Literal["take", "refuse", "hang"] = "take"
    bodies: list[bytes] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    headers: list[dict[str, str]] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)

    @property
    def spans(self) -> list[Seen]:
        return [span for body in self.bodies for span in _read(body)]

    def of(self, trace_id: str) -> list[Seen]:
        return [span for span in self.spans if span.trace_id == trace_id]


def _read(body: bytes) -> Iterator[Seen]:
    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = _attributes(group.resource.attributes)
        for span in (span for scope in group.scope_spans for span in scope.spans):
            yield Seen(
                service=resource["service.name"],
                instance=resource["service.instance.id"],
                name=span.name,
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                began=span.start_time_unix_nano,
                ended=span.end_time_unix_nano,
                attributes=_attributes(span.attributes),
                events=tuple((event.name, event.time_unix_nano) for event in span.events),
                is_error=span.status.code == span.status.STATUS_CODE_ERROR,
                said=span.status.message,
            )


def _attributes(pairs: Any) -> dict[str, Any]:
    kinds = {"string_value", "int_value", "double_value", "bool_value"}  # no lists: there is nothing to hide ids in
    assert all(pair.value.WhichOneof("value") in kinds for pair in pairs)
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a port of its own."""
    collector = Collector()

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if collector.mode == "hang":
                collector.closed.wait(60)
                self.close_connection = True
                return
            collector.paths.add(self.path)
            collector.headers.append({name.lower(): value for name, value in self.headers.items()})
            if collector.mode == "take":
                collector.bodies.append(gzip.decompress(body))
            self.send_response(200 if collector.mode == "take" else 400)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.closed.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
