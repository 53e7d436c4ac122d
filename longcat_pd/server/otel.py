"""Spans as OTLP over HTTP, by the OpenTelemetry SDK: the one module that knows it (packages of the extra ``otel``).

Owns the names of resource and protocol. Of the SDK it takes the record of a span, its encoding and the sending with its
tries; no provider, no processor and no sampler. Of the environment the exporter reads what it needs to be let in: headers
and certificates (``OTEL_EXPORTER_OTLP_[TRACES_]HEADERS``, ``…_CERTIFICATE``, ``…_CLIENT_KEY``, ``…_CLIENT_CERTIFICATE``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import requests
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from longcat_pd.server.tracing import Span
from longcat_pd.version import VERSION

PATH = "/v1/traces"
_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class OtlpExporter:
    """Sends spans to one collector, as those of one process.

    Args:
        endpoint: of the collector, without ``/v1/traces``.
        timeout_s: of one call, with its tries.
    """

    def __init__(self, endpoint: str, resource: Resource, *, timeout_s: float) -> None:
        session = requests.Session()
        session.trust_env = False  # no proxy and no password file of the surroundings
        self._resource = resource
        self._scope = InstrumentationScope("longcat_pd", VERSION)
        self._exporter = OTLPSpanExporter(
            endpoint=endpoint.rstrip("/") + PATH, timeout=timeout_s, compression=Compression.Gzip, session=session
        )

    def export(self, spans: Sequence[Span], to_unix_s: float) -> bool:
        """As ``Exporter``."""
        return self._exporter.export([self._sdk_span(span, to_unix_s) for span in spans]) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """As ``Exporter``."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _sdk_span(self, span: Span, to_unix_s: float) -> ReadableSpan:
        error = span.error
        return ReadableSpan(
            span.name,
            context=_context(span.trace_id, span.span_id),
            parent=None if span.parent_id is None else _context(span.trace_id, span.parent_id),
            resource=self._resource,
            attributes={**span.attributes, **({} if error is None else {"error.type": error})},
            events=[Event(mark.name, timestamp=_nanos(mark.at + to_unix_s)) for mark in span.marks],
            kind=_KINDS[span.kind],
            status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, error),
            start_time=_nanos(span.began + to_unix_s),
            end_time=_nanos(span.ended + to_unix_s),
            instrumentation_scope=self._scope,
        )


def make(endpoint: str, *, role: str, instance: str, timeout_s: float) -> OtlpExporter:
    """An exporter for a process with this name."""
    told = logging.getLogger("opentelemetry")  # what it says of a collector that is away; we tell of it ourselves
    told.addHandler(logging.NullHandler())
    told.propagate = False
    name = {"service.namespace": "longcat_pd", "service.name": f"longcat_pd.{role}", "service.instance.id": instance}
    return OtlpExporter(endpoint, Resource({**name, "service.version": VERSION}), timeout_s=timeout_s)


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=_SAMPLED)


def _nanos(seconds: float) -> int:
    return round(seconds * 1e9)
