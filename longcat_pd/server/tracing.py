"""Spans: what a process tells of a request to a collector of traces, as plain records, and their way out of the process.

Owns the context of a trace (W3C ``traceparent``), which requests have one, and a bounded queue that a thread empties. A
request never waits for it and never fails by it: what the queue has no room for, and what the collector does not take, is
counted and gone. Does not know what is told (``body_spans.py``) nor the protocol (``otel.py``, loaded only where a
collector is configured).
"""

from __future__ import annotations

import asyncio
import importlib
import random
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from longcat_pd.clock import Clock
from longcat_pd.config.schema import TracingConfig
from longcat_pd.errors import ConfigError
from longcat_pd.log import logger
from longcat_pd.metrics import Metrics, TracingMetrics

MOST_WAITING = 8192  # spans that wait for the collector; the next ones are dropped
BATCH = 256  # spans of one call
EXPORT_EVERY_S = 1.0
EXPORT_S = 5.0  # what one call may take, with its tries
LAST_S = 2.0  # for the spans that still wait when the process ends

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

Attributes = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The trace that a request belongs to, and its span at this process. Ids are lower-case hex.

    ``parent_id``: the span that it is a part of; None for the first one.
    """

    trace_id: str
    span_id: str
    parent_id: str | None
    is_sampled: bool

    def passed_on(self, span_id: str) -> str:
        """The ``traceparent`` of a call that is a part of this span."""
        return f"00-{self.trace_id}-{span_id}-{int(self.is_sampled):02x}"


@dataclass(frozen=True, slots=True)
class Mark:
    """An event of a span. ``at``: on the process's clock."""

    name: str
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A part of a request's life; times are on the process's clock.

    ``error``: the name of the typed error that it ended with. Nothing here holds a prompt, a text, a token id or a key.
    """

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    began: float
    ended: float
    kind: Literal["server", "client", "internal"] = "internal"
    attributes: Attributes = field(default_factory=dict)
    marks: tuple[Mark, ...] = ()
    error: str | None = None


class Exporter(Protocol):
    """Sends spans to a collector; called by one thread at a time."""

    def export(self, spans: Sequence[Span], to_unix_s: float) -> bool:
        """Whether the collector has taken them. ``to_unix_s``: is added to a time to make it one of the world."""
        ...

    def close(self) -> None:
        """End what is going on; may be called beside ``export``."""
        ...


def new_span_id() -> str:
    """An id for a span."""
    return secrets.token_hex(8)


class Tracer:
    """Of one process.

    Args:
        exporter: of its collector.
        sample: the share of requests that have a trace, of those that come without one.
        is_first: whether requests may come without a trace. Else such a request has none: who sent it decides.
    """

    def __init__(self, exporter: Exporter, *, sample: float, is_first: bool, metrics: TracingMetrics, clock: Clock) -> None:
        self._exporter = exporter
        self._sample = sample
        self._is_first = is_first
        self._metrics = metrics
        self._clock = clock
        self._waiting: deque[Span] = deque()
        self._exporting: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._is_closed = False
        self._num_dropped = 0
        metrics.trace_spans_total("exported")

    def begin(self, traceparent: str) -> Trace:
        """The trace of a request that came with this header; a new one for a header that says none."""
        found = _PARENT.fullmatch(traceparent)
        if found is not None and _is_valid(*found.groups()):
            _, trace_id, parent_id, flags, _ = found.groups()
            return Trace(trace_id=trace_id, span_id=new_span_id(), parent_id=parent_id, is_sampled=bool(int(flags, 16) & 1))
        is_sampled = self._is_first and random.random() < self._sample
        return Trace(trace_id=secrets.token_hex(16), span_id=new_span_id(), parent_id=None, is_sampled=is_sampled)

    def keep(self, spans: Sequence[Span]) -> None:
        """Send them, soon. Never waits, never fails."""
        room = 0 if self._is_closed else MOST_WAITING - len(self._waiting)
        self._waiting.extend(spans[:room])
        if len(spans) > room:
            self._dropped(len(spans) - room, "no room")
        if self._waiting and (self._exporting is None or self._exporting.done()):
            self._exporting = asyncio.get_running_loop().create_task(self._export_all())

    async def close(self) -> None:
        """Send what waits, for a while; what is left then is dropped."""
        self._is_closed = True
        self._hurry.set()
        try:
            if self._exporting is not None:
                await self._clock.within(LAST_S, self._exporting)
        except TimeoutError:
            self._dropped(len(self._waiting), "the process ends")
            self._waiting.clear()
        finally:
            self._exporter.close()

    async def _export_all(self) -> None:
        """Batches, until nothing waits. The pause lets requests that end together go together."""
        while self._waiting:
            if len(self._waiting) < BATCH:
                with suppress(TimeoutError):
                    await self._clock.within(EXPORT_EVERY_S, self._hurry.wait())
            batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            was_taken = False
            try:
                was_taken = await self._sent(batch)
            finally:
                if was_taken:
                    self._metrics.trace_spans_total("exported").inc(len(batch))
                else:
                    self._dropped(len(batch), "the collector did not take them")

    async def _sent(self, batch: Sequence[Span]) -> bool:
        """In a thread that the end of the process does not wait for: a collector may hold one for ever."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bool] = loop.create_future()
        to_unix_s = time.time() - self._clock.now()

        def tell(was_taken: bool) -> None:
            if not answer.done():
                answer.set_result(was_taken)

        def send() -> None:
            was_taken = False
            try:
                was_taken = self._exporter.export(batch, to_unix_s)
            finally:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(tell, was_taken)

        threading.Thread(target=send, name="spans", daemon=True).start()
        return await answer

    def _dropped(self, count: int, reason: str) -> None:
        """Told of the 1st, 2nd, 4th, 8th ... time: a collector that is away must not fill the log."""
        if not count:
            return
        self._metrics.trace_spans_total("dropped").inc(count)
        self._num_dropped += 1
        if self._num_dropped & (self._num_dropped - 1) == 0:
            logger().warning("spans_dropped", reason=reason, spans=count, count=self._num_dropped)


def _is_valid(version: str, trace_id: str, parent_id: str, flags: str, more: str | None) -> bool:
    is_known = version != "ff" and (more is None or version != "00")
    return is_known and trace_id.strip("0") != "" and parent_id.strip("0") != ""


def check_installed(config: TracingConfig | None) -> None:
    """Raise ConfigError where spans are to be sent and the packages for it are not there."""
    if config is not None:
        _protocol(config)


def make_tracer(config: TracingConfig | None, *, role: str, instance: str, metrics: Metrics, clock: Clock) -> Tracer | None:
    """Of a process with this name, where spans are to be sent. Raises ConfigError, as ``check_installed``.

    A request that a prefill or a decode instance gets without a trace has none: who sent it has decided.
    """
    if config is None:
        return None
    exporter: Exporter = _protocol(config).make(config.endpoint, role=role, instance=instance, timeout_s=EXPORT_S)
    is_first = role not in ("prefill", "decode")
    return Tracer(exporter, sample=config.sample, is_first=is_first, metrics=metrics.tracing, clock=clock)


def _protocol(config: TracingConfig) -> Any:
    try:
        return importlib.import_module("longcat_pd.server.otel")
    except ModuleNotFoundError as error:
        lacks = f"needs packages that are not installed: pip install 'longcat-pd[otel]' ({error.name} is missing)"
        raise ConfigError(f"tracing.endpoint={config.endpoint}: {lacks}", param="tracing.endpoint") from None
