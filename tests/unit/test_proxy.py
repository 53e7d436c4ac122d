"""What a client sees, and what becomes of both calls, for everything that workers and clients can do."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from longcat_pd.errors import WorkerUnavailable
from longcat_pd.load_balancer.attempt import Attempt, Call
from tests.balancer_rig import (
    BODY,
    CHAT,
    COMPLETIONS,
    DONE,
    WHOLE_BYTES,
    Exchange,
    LegCall,
    Rig,
    Script,
    chunk,
    error,
    good_stream,
    later,
    never,
    prefilled,
    raises,
    raw,
    refused,
    reset,
    stream,
    whole,
)
from tests.manual_clock import settle

STREAMED = {**BODY, "stream": True}
BAD_PROMPT = error(400, "context_length_exceeded", "client", kind="invalid_request_error")
ECHO = error(502, "transfer_failed", "peer")
TOO_MANY = error(429, "too_many_requests", "client", kind="rate_limit_error", retry_after="1")


def both_ways(test: Callable[..., Any]) -> Callable[..., Any]:
    return pytest.mark.parametrize("body", [BODY, STREAMED], ids=["whole", "stream"])(test)


async def ended(rig: Rig, exchange: Exchange, *, within_s: float = 1.0) -> Exchange:
    """Let so much time pass; the request must have its end then, and nothing may be left open."""
    await rig.clock.advance(within_s)
    assert exchange.task.done()
    await exchange.end()
    assert rig.is_idle()
    return exchange


async def next_one_is_served(rig: Rig, *names: str) -> None:
    """The processes still serve."""
    for name in names or ("p0", "d0"):
        rig.script(**{name: prefilled if name.startswith("p") else whole})
    await rig.poll()
    answer = await ended(rig, rig.post())
    assert (answer.status, answer.body) == (200, WHOLE_BYTES)


# ---------------------------------------------------------------------- the good case


async def test_both_legs_get_the_untouched_body_and_each_others_name() -> None:
    rig = await Rig.make(key="cluster-secret")
    body = b'{ "messages":[{"role":"user","content":"\\u4f60"}],\n"max_tokens":4, "x":1 }'
    headers = {
        "X-Request-Id": "abc-1",
        "traceparent": "00-1-2-01",
        "tracestate": "a=b",
        "Authorization": "Bearer clients-own",
        "X-Longcat-Peer": "evil",
        "X-Longcat-Transfer-Id": "evil",
        "X-Request-Timeout": "7.5",
    }
    answer = await ended(rig, rig.post(body, **headers))
    assert (answer.status, answer.body) == (200, WHOLE_BYTES)
    assert answer.headers["x-request-id"] == "abc-1"
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["content-length"] == str(len(WHOLE_BYTES))
    assert not [name for name in answer.headers if name.startswith("x-longcat")]
    (p,), (d,) = rig.cluster.of("p0"), rig.cluster.of("d0")
    for leg, peer in ((p, "d0"), (d, "p0")):
        assert (leg.path, leg.body) == (CHAT, body)
        assert leg.headers["x-request-id"] == "abc-1"
        assert leg.headers["x-longcat-peer"] == peer
        assert leg.headers["x-longcat-deadline-ms"] == "7500"
        assert leg.headers["x-longcat-attempt"] == "1"
        assert (leg.headers["traceparent"], leg.headers["tracestate"]) == ("00-1-2-01", "a=b")
        assert "x-request-timeout" not in leg.headers
        assert leg.headers["authorization"] == "Bearer cluster-secret"
        assert (leg.started, leg.state) == (rig.clock.now() - 1.0, "done")
    assert p.headers["x-longcat-transfer-id"] == d.headers["x-longcat-transfer-id"]
    assert len(bytes.fromhex(p.headers["x-longcat-transfer-id"])) == 16


async def test_a_stream_is_passed_on_event_by_event() -> None:
    rig = await Rig.make()
    first, second = chunk("你"), chunk("好")
    rig.script(d0=stream(first[:9], first[9:] + second[:3], second[3:], 3.0, b": a comment\n\n", DONE, clock=rig.clock))
    exchange = rig.post(STREAMED)
    await settle()
    assert exchange.status == 200
    assert exchange.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert exchange.headers["cache-control"] == "no-cache"
    assert exchange.headers["x-accel-buffering"] == "no"
    assert exchange.body == first + second
    assert not exchange.is_complete
    await ended(rig, exchange, within_s=4)
    assert exchange.body == first + second + DONE
    assert exchange.is_complete
    assert rig.cluster.of("d0")[0].state == "done"  # read to its end: closing earlier would be a cancel


@both_ways
async def test_silence_is_not_failure(body: Any) -> None:
    rig = await Rig.make()
    rig.script(p0=later(rig.clock, 3000, prefilled), d0=later(rig.clock, 3500, good_stream if body is STREAMED else whole))
    exchange = rig.post(body)
    await rig.clock.advance(3499)
    assert exchange.status == 0
    await ended(rig, exchange, within_s=2)
    assert exchange.status == 200


async def test_the_end_of_d_closes_p() -> None:
    rig = await Rig.make()
    rig.script(p0=never)
    answer = await ended(rig, rig.post(STREAMED | {"stream": False}))
    assert answer.status == 200
    assert rig.cluster.of("p0")[0].state == "cancelled"


@both_ways
async def test_a_prefill_that_ends_just_behind_the_answer_is_no_cancel(
    body: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = await Rig.make()
    rig.script(p0=later(rig.clock, 0.5, prefilled), d0=good_stream if body is STREAMED else whole)
    exchange = rig.post(body)
    await settle()
    assert exchange.is_complete and not exchange.task.done(), "the client waits for nothing"
    await ended(rig, exchange, within_s=0.5)
    assert rig.cluster.of("p0")[0].state == "done"
    progress = rig.face.proxy.recent[-1]
    assert progress.prefilled is not None and progress.told_at == progress.started == rig.clock.now() - 0.5
    (told,) = [line for line in capsys.readouterr().out.splitlines() if " request_finished " in line]
    assert " ms=0 " in told and " prefill_ms=" in told


@both_ways
@pytest.mark.parametrize("end", ["deadline", "client"])
async def test_what_comes_behind_the_whole_answer_makes_it_no_failure(body: Any, end: str) -> None:
    rig = await Rig.make()
    rig.script(p0=never, d0=good_stream if body is STREAMED else whole)
    exchange = rig.post(body, **{"X-Request-Timeout": "0.5"} if end == "deadline" else {})
    await settle()
    assert exchange.is_complete
    if end == "client":
        await exchange.leave()
    await ended(rig, exchange)
    (progress,) = rig.face.proxy.recent
    assert (progress.failure, progress.cut_by, progress.finish) == (None, None, "stop")


# ---------------------------------------------------------------------- A1: the client's fault, found late


@both_ways
@pytest.mark.parametrize("at", ["p0", "d0"])
async def test_the_clients_fault_is_passed_on_unchanged_and_ends_the_other_leg(body: Any, at: str) -> None:
    rig = await Rig.make("p0 p1 d0 d1")
    other = "d0" if at == "p0" else "p0"
    rig.script(**{at: later(rig.clock, 5, BAD_PROMPT), other: never})
    exchange = rig.post(body)
    await rig.clock.advance(4.9)
    answer = await ended(rig, exchange)
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"
    assert answer.error["message"] == "context_length_exceeded of a worker"
    assert rig.cluster.of(other)[0].state == "cancelled"
    assert len(rig.cluster.calls) == 2
    assert not any(i.breaker._failures for i in rig.means.pool.instances.values())
    await next_one_is_served(rig, "p0", "d0")


# ---------------------------------------------------------------------- A2: a worker fails before the first byte


@both_ways
@pytest.mark.parametrize("at", ["p0", "d0"])
@pytest.mark.parametrize(
    ("script", "status", "code", "retries"),
    [
        (raises(refused), 503, "worker_unavailable", True),
        (raises(reset), 503, "worker_unavailable", True),
        (error(500, "rank_lost", "self"), 500, "rank_lost", True),
        (error(500, "engine_fault", "self", x_should_retry="false"), 500, "engine_fault", False),
        (error(503, "overloaded", "load", retry_after="7"), 503, "overloaded", True),
        (error(503, "draining", "load"), 503, "draining", True),
        (error(502, "transfer_failed", "self"), 502, "transfer_failed", True),
        (error(504, "deadline_exceeded", "self"), 504, "deadline_exceeded", False),
    ],
)
async def test_a_failing_worker_is_tried_elsewhere_once_or_reported(
    body: Any, at: str, script: Script, status: int, code: str, retries: bool
) -> None:
    rig = await Rig.make("p0 p1 d0 d1")
    everybody = {"p0": never, "p1": never, "d0": never, "d1": never}
    rig.script(**{**everybody, at: script, at[0] + "1": script})  # the second attempt fails as well
    answer = await ended(rig, rig.post(body))
    assert answer.status == status
    assert answer.error["code"] == code
    failed = [call for call in rig.cluster.calls if call.worker[0] == at[0]]
    silent = [call for call in rig.cluster.calls if call.worker[0] != at[0]]
    assert [call.headers["x-longcat-attempt"] for call in failed] == (["1", "2"] if retries else ["1"])
    assert len({call.headers["x-longcat-transfer-id"] for call in failed}) == len(failed)
    assert len({call.worker for call in failed}) == len(failed)
    assert all(call.state == "cancelled" for call in silent)
    if code == "overloaded":
        assert answer.headers["retry-after"] == "7"
    if code == "engine_fault":
        assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("at", ["p0", "d0"])
async def test_a_deadline_that_a_worker_sees_first_is_counted_like_any_other(at: str) -> None:
    rig = await Rig.make("p0 d0")
    rig.script(**{"p0": never, "d0": never, at: error(504, "deadline_exceeded", "self")})
    assert (await ended(rig, rig.post(BODY))).status == 504
    text = rig.means.metrics.render().decode()
    assert 'requests_total{instance="lb",outcome="deadline_exceeded",role="load_balancer"} 1.0' in text
    assert 'cancels_total{from="deadline",instance="lb",role="load_balancer"} 1.0' in text


@both_ways
@pytest.mark.parametrize("at", ["p0", "d0"])
async def test_the_second_attempt_can_succeed_and_the_first_is_closed_before_it_begins(body: Any, at: str) -> None:
    rig = await Rig.make("p0 p1 d0 d1")
    good = good_stream if body is STREAMED else whole
    rig.script(p0=never, d0=never, d1=good)
    rig.script(**{at: later(rig.clock, 2, raises(reset))})
    exchange = rig.post(body)
    await rig.clock.advance(1.9)
    answer = await ended(rig, exchange)
    assert answer.status == 200
    first, second = rig.cluster.calls[:2], rig.cluster.calls[2:]
    assert all(call.ended is not None and call.ended <= second[0].started for call in first)
    assert {call.body for call in rig.cluster.calls} == {json.dumps(body).encode()}
    assert len({call.headers["x-request-id"] for call in rig.cluster.calls}) == 1
    text = rig.means.metrics.render().decode()
    assert 'longcat_pd_retries_total{instance="lb",role="load_balancer"} 1.0' in text


@pytest.mark.parametrize(
    ("script", "num_attempts"),
    [(error(502, "transfer_failed", "self"), 2), (error(503, "overloaded", "load"), 1), (raises(reset), 1)],
)
async def test_the_same_pair_is_tried_again_for_transfer_failed_only(script: Script, num_attempts: int) -> None:
    rig = await Rig.make()
    rig.script(d0=script, p0=never)
    await ended(rig, rig.post())
    assert len(rig.cluster.of("d0")) == num_attempts


async def test_no_retry_when_it_is_switched_off_or_too_late() -> None:
    rig = await Rig.make("p0 d0 d1", retry=0)
    rig.script(d0=raises(reset), d1=raises(reset))
    assert (await ended(rig, rig.post())).status == 503
    assert len(rig.cluster.of("p0")) == 1
    rig = await Rig.make("p0 d0 d1")
    rig.script(d0=later(rig.clock, 4.5, raises(reset)), d1=whole, p0=never)
    exchange = rig.post(**{"X-Request-Timeout": "5.4"})
    assert (await ended(rig, exchange, within_s=5)).status == 503
    assert len(rig.cluster.of("p0")) == 1


async def test_a_refused_leg_puts_the_instance_out_at_once() -> None:
    rig = await Rig.make("p0 d0 d1")
    rig.script(d0=raises(refused))
    for _ in range(4):
        assert (await ended(rig, rig.post())).status == 200
    assert len(rig.cluster.of("d0")) == 1


# ---------------------------------------------------------------------- A3: cause and echo


@both_ways
@pytest.mark.parametrize("echo_at", ["p0", "d0"])
@pytest.mark.parametrize("lead", [-0.19, -0.1, -0.001, 0.0, 0.001, 0.1, 0.19])
@pytest.mark.parametrize(
    ("cause", "status", "code"),
    [
        (error(500, "rank_lost", "self"), 500, "rank_lost"),
        (BAD_PROMPT, 400, "context_length_exceeded"),
        (error(503, "overloaded", "load"), 503, "overloaded"),
    ],
    ids=["self", "client", "load"],
)
async def test_the_cause_wins_over_its_echo_in_both_orders(
    body: Any, echo_at: str, lead: float, cause: Script, status: int, code: str
) -> None:
    rig = await Rig.make()
    cause_at = "d0" if echo_at == "p0" else "p0"
    rig.script(**{echo_at: later(rig.clock, 1 - lead, ECHO), cause_at: later(rig.clock, 1, cause)})
    answer = await ended(rig, rig.post(body), within_s=2)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert len(rig.cluster.calls) == 2  # the retry rule follows the cause: none of these is tried again on one pair


async def test_an_echo_alone_is_held_for_200_ms_and_then_told() -> None:
    rig = await Rig.make(retry=0)
    rig.script(p0=never, d0=ECHO)
    exchange = rig.post()
    await rig.clock.advance(0.19)
    assert exchange.status == 0
    await rig.clock.advance(0.02)
    assert exchange.status == 502
    assert rig.is_idle()
    assert not any(i.breaker._failures for i in rig.means.pool.instances.values())


async def test_two_echoes_and_an_echo_after_a_good_prefill_are_told_at_once() -> None:
    for p0 in (ECHO, prefilled):
        rig = await Rig.make(retry=0)
        rig.script(p0=p0, d0=later(rig.clock, 0.01, ECHO))
        exchange = rig.post()
        await rig.clock.advance(0.02)
        assert exchange.status == 502


async def test_a_token_during_the_hold_is_the_answer() -> None:
    rig = await Rig.make()
    rig.script(p0=ECHO, d0=later(rig.clock, 0.1, whole))
    assert (await ended(rig, rig.post())).status == 200


async def test_after_an_echo_the_silent_side_is_the_one_to_avoid() -> None:
    rig = await Rig.make("p0 p1 d0 d1")
    rig.script(p0=[ECHO, prefilled], d0=never, d1=whole)
    with rig.means.pool.leg(rig.means.pool.instances["p1"], 10_000):
        exchange = rig.post()
        await rig.clock.advance(1)
    assert exchange.status == 200
    assert (len(rig.cluster.of("p0")), len(rig.cluster.of("d0")), len(rig.cluster.of("d1"))) == (2, 1, 1)


@both_ways
@pytest.mark.parametrize("at", ["p0", "d0"])
@pytest.mark.parametrize("lead", [-0.1, 0.0, 0.1, None], ids=["behind it", "with it", "before it", "alone"])
@pytest.mark.parametrize("code", ["overloaded", "draining"])
async def test_a_refusal_that_the_peer_repeats_first_is_blamed_on_who_refused(
    body: Any, at: str, lead: float | None, code: str
) -> None:
    """One of the role of who refuses is not tried again, and the only one of the other role is."""
    rig = await Rig.make("p0 d0 d1" if at == "d0" else "p0 p1 d0")
    teller, other = ("p0", "d1") if at == "d0" else ("d0", "p1")
    good = good_stream if body is STREAMED else whole
    own = never if lead is None else later(rig.clock, 1, error(503, code, "load", retry_after="9"))
    echo = later(rig.clock, 1 - (lead or 0.0), error(503, code, "peer", retry_after="1"))
    rig.script(**{at: own, teller: [echo, prefilled if teller == "p0" else good], other: good if at == "d0" else prefilled})
    answer = await ended(rig, rig.post(body), within_s=2)
    assert answer.status == 200
    assert [call.worker for call in rig.cluster.calls if call.headers["x-longcat-attempt"] == "2"] in (
        [teller, other],
        [other, teller],
    )
    assert not any(i.breaker._failures for i in rig.means.pool.instances.values())


@pytest.mark.parametrize("names", ["p0 d0", "p0 p1 d0"])
async def test_a_refusal_that_was_only_repeated_is_not_asked_for_again(names: str) -> None:
    """The only instance that could take it has no room, whichever other one is in front of it."""
    rig = await Rig.make(names)
    rig.script(p0=error(503, "overloaded", "peer", retry_after="7"), d0=never)
    answer = await ended(rig, rig.post())
    assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "overloaded", "7")
    assert len(rig.cluster.calls) == 2


async def test_an_attempt_that_is_left_before_it_has_begun_leaves_nothing() -> None:
    rig = await Rig.make()
    call = Call(route=CHAT, body=b"{}", request_id="r", deadline=rig.clock.now() + 1, is_stream=False)
    async with Attempt(rig.means, call, pair=rig.means.pool.choose(), number=1):
        assert not rig.is_idle()
    assert rig.is_idle()


# ---------------------------------------------------------------------- A4, A5: streams that fail


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        (stream(reset), 503, "worker_unavailable"),
        (stream(chunk("a")[:10], reset), 503, "worker_unavailable"),
        (
            stream(b'data: {"error":{"message":"m","type":"server_error","param":null,"code":"rank_lost"}}\n\n'),
            500,
            "rank_lost",
        ),
        (stream(), 502, "bad_worker_answer"),
        (stream(DONE), 502, "bad_worker_answer"),
    ],
)
async def test_a_stream_that_fails_before_its_first_event_is_a_status(script: Script, status: int, code: str) -> None:
    rig = await Rig.make()
    rig.script(d0=script)
    answer = await ended(rig, rig.post(STREAMED))
    assert (answer.status, answer.error["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("num_good", [1, 2, 5])
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ((reset,), "worker_unavailable"),
        ((chunk("half")[:-1], reset), "worker_unavailable"),
        ((chunk("half")[:-1],), "bad_worker_answer"),
        ((), "bad_worker_answer"),
        ((b"data: {\n\n", chunk("x"), DONE), "bad_worker_answer"),
        ((b"<html>gone</html>\n\n", DONE), "bad_worker_answer"),
        ((chunk("x").rstrip() + b"\n" + chunk("y"), DONE), "bad_worker_answer"),
        ((b"event: x\n" + chunk("x"), DONE), "bad_worker_answer"),
        ((b"data: [1]\n\n", DONE), "bad_worker_answer"),
        ((b'data: {"choices": 1}\n\n', DONE), "bad_worker_answer"),
        ((b'data: {"error": "text"}\n\n', DONE), "bad_worker_answer"),
        ((b"data: \xff\n\n", DONE), "bad_worker_answer"),
        ((b'data: {"error":{"message":"m","type":"server_error","param":null,"code":"rank_lost"}}\n\n',), "rank_lost"),
    ],
    ids=[
        "reset",
        "half an event and reset",
        "half an event",
        "no end",
        "nonsense",
        "html",
        "no empty line",
        "a named event",
        "a list",
        "no chunk",
        "no error object",
        "no text",
        "its own error",
    ],
)
async def test_a_stream_that_fails_later_ends_with_one_error_event(num_good: int, end: Any, code: str) -> None:
    rig = await Rig.make("p0 p1 d0 d1")
    good = [chunk(f"t{i}") for i in range(num_good)]
    rig.script(p0=never, p1=never, d0=stream(*good, *end), d1=good_stream)
    answer = await ended(rig, rig.post(STREAMED, **{"X-Request-Id": "r-1"}))
    assert answer.status == 200
    assert answer.is_complete
    assert [f"data: {event}\n\n".encode() for event in answer.events[:-1]] == good
    last = json.loads(answer.events[-1])["error"]
    assert last["code"] == code
    assert set(last) == {"message", "type", "param", "code"}
    assert code == "rank_lost" or "r-1" in last["message"]
    assert len(rig.cluster.calls) == 2
    assert rig.cluster.of("p0")[0].state == "cancelled"


@pytest.mark.parametrize("cut", range(0, 700, 13))
async def test_only_whole_events_reach_the_client_wherever_the_stream_breaks(cut: int) -> None:
    data = chunk("a") + chunk("b") + chunk("c") + chunk("", "stop")
    rig = await Rig.make()
    rig.script(d0=stream(data[:cut], reset) if cut else stream(reset))
    answer = await ended(rig, rig.post(STREAMED))
    num_whole = data[:cut].count(b"\n\n")
    if num_whole:
        assert answer.body.startswith(data[: data.index(b"\n\n") + 2])
        assert len(answer.events) == num_whole + 1
        assert "error" in json.loads(answer.events[-1])
    else:
        assert (answer.status, answer.error["code"]) == (503, "worker_unavailable")


# ---------------------------------------------------------------------- A6: nonsense


@both_ways
@pytest.mark.parametrize("at", ["p0", "d0"])
@pytest.mark.parametrize(
    "script",
    [
        raw(200, b"<html>hello</html>", "text/html"),
        raw(200, WHOLE_BYTES, "text/plain"),
        raw(200, b'{"id": "x", "choices": {}}'),
        raw(200, b"\xff\xfe"),
        raw(200, b"[" * 100_000),
        raw(404, b"not found", "text/plain"),
        raw(500, b"<html>Internal Server Error</html>", "text/html"),
        raw(200, WHOLE_BYTES[:20]),
        raw(200, b""),
        raw(200, b"[]"),
        raw(204, b""),
        raw(301, b""),
        raw(200, b'{"object": "something else"}'),
        raw(502, b'{"error": "text"}'),
        stream(chunk("a").replace(b"\n\n", b"\n"), chunk("b").replace(b"\n\n", b"\n")),
        stream(b"data: nothing\n\n", DONE),
    ],
)
async def test_nonsense_of_a_worker_is_a_well_formed_502(body: Any, at: str, script: Script) -> None:
    rig = await Rig.make("p0 p1 d0 d1")
    rig.script(p0=never, d0=never)
    rig.script(**{at: script})
    answer = await ended(rig, rig.post(body))
    assert answer.status == 502
    assert answer.error["code"] == "bad_worker_answer"
    assert answer.headers["x-should-retry"] == "true"
    assert len(rig.cluster.calls) == 2
    assert rig.means.pool.instances[at].breaker._failures == 1
    await next_one_is_served(rig)


# ---------------------------------------------------------------------- A7, A8: many


async def test_a_failure_that_repeats_is_bounded_and_heals_within_two_seconds() -> None:
    rig = await Rig.make("p0 p1 d0 d1")
    rig.script(p0=raises(reset), p1=raises(reset), d0=never, d1=never)
    exchanges = [rig.post() for _ in range(100)]
    await rig.clock.advance(1)
    assert all(exchange.task.done() and exchange.status == 503 for exchange in exchanges)
    assert rig.is_idle()
    assert len(rig.cluster.calls) <= 2 * 100 * 2
    by_request: dict[str, list[LegCall]] = {}
    for call in rig.cluster.calls:
        by_request.setdefault(call.headers["x-request-id"], []).append(call)
    for calls in by_request.values():
        ends = [c.ended for c in calls if c.headers["x-longcat-attempt"] == "1"]
        starts = [c.started for c in calls if c.headers["x-longcat-attempt"] == "2"]
        assert all(end is not None and start >= end for end in ends for start in starts)
    rig.script(p0=prefilled, d0=whole, d1=whole)
    await rig.clock.advance(2)
    answers = [await ended(rig, rig.post()) for _ in range(4)]
    assert [answer.status for answer in answers] == [200] * 4


async def test_errors_that_are_not_the_workers_open_no_breaker() -> None:
    rig = await Rig.make()
    kinds = [BAD_PROMPT, error(503, "overloaded", "load"), error(404, "model_not_found", "client"), whole, ECHO, TOO_MANY]
    for i in range(1000):
        kind = kinds[i % len(kinds)]
        rig.script(d0=kind)
        exchange = rig.post()
        await rig.clock.advance(0.25 if kind is ECHO else 0.0)  # an echo is held for the cause
        assert exchange.task.done() and (kind is not whole or exchange.status == 200)
    assert len(rig.cluster.of("d0")) > 1000
    assert all(i.is_ready and not i.breaker.is_open for i in rig.means.pool.instances.values())
    assert not any(i.breaker._failures for i in rig.means.pool.instances.values())


# ---------------------------------------------------------------------- A9: the deadline; the client; the end


@both_ways
@pytest.mark.parametrize(("header", "limit"), [("600", 600), ("99999", 3600), (None, 3600)])
async def test_only_the_deadline_ends_a_silent_request(body: Any, header: str | None, limit: int) -> None:
    rig = await Rig.make()
    rig.script(p0=never, d0=never)
    exchange = rig.post(body, **({"X-Request-Timeout": header} if header else {}))
    await rig.clock.advance(limit - 1)
    assert exchange.status == 0
    answer = await ended(rig, exchange, within_s=1.5)
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"
    assert [call.state for call in rig.cluster.calls] == ["cancelled", "cancelled"]


async def test_the_deadline_in_a_stream_is_an_error_event_and_a_retry_does_not_renew_it() -> None:
    rig = await Rig.make("p0 d0 d1")
    rig.script(d0=later(rig.clock, 6, raises(reset)), d1=stream(chunk("a"), 100.0, DONE, clock=rig.clock))
    exchange = rig.post(STREAMED, **{"X-Request-Timeout": "10"})
    await rig.clock.advance(9.5)
    assert exchange.body == chunk("a")
    assert int(rig.cluster.of("d1")[0].headers["x-longcat-deadline-ms"]) == 4000
    answer = await ended(rig, exchange)
    assert json.loads(answer.events[-1])["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize(
    ("body", "moment"),
    [(BODY, "before"), (BODY, "prefilled"), (STREAMED, "before"), (STREAMED, "prefilled"), (STREAMED, "middle")],
)
async def test_a_client_that_leaves_ends_both_legs(body: Any, moment: str) -> None:
    rig = await Rig.make()
    rig.script(p0=never, d0=never)
    if moment == "prefilled":
        rig.script(p0=prefilled)
    if moment == "middle":
        rig.script(d0=stream(chunk("a"), 50.0, DONE, clock=rig.clock))
    exchange = rig.post(body)
    await rig.clock.advance(1)
    await exchange.leave()
    assert exchange.task.done()
    assert rig.is_idle()
    assert rig.cluster.of("d0")[0].state == "cancelled"
    text = rig.means.metrics.render().decode()
    assert f'http_requests_total{{instance="lb",role="load_balancer",route="{CHAT}",status="499"}} 1.0' in text
    assert 'requests_total{instance="lb",outcome="cancelled",role="load_balancer"} 1.0' in text
    assert 'cancels_total{from="client",instance="lb",role="load_balancer"} 1.0' in text
    await next_one_is_served(rig)


async def test_client_end_deadline_and_failure_in_the_same_turn_have_one_outcome() -> None:
    for events in (("leave", "fail"), ("fail", "leave"), ("leave", "time"), ("fail", "time")):
        rig = await Rig.make()
        failing = asyncio.Event()

        async def fail(_: LegCall, failing: asyncio.Event = failing) -> Any:
            await failing.wait()
            raise reset()

        rig.script(p0=never, d0=fail)
        exchange = rig.post(**{"X-Request-Timeout": "5"})
        await rig.clock.advance(1)
        for event in events:
            if event == "leave":
                exchange._gone.set()
            elif event == "fail":
                failing.set()
            else:
                await rig.clock.advance(4)
        await rig.clock.advance(0.5)
        assert exchange.task.done()
        assert rig.is_idle()
        text = rig.means.metrics.render().decode()
        outcomes = [line for line in text.splitlines() if line.startswith("longcat_pd_requests_total{")]
        assert sum(float(line.split()[-1]) for line in outcomes) == 1


async def test_the_end_of_the_drain_time_cuts_what_is_open() -> None:
    rig = await Rig.make("p0 d0 d1")
    rig.script(p0=never, d0=stream(chunk("a"), 50.0, DONE, clock=rig.clock), d1=never)
    streaming, waiting = rig.post(STREAMED), rig.post()
    await rig.clock.advance(1)
    rig.face.gate.drain()
    late = await ended_alone(rig.post())
    assert (late.status, late.error["code"]) == (503, "draining")
    assert late.headers["retry-after"] == "5"
    assert not streaming.task.done()
    rig.face.gate.cut(WorkerUnavailable("the server ended", code="draining"))
    await settle()
    assert json.loads(streaming.events[-1])["error"]["code"] == "draining"
    assert (waiting.status, waiting.error["code"]) == (503, "draining")
    await rig.face.gate.empty()
    assert rig.is_idle()


async def ended_alone(exchange: Exchange) -> Exchange:
    await settle()
    return await exchange.end()


async def test_too_many_open_requests_are_429_and_call_no_worker() -> None:
    rig = await Rig.make(max_inflight=2)
    rig.script(p0=never, d0=never)
    open_ones = [rig.post(), rig.post(STREAMED)]
    await settle()
    third = await ended_alone(rig.post())
    assert (third.status, third.error["code"], third.error["type"]) == (429, "too_many_requests", "rate_limit_error")
    assert (third.headers["retry-after"], third.headers["x-should-retry"]) == ("1", "true")
    assert len(rig.cluster.of("p0")) == 2
    await open_ones[0].leave()
    rig.script(p0=prefilled, d0=whole)
    assert (await ended_alone(rig.post())).status == 200
    await open_ones[1].leave()
    assert rig.is_idle()


async def test_without_a_usable_pair_it_is_503_at_once() -> None:
    rig = await Rig.make()
    rig.cluster.ready["d0"] = refused()
    await rig.poll()
    answer = await ended_alone(rig.post())
    assert (answer.status, answer.error["code"]) == (503, "worker_unavailable")
    assert answer.headers["retry-after"] == "5"
    assert rig.cluster.calls == []


# ---------------------------------------------------------------------- keep-alive comments


async def test_keep_alive_comments_fix_the_status_and_end_the_right_to_a_retry() -> None:
    rig = await Rig.make("p0 d0 d1", keepalive_comment_s=10)
    rig.script(d0=later(rig.clock, 25, raises(reset)), d1=good_stream)
    exchange = rig.post(STREAMED)
    await rig.clock.advance(9.9)
    assert exchange.status == 0
    await rig.clock.advance(0.2)
    assert (exchange.status, exchange.body) == (200, b": keep-alive\n\n")
    await rig.clock.advance(20)
    assert exchange.body.startswith(b": keep-alive\n\n" * 2 + b'data: {"error":')
    assert exchange.task.done()
    assert len(rig.cluster.calls) == 2


async def test_without_the_setting_there_are_none_and_events_push_them_back() -> None:
    rig = await Rig.make(keepalive_comment_s=10)
    rig.script(d0=stream(chunk("a"), 6.0, chunk("b"), 6.0, chunk("c"), 12.0, DONE, clock=rig.clock))
    exchange = rig.post(STREAMED)
    await ended(rig, exchange, within_s=30)
    assert exchange.body == chunk("a") + chunk("b") + chunk("c") + b": keep-alive\n\n" + DONE


async def test_completions_go_to_their_own_route() -> None:
    rig = await Rig.make()
    answer = await ended(rig, rig.post({"prompt": [5, 6, 7]}, path=COMPLETIONS))
    assert answer.status == 200
    assert {call.path for call in rig.cluster.calls} == {COMPLETIONS}
