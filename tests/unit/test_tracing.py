"""Which requests have a trace, what is told of bad ends, and that no request waits for a collector or fails by it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from longcat_pd.clock import MonotonicClock
from longcat_pd.config.schema import TracingConfig
from longcat_pd.engine.request import Event, Request, SamplingParams, TransferRef
from longcat_pd.errors import ConfigError, RankLost
from longcat_pd.metrics import Metrics
from longcat_pd.server import tracing
from longcat_pd.server.body_spans import BodySpans
from longcat_pd.server.journal import Journal
from longcat_pd.server.requests import Call
from longcat_pd.server.service import Kept
from longcat_pd.server.tracing import BATCH, LAST_S, MOST_WAITING, Span, Tracer, check_installed, make_tracer
from tests.balancer_rig import BODY, DONE, Rig, chunk, error, origin, said, stream, whole
from tests.collector import collecting
from tests.manual_clock import ManualClock, settle

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{PARENT}-01"


@dataclass
class Exported:
    """Takes all, or holds the thread until the test lets it go."""

    spans: list[Span] = field(default_factory=list)
    calls: int = 0
    may_go: threading.Event = field(default_factory=threading.Event)
    is_closed: bool = False

    def export(self, spans: Sequence[Span], to_unix_s: float) -> bool:
        self.calls += 1
        self.may_go.wait(60)
        self.spans += spans
        return True

    def close(self) -> None:
        self.is_closed = True


def at_once() -> Exported:
    exported = Exported()
    exported.may_go.set()
    return exported


def tracer_of(exporter: Any, clock: Any, *, metrics: Metrics | None = None, **options: Any) -> Tracer:
    shown = (metrics or Metrics(role="decode", instance="d0")).tracing
    return Tracer(exporter, **{"sample": 1.0, "is_first": True, **options}, metrics=shown, clock=clock)


def counted(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith("longcat_pd_trace_spans_total{")]
    return {outcome: float(line.split()[1]) for line in lines for outcome in ("exported", "dropped") if outcome in line}


def a_span(number: int = 1) -> Span:
    return Span(name="x", trace_id=TRACE, span_id=f"{number:016x}", parent_id=None, began=1.0, ended=2.0)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00-1-2-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"{HEADER}-more",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f" {HEADER}",
        f"{HEADER}\n",
    ],
)
def test_a_header_that_says_no_trace(header: str) -> None:
    """Then the first process begins one, as often as it is told; another one has none."""
    clock = ManualClock()
    first = tracer_of(at_once(), clock).begin(header)
    assert (first.parent_id, first.is_sampled) == (None, True) and first.trace_id != TRACE
    assert not tracer_of(at_once(), clock, sample=0.0).begin(header).is_sampled
    assert not tracer_of(at_once(), clock, is_first=False).begin(header).is_sampled


@pytest.mark.parametrize(
    ("header", "is_sampled"), [(HEADER, True), (HEADER[:-2] + "00", False), (f"01{HEADER[2:]}-x", True)]
)
def test_a_header_that_says_one_decides(header: str, is_sampled: bool) -> None:
    trace = tracer_of(at_once(), ManualClock(), sample=0.5).begin(header)
    assert (trace.trace_id, trace.parent_id, trace.is_sampled) == (TRACE, PARENT, is_sampled)
    assert trace.passed_on("1" * 16) == f"00-{TRACE}-{'1' * 16}-{'01' if is_sampled else '00'}"


def test_a_share_of_the_requests_has_a_trace() -> None:
    tracer = tracer_of(at_once(), ManualClock(), sample=0.25)
    assert 800 < sum(tracer.begin("").is_sampled for _ in range(4000)) < 1200


async def test_a_collector_that_does_not_answer_costs_spans_and_nothing_else() -> None:
    exported, metrics, clock = Exported(), Metrics(role="decode", instance="d0"), ManualClock()
    tracer = tracer_of(exported, clock, metrics=metrics)
    tracer.keep([a_span()])
    await clock.advance(1.5)
    assert exported.calls == 1
    for _ in range(3):
        tracer.keep([a_span(number) for number in range(MOST_WAITING // 2)])
    await clock.advance(100.0)
    assert exported.calls == 1 and counted(metrics) == {"exported": 0, "dropped": MOST_WAITING // 2}
    closing = asyncio.ensure_future(tracer.close())
    await clock.advance(LAST_S - 0.1)
    assert not closing.done()
    await clock.advance(0.2)
    assert closing.done() and exported.is_closed
    assert counted(metrics) == {"exported": 0, "dropped": MOST_WAITING // 2 + MOST_WAITING + 1}
    tracer.keep([a_span()])
    assert counted(metrics)["dropped"] == MOST_WAITING // 2 + MOST_WAITING + 2
    exported.may_go.set()


async def test_what_waits_goes_at_the_end_without_a_pause() -> None:
    exported, metrics = at_once(), Metrics(role="decode", instance="d0")
    tracer = tracer_of(exported, ManualClock(), metrics=metrics)  # whose time does not pass
    tracer.keep([a_span(number) for number in range(1, 2 * BATCH + 11)])
    await asyncio.wait_for(tracer.close(), 10)
    assert len({span.span_id for span in exported.spans}) == 2 * BATCH + 10 and exported.calls == 3
    assert counted(metrics) == {"exported": 2 * BATCH + 10, "dropped": 0}


@pytest.mark.parametrize("mode", ["refuse", "gone"])
async def test_a_collector_that_refuses_or_is_not_there(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "EXPORT_S", 0.5)
    metrics = Metrics(role="decode", instance="d0")
    with collecting() as collector:
        collector.mode = "refuse"
        url = collector.url if mode == "refuse" else "http://127.0.0.1:9"
        config = TracingConfig(endpoint=url)
        tracer = make_tracer(config, role="decode", instance="d0", metrics=metrics, clock=MonotonicClock())
        assert tracer is not None
        tracer.keep([a_span()])
        await tracer.close()
    assert counted(metrics) == {"exported": 0, "dropped": 1} and not collector.bodies


async def test_of_the_environment_only_what_lets_it_in_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/elsewhere",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "0",
        "OTEL_SDK_DISABLED": "true",
        "OTEL_TRACES_SAMPLER": "always_off",
        "OTEL_SERVICE_NAME": "another",
        "OTEL_RESOURCE_ATTRIBUTES": "secret=1",
        "HTTP_PROXY": "http://127.0.0.1:9",
        "http_proxy": "http://127.0.0.1:9",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20of-a-collector",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tracing, "LAST_S", 60.0)  # it is sent at the end, of which a busy machine may take long
    monkeypatch.setattr(tracing, "EXPORT_S", 30.0)
    with collecting() as collector:
        config = TracingConfig(endpoint=f"{collector.url}/below/")
        metrics = Metrics(role="decode", instance="d0")
        tracer = make_tracer(config, role="decode", instance="d0", metrics=metrics, clock=MonotonicClock())
        assert tracer is not None
        tracer.keep([a_span()])
        await tracer.close()
        assert counted(metrics) == {"exported": 1, "dropped": 0} and collector.paths == {"/below/v1/traces"}
        (span,), (headers,) = collector.spans, collector.headers
    assert (span.service, span.instance, span.trace_id) == ("longcat_pd.decode", "d0", TRACE)
    assert headers["authorization"] == "Bearer of-a-collector" and headers["content-encoding"] == "gzip"
    assert b"secret" not in collector.bodies[0]


# ---------------------------------------------------------------------- without the packages, and without a collector


def test_without_the_packages_a_collector_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "longcat_pd.server.otel", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    check_installed(None)
    with pytest.raises(ConfigError, match=r"tracing\.endpoint=http://c:4318: .*pip install 'longcat-pd\[otel\]'") as caught:
        check_installed(TracingConfig(endpoint="http://c:4318"))
    assert caught.value.param == "tracing.endpoint"


def test_nothing_is_loaded_where_nothing_is_sent() -> None:
    """The web framework has the bare API of its own accord."""
    modules = "longcat_pd.load_balancer.__main__, longcat_pd.decode_worker.__main__, longcat_pd.standalone.serve"
    costly = "('opentelemetry.sdk', 'opentelemetry.exporter', 'requests', 'longcat_pd.server.otel')"
    code = f"import sys, {modules}; sys.exit(', '.join(m for m in {costly} if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------------- bad ends at an instance


def lived(*events: Event) -> Request:
    request = Request(request_id="r", prompt_token_ids=(5, 6, 7), sampling=SamplingParams(), deadline=9.0)
    for place, event in enumerate(events):
        request.life.stamp(event, 1000.0 + place)
    return request


async def ended_with(trouble: BaseException | None, *events: Event, header: str = HEADER, lives: int = 1) -> list[Span]:
    """The spans of a body at a prefill instance that ends ten seconds after it came."""
    clock, exported = ManualClock(), at_once()
    tracer = tracer_of(exported, clock, is_first=False)
    journal = Journal(None, clock.now, kept=Kept(bodies=BodySpans(tracer, "prefill")))
    call = Call(request_id="r", deadline=9.0, transfer=TransferRef(id="t", peer="d0"), traceparent=header)
    try:
        with journal.request(call) as record:
            for _ in range(lives):
                record.prompts.begin(0, lived(*events))
            await clock.advance(10.0)
            if trouble is not None:
                raise trouble
            record.finish = "stop"
    except (RankLost, ZeroDivisionError, asyncio.CancelledError):
        pass
    await asyncio.wait_for(tracer.close(), 30)
    return exported.spans


BROKEN_OFF = (Event.ARRIVED, Event.OFFERED, Event.GRANTED, Event.PREFILL_STARTED)


@pytest.mark.parametrize(
    ("trouble", "name"),
    [
        (RankLost("rank 1, of prompt 'secret'"), "RankLost"),
        (ZeroDivisionError(), "EngineFault"),
        (asyncio.CancelledError(), None),
    ],
)
async def test_a_bad_end_is_named_and_its_stages_end_with_it(trouble: BaseException, name: str | None) -> None:
    whole_span, queue, chunks, layers = await ended_with(trouble, *BROKEN_OFF)
    assert whole_span.error == name and (whole_span.began, whole_span.ended) == (1000.0, 1010.0)
    assert (whole_span.trace_id, whole_span.parent_id) == (TRACE, PARENT)
    assert (queue.began, queue.ended, "longcat.unfinished" in queue.attributes) == (1000.0, 1003.0, False)
    for stage in (chunks, layers):
        assert (stage.began, stage.ended, stage.attributes["longcat.unfinished"]) == (1003.0, 1010.0, True)
        assert stage.parent_id == whole_span.span_id and stage.error is None
    assert "secret" not in repr([whole_span, queue, chunks, layers])


async def test_choices_are_told_apart_and_bounded() -> None:
    spans = await ended_with(None, *BROKEN_OFF, lives=20)
    assert {span.attributes.get("longcat.choice") for span in spans} == {None, *range(8)} and len(spans) == 1 + 3 * 8
    assert spans[0].attributes["longcat.choices"] == 20


async def test_a_leg_without_a_trace_has_no_spans() -> None:
    assert await ended_with(None, *BROKEN_OFF, header="") == []
    assert await ended_with(None, *BROKEN_OFF, header=HEADER[:-2] + "00") == []


# ---------------------------------------------------------------------- bad ends at the balancer

STREAMED = {**BODY, "stream": True}


async def told(rig: Rig, exported: Exported, exchange: Any, *, within_s: float = 10.0) -> list[Span]:
    await rig.clock.advance(within_s)
    await exchange.end()
    assert rig.means.tracer is not None
    await asyncio.wait_for(rig.means.tracer.close(), 30)
    return exported.spans


async def test_a_second_attempt_and_its_cause() -> None:
    exported = at_once()
    rig = await Rig.make("p0 d0 d1", exporter=exported)
    rig.script(d0=error(503, "overloaded", "load"), d1=whole)
    headers = {"traceparent": HEADER, "tracestate": "a=b"}
    root, *tries = await told(rig, exported, rig.post(**headers))
    assert (root.trace_id, root.parent_id, root.error, root.name) == (TRACE, PARENT, None, "POST /v1/chat/completions")
    assert [mark.name for mark in root.marks] == ["queued", "paired", "retry"]
    assert [(t.error, t.attributes["longcat.decode"], t.parent_id) for t in tries] == [
        ("Overloaded", "d0", root.span_id),
        (None, "d1", root.span_id),
    ]
    assert tries[0].ended <= tries[1].began and root.began <= tries[0].began and tries[1].ended <= root.ended
    legs = [call.headers["traceparent"] for call in rig.cluster.calls]
    assert sorted(legs) == sorted(f"00-{TRACE}-{tried.span_id}-01" for tried in tries for _ in range(2))
    assert {call.headers["tracestate"] for call in rig.cluster.calls} == {"a=b"}


async def test_an_answer_that_another_pair_finishes() -> None:
    exported = at_once()
    rig = await Rig.make("p0 p1 d0 d1", exporter=exported)
    begun = stream(
        origin() + said(7) + chunk("a"), b'data: {"error":{"message":"m","type":"server_error","code":"rank_lost"}}\n\n'
    )
    rest = stream(chunk("b", "stop"), DONE)
    rig.script(d0=begun, d1=rest)
    root, *tries = await told(rig, exported, rig.post(STREAMED))
    assert [mark.name for mark in root.marks] == ["queued", "paired", "failover", "first_token"] or [
        mark.name for mark in root.marks
    ] == ["queued", "paired", "first_token", "failover"]
    assert [(tried.error, tried.attributes.get("longcat.failed_at")) for tried in tries] == [
        ("RankLost", "d0"),
        (None, None),
    ]
    assert (root.error, root.attributes["longcat.failover"], root.attributes["longcat.attempts"]) == (None, "resumed", 2)


async def test_a_request_that_fails_and_one_whose_client_leaves() -> None:
    exported = at_once()
    rig = await Rig.make(exporter=exported)
    rig.script(d0=error(500, "engine_fault", "self"))
    failing = rig.post(**{"X-Request-Id": "r-1", "tracestate": "a=b"})
    await rig.clock.advance(1.0)
    await failing.end()
    assert {call.headers.get("tracestate") for call in rig.cluster.calls} == {None}, "it belongs to no trace"
    rig.script(d0=stream(chunk("a"), 50.0, DONE, clock=rig.clock))
    leaving = rig.post(STREAMED, **{"X-Request-Id": "r-2"})
    await settle()
    await leaving.leave()
    spans = await told(rig, exported, failing)
    roots = {span.attributes["longcat.request_id"]: span for span in spans if span.parent_id is None}
    assert (roots["r-1"].error, roots["r-1"].attributes["longcat.code"]) == ("EngineFault", "engine_fault")
    assert (roots["r-2"].error, roots["r-2"].attributes["longcat.outcome"]) == (None, "cancelled")
    assert roots["r-2"].marks[-1].name == "cut by client" and len(spans) == 4


async def test_an_instance_is_told_that_a_request_has_no_trace() -> None:
    exported = at_once()
    rig = await Rig.make(exporter=exported)
    assert await told(rig, exported, rig.post(traceparent=HEADER[:-2] + "00")) == []
    assert {call.headers["traceparent"][-3:] for call in rig.cluster.calls} == {"-00"}
