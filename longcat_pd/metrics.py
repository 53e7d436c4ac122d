"""Every metric of the product, declared once; one ``Metrics`` object with a registry of its own for each process.

Owns names, kinds, labels, buckets, and which roles show a metric. Does not know who counts. ``role`` and ``instance`` are
bound when the object is made; what is left are the few labels named at each attribute, whose values come from closed sets.
Where such a set is given here, all its members are there from the beginning: a rate needs the zero before the one.

Names of attributes are those of the metrics, in groups: ``metrics.http.inflight_requests`` is
``longcat_pd_inflight_requests``. A metric with more labels is called with their values, in order:
``metrics.engine.blocks("free").set(7)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import product
from types import MappingProxyType
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST

_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)
_WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)

_GAPS = (0.00005, 0.0001, 0.0002, 0.0005, *_STEPS)

_GENERATING = ("decode", "standalone")  # roles
_ANSWERING = (*_GENERATING, "load_balancer")
_PREFILLING = ("prefill", "standalone", "load_balancer")
_HANDING_OVER = ("prefill", "decode", "load_balancer")
_ANSWERS = MappingProxyType[str, tuple[str, ...]]({"route": (), "status": ()})
_PHASES = MappingProxyType({"prefill": ("prefill",), "decode": ("decode",), "standalone": ("prefill", "decode")})


class Labelled(Generic[_Metric]):
    """A metric with labels besides role and instance: call it with their values to get the one to change."""

    def __init__(self, family: _Metric, bound: tuple[str, str]) -> None:
        self._family: _Metric = family
        self._bound = bound

    def __call__(self, *values: str) -> _Metric:
        """The child for these label values."""
        return self._family.labels(*self._bound, *values)


class _Declare:
    """Makes metrics in one registry, with the prefix and the two labels that all of them have.

    ``labels`` maps each further label to its values; no values: they come as they are used. ``of``: the roles that show the
    metric; in another one it can be used and is not seen.
    """

    def __init__(self, registry: CollectorRegistry, role: str, instance: str) -> None:
        self._registry = registry
        self._bound = (role, instance)

    def counters(
        self, name: str, text: str, labels: Mapping[str, Sequence[str]], *, of: Sequence[str] = ()
    ) -> Labelled[Counter]:
        return self._bind(Counter(f"longcat_pd_{name}", text, _names(labels), registry=self._registry_of(of)), labels)

    def gauges(self, name: str, text: str, labels: Mapping[str, Sequence[str]]) -> Labelled[Gauge]:
        return self._bind(Gauge(f"longcat_pd_{name}", text, _names(labels), registry=self._registry), labels)

    def histograms(
        self,
        name: str,
        text: str,
        labels: Mapping[str, Sequence[str]],
        *,
        buckets: Sequence[float] = _WAITS,
        of: Sequence[str] = (),
    ) -> Labelled[Histogram]:
        family = Histogram(
            f"longcat_pd_{name}", text, _names(labels), registry=self._registry_of(of), buckets=tuple(buckets)
        )
        return self._bind(family, labels)

    def counter(self, name: str, text: str, *, of: Sequence[str] = ()) -> Counter:
        return self.counters(name, text, {}, of=of)()

    def gauge(self, name: str, text: str) -> Gauge:
        return self.gauges(name, text, {})()

    def histogram(self, name: str, text: str, *, buckets: Sequence[float] = _WAITS, of: Sequence[str] = ()) -> Histogram:
        return self.histograms(name, text, {}, buckets=buckets, of=of)()

    def phases(self) -> tuple[str, ...]:
        """The phases of the steps of this role."""
        return _PHASES.get(self._bound[0], ())

    def _bind(self, family: _Metric, labels: Mapping[str, Sequence[str]]) -> Labelled[_Metric]:
        bound = Labelled(family, self._bound)
        for values in product(*labels.values()):
            bound(*values)
        return bound

    def _registry_of(self, roles: Sequence[str]) -> CollectorRegistry | None:
        return self._registry if not roles or self._bound[0] in roles else None


def _names(labels: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    return ("role", "instance", *labels)


class HttpMetrics:
    """What the HTTP face saw. ``route`` is a path of our own table or ``other``; ``status`` includes 499."""

    def __init__(self, declare: _Declare) -> None:
        self.http_requests_total = declare.counters("http_requests_total", "Answers sent", _ANSWERS)
        self.http_request_seconds = declare.histograms(
            "http_request_seconds", "From the request's head to the end of its answer", _ANSWERS
        )
        self.inflight_requests = declare.gauge("inflight_requests", "Generation requests that have no end yet")

    def finished(self, *, route: str, status: int, seconds: float) -> None:
        """Count one answer."""
        self.http_requests_total(route, str(status)).inc()
        self.http_request_seconds(route, str(status)).observe(seconds)


class RequestMetrics:
    """Generation requests. ``outcome``: stop, length, tool_calls, cancelled, or an error code.

    ``cancels_total(source)``: client, deadline, peer, drain.
    """

    def __init__(self, declare: _Declare) -> None:
        self.requests_total = declare.counters("requests_total", "Generation requests by how they ended", {"outcome": ()})
        self.cancels_total = declare.counters(
            "cancels_total", "Requests ended before their time", {"from": ("client", "deadline", "peer", "drain")}
        )
        self.prompt_tokens_total = declare.counter("prompt_tokens_total", "Tokens of prompts")
        self.cached_tokens_total = declare.counter("cached_tokens_total", "Tokens of prompts that were not computed again")
        self.output_tokens_total = declare.counter("output_tokens_total", "Tokens of answers", of=_ANSWERING)
        self.queue_seconds = declare.histogram("queue_seconds", "Arrival to the first plan or the offer's grant")
        self.prefill_seconds = declare.histogram("prefill_seconds", "First prefill plan to the first token", of=_PREFILLING)
        self.transfer_seconds = declare.histogram(
            "transfer_seconds", "End of prefill to the committed hand-over", of=_HANDING_OVER
        )
        self.first_token_seconds = declare.histogram("first_token_seconds", "Arrival to the first token", of=_ANSWERING)
        self.per_token_seconds = declare.histogram(
            "per_token_seconds", "Mean time between tokens of one answer", buckets=_STEPS, of=_ANSWERING
        )
        self.request_seconds = declare.histogram("request_seconds", "Arrival to the last token")


class EngineMetrics:
    """Steps, queues and memory of one instance.

    ``step_seconds(phase)``, ``driver_step_seconds(phase)``: prefill, decode. The share of the driver's time that ranks feel
    is the sum of ``step_wait_seconds`` divided by that and the sum of ``step_compute_seconds``. States: ``sequences``
    waiting, running; ``blocks`` free, cached, reserved, live, quarantined; ``slots`` free, used; ``ranks`` ok, silent,
    lost.
    """

    def __init__(self, declare: _Declare) -> None:
        phase = {"phase": declare.phases()}
        self.step_seconds = declare.histograms(
            "step_seconds", "A plan's turn to its output received", phase, buckets=_STEPS
        )
        self.driver_step_seconds = declare.histograms(
            "driver_step_seconds", "The driver's own work for one step", phase, buckets=_STEPS
        )
        self.step_wait_seconds = declare.histogram(
            "step_wait_seconds", "What a rank waited for a decode step that was due", buckets=_GAPS, of=_GENERATING
        )
        self.step_compute_seconds = declare.histogram(
            "step_compute_seconds", "What a rank computed a decode step", buckets=_STEPS, of=_GENERATING
        )
        self.draft_tokens_total = declare.counter(
            "draft_tokens_total", "Tokens proposed by the draft source", of=_GENERATING
        )
        self.accepted_tokens_total = declare.counter(
            "accepted_tokens_total", "Proposed tokens that were accepted", of=_GENERATING
        )
        self.sequences = declare.gauges("sequences", "Sequences in the scheduler", {"state": ("waiting", "running")})
        self.blocks = declare.gauges(
            "blocks",
            "Cache blocks, all shards together",
            {"state": ("free", "cached", "reserved", "live", "quarantined")},
        )
        self.slots = declare.gauges("slots", "Decode slots", {"state": ("free", "used")})
        self.compilations = declare.gauge("compilations", "Graphs that the ranks compiled since they began")
        self.ranks = declare.gauges("ranks", "Rank processes", {"state": ("ok", "silent", "lost")})


class TransferMetrics:
    """Hand-overs. ``transfers_total(outcome)``: committed, aborted, timed_out, digest_mismatch, peer_lost."""

    def __init__(self, declare: _Declare) -> None:
        self.transfers_open = declare.gauge("transfers_open", "Hand-overs without an end yet")
        outcomes = ("committed", "aborted", "timed_out", "digest_mismatch", "peer_lost")
        self.transfers_total = declare.counters("transfers_total", "Hand-overs by how they ended", {"outcome": outcomes})
        self.transfer_bytes_total = declare.counter("transfer_bytes_total", "Cache bytes sent or received on lanes")
        self.transfer_early_bytes_total = declare.counter(
            "transfer_early_bytes_total",
            "Of transfer_bytes_total, sent before the last layer of the prompt was computed",
            of=("prefill",),
        )


class BalancerMetrics:
    """Legs and instances as the balancer sees them.

    ``leg``: prefill, decode; ``cause``: client, load, self, peer; ``outcome`` of a failover: completed, failed, no_pair.
    """

    def __init__(self, declare: _Declare) -> None:
        leg = {"leg": ("prefill", "decode")}
        self.legs_open = declare.gauges("legs_open", "Calls to workers without an end yet", leg)
        self.leg_failures_total = declare.counters(
            "leg_failures_total", "Calls to workers that failed", {**leg, "cause": ("client", "load", "self", "peer")}
        )
        self.retries_total = declare.counter("retries_total", "Second attempts")
        self.failovers_total = declare.counters(
            "failovers_total", "Answers that another pair had to finish", {"outcome": ("completed", "failed", "no_pair")}
        )
        self.instance_ready = declare.gauges("instance_ready", "Whether an instance is in the pool", {"target": ()})
        self.breaker_open = declare.gauges(
            "breaker_open", "Whether an instance is kept out for its failures", {"target": ()}
        )


class TracingMetrics:
    """Of a process that tells a collector of its requests. ``outcome``: exported, dropped."""

    def __init__(self, declare: _Declare) -> None:
        outcome = {"outcome": ("exported", "dropped")}
        self.trace_spans_total = declare.counters("trace_spans_total", "Spans by what became of them", outcome)


class Metrics:
    """All metrics of one process; a group is declared when it is first used, so that nobody shows what it cannot move.

    Args:
        role: prefill, decode, standalone or load_balancer.
        instance: the process's own name in the configuration.
    """

    def __init__(self, *, role: str, instance: str) -> None:
        self._registry = CollectorRegistry()
        self._refreshes: list[Callable[[], None]] = []
        self._declare = declare = _Declare(self._registry, role, instance)
        build = dict.fromkeys(("version", "model_digest", "wire_version"), ())
        self._build_info = declare.gauges("build_info", "Always 1", build)
        self.ready = declare.gauge("ready", "What /ready says")
        self.draining = declare.gauge("draining", "Whether new requests are refused because the process is to end")

    @cached_property
    def http(self) -> HttpMetrics:
        """What the HTTP face saw."""
        return HttpMetrics(self._declare)

    @cached_property
    def requests(self) -> RequestMetrics:
        """Generation requests."""
        return RequestMetrics(self._declare)

    @cached_property
    def engine(self) -> EngineMetrics:
        """Of a process with an engine."""
        return EngineMetrics(self._declare)

    @cached_property
    def transfers(self) -> TransferMetrics:
        """Of a process with peers."""
        return TransferMetrics(self._declare)

    @cached_property
    def balancer(self) -> BalancerMetrics:
        """Of the balancer."""
        return BalancerMetrics(self._declare)

    @cached_property
    def tracing(self) -> TracingMetrics:
        """Of a process that tells a collector of its requests."""
        return TracingMetrics(self._declare)

    def build_info(self, *, version: str, model_digest: str, wire_version: str) -> None:
        """Say once what runs here."""
        self._build_info(version, model_digest, wire_version).set(1)

    def refresh_with(self, refresh: Callable[[], None]) -> None:
        """Call ``refresh`` before each rendering; for gauges that are read from state rather than counted along."""
        self._refreshes.append(refresh)

    def render(self) -> bytes:
        """The Prometheus text of all metrics; its content type is ``CONTENT_TYPE``."""
        for refresh in self._refreshes:
            refresh()
        return generate_latest(self._registry)
