"""Failover at the balancer: what a client sees when the worker of its answer dies, and what the next pair is asked."""

import io
import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from longcat_pd import log
from longcat_pd.errors import WorkerUnavailable
from tests.balancer_rig import (
    BODY,
    DONE,
    WHOLE,
    WHOLE_BYTES,
    Exchange,
    LegCall,
    Reply,
    Rig,
    Script,
    chunk,
    error,
    good_stream,
    later,
    never,
    origin,
    prefilled,
    raises,
    raw,
    refused,
    reset,
    said,
    stream,
    unreached,
    whole,
)
from tests.manual_clock import settle

STREAMED = {**BODY, "stream": True}
# What each step of the engine makes: the events that leave together, and the ids that they take.
STEPS = [
    ([chunk("a"), chunk("b")], (11, 12)),
    ([chunk("c")], (13,)),
    ([chunk("d"), chunk("e"), chunk("f")], (14, 15, 16)),
    ([chunk("g"), chunk("", "stop")], (17, 2)),
]
UNDISTURBED = b"".join(event for events, _ in STEPS for event in events) + DONE


def group(events: list[bytes], ids: tuple[int, ...]) -> bytes:
    return b"".join(events[:-1]) + said(*ids) + events[-1]


GROUPS = [group(*step) for step in STEPS]
TOLD = origin() + b"".join(GROUPS) + DONE


def event_of(code: str) -> bytes:
    value = {"error": {"message": f"{code} of a worker", "type": "server_error", "param": None, "code": code}}
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def going_on(call: LegCall) -> Reply:
    """A worker that finishes the answer behind the ids that it is told; whatever does not fit, it does not answer."""
    assert call.headers["x-longcat-failover"] == "resume"
    resume = json.loads(call.body)["resume"]
    rest, ids = [], list(resume["token_ids"])
    for events, step_ids in STEPS:
        if ids:
            assert tuple(ids[: len(step_ids)]) == step_ids
            del ids[: len(step_ids)]
        else:
            rest += events
    return await stream(*rest, DONE)(call)


def retellings(rig: Rig) -> list[dict[str, Any]]:
    """What resumed calls were told, prefill and decode alike."""
    bodies = [json.loads(c.body) for c in rig.cluster.calls if c.headers.get("x-longcat-failover") == "resume"]
    return [body["resume"] for body in bodies]


def attempts(rig: Rig) -> list[tuple[str, str]]:
    """Who was called in which attempt."""
    return sorted((call.headers["x-longcat-attempt"], call.worker) for call in rig.cluster.calls)


def outcomes(rig: Rig) -> dict[str, float]:
    text = rig.means.metrics.render().decode().splitlines()
    lines = [line for line in text if line.startswith("longcat_pd_failovers_total{") and not line.endswith(" 0.0")]
    return {line.split('outcome="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


def check_order(rig: Rig) -> None:
    """No two attempts overlap."""
    for later_call in rig.cluster.calls:
        for call in rig.cluster.calls:
            if call.headers["x-longcat-attempt"] < later_call.headers["x-longcat-attempt"]:
                assert call.ended is not None and call.ended <= later_call.started


async def ended(rig: Rig, exchange: Exchange, *, within_s: float = 0.5) -> Exchange:
    """Let so much time pass; the request must have its end then, nothing may be open, and no two attempts overlapped."""
    await rig.clock.advance(within_s)
    assert exchange.task.done()
    await exchange.end()
    assert rig.is_idle()
    check_order(rig)
    return exchange


def in_bits(data: bytes) -> list[bytes]:
    return [data[i : i + 7] for i in range(0, len(data), 7)]


def last_error(exchange: Exchange) -> Any:
    """Of a stream: the last event must be its error."""
    assert exchange.is_complete and exchange.status == 200
    return json.loads(exchange.events[-1])["error"]


@pytest.fixture
def lines() -> Callable[[], list[str]]:
    """The log so far."""
    out = io.StringIO()
    log.set_up(stream=out)
    return lambda: out.getvalue().splitlines()


# ---------------------------------------------------------------------- what is asked of workers


@pytest.mark.parametrize(
    ("body", "config", "asked"),
    [
        (BODY, {}, "ids"),
        (STREAMED, {}, "ids"),
        ({**BODY, "n": 2}, {}, None),
        ({**STREAMED, "n": 2}, {}, None),
        (BODY, {"failover": False}, None),
        (STREAMED, {"failover": False}, None),
    ],
)
async def test_ids_are_asked_of_both_legs_where_the_answer_may_be_finished_elsewhere(
    body: Any, config: Any, asked: str | None
) -> None:
    rig = await Rig.make(**config)
    rig.script(d0=good_stream if body.get("stream") else whole)
    answer = await ended(rig, rig.post(body, **{"X-Longcat-Failover": "resume"}))
    assert answer.status == 200
    assert [call.headers.get("x-longcat-failover") for call in rig.cluster.calls] == [asked, asked]


async def test_a_probe_is_never_finished_elsewhere() -> None:
    rig = await Rig.make()
    assert (await rig.get("/health_generate")).status == 200
    assert [call.headers.get("x-longcat-failover") for call in rig.cluster.calls] == [None, None]


async def test_comments_never_reach_the_client_and_an_undisturbed_answer_has_one_attempt() -> None:
    rig = await Rig.make("p0 d0 d1")
    rig.script(d0=stream(b": keep-alive\n\n", *in_bits(TOLD)))
    exchange = rig.post(STREAMED)
    await settle(1000)
    answer = await ended(rig, exchange)
    assert answer.body == UNDISTURBED
    assert len(rig.cluster.calls) == 2
    assert outcomes(rig) == {}


USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 8,
    "total_tokens": 17,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 0},
}


def counted(rig: Rig) -> dict[str, float]:
    """The balancer's tokens: prompt, cached, output; and how often a request's histograms were moved."""
    text = rig.means.metrics.render().decode()
    found = re.findall(r"^longcat_pd_(\w+)_tokens_total{.*} (\S+)$", text, re.MULTILINE)
    found += re.findall(
        r"^longcat_pd_(\w+)_seconds_count{instance=\"lb\",role=\"load_balancer\"} (\S+)$", text, re.MULTILINE
    )
    return {name: float(value) for name, value in found if float(value)}


def usage_line(value: object = USAGE) -> bytes:
    return b": usage " + json.dumps(value).encode() + b"\n"


@pytest.mark.parametrize("failover", [True, False])
async def test_tokens_of_a_stream_are_counted_as_its_worker_tells_them_and_the_client_hears_nothing(failover: bool) -> None:
    rig = await Rig.make(failover=failover)
    told = TOLD if failover else b"".join(event for events, _ in STEPS for event in events) + DONE
    rig.script(d0=stream(*in_bits(told.removesuffix(DONE) + usage_line() + b": keep-alive\n\n" + DONE)))
    exchange = rig.post(STREAMED)
    await settle(1000)
    assert (await ended(rig, exchange)).body == UNDISTURBED
    spans = dict.fromkeys(("queue", "prefill", "first_token", "per_token", "request"), 1)
    assert counted(rig) == {"prompt": 9, "cached": 4, "output": 8, **spans}


@pytest.mark.parametrize("in_steps", [True, False])
async def test_tokens_of_a_whole_answer_are_counted_as_its_worker_tells_them(in_steps: bool) -> None:
    rig = await Rig.make()
    answer = json.dumps({**WHOLE, "usage": USAGE}).encode()
    steps = origin() + b"\n" + said(1) + b"\n" + b"data: " + answer + b"\n\n" + usage_line() + DONE
    rig.script(d0=stream(steps) if in_steps else raw(200, answer))
    assert (await ended(rig, rig.post())).body == answer
    assert counted(rig) == {"prompt": 9, "cached": 4, "output": 8, "queue": 1, "prefill": 1, "request": 1}


@pytest.mark.parametrize("bad", [7, {}, {**USAGE, "prompt_tokens": -1}, {**USAGE, "completion_tokens": "8"}])
async def test_an_answer_is_not_refused_for_a_usage_that_is_none(bad: object) -> None:
    rig = await Rig.make()
    rig.script(d0=stream(TOLD.removesuffix(DONE) + usage_line(bad) + DONE))
    assert (await ended(rig, rig.post(STREAMED))).body == UNDISTURBED
    assert counted(rig) == {"queue": 1, "prefill": 1, "first_token": 1, "request": 1}


async def test_a_worker_that_says_no_ids_is_served_as_before_and_not_finished_elsewhere() -> None:
    rig = await Rig.make("p0 d0 d1")
    rig.script(d0=stream(chunk("a"), 1.0, chunk("", "stop"), 1.0, DONE, clock=rig.clock))
    exchange = rig.post(STREAMED)
    await rig.clock.advance(0.5)
    assert exchange.body == chunk("a")
    await rig.clock.advance(1)
    assert exchange.body == chunk("a") + chunk("", "stop")  # nothing of it waits
    await ended(rig, exchange, within_s=1)
    rig.script(d0=stream(chunk("a"), reset), d1=stream(chunk("a"), reset))
    answer = await ended(rig, rig.post(STREAMED))
    assert last_error(answer)["code"] == "worker_unavailable"
    assert len(rig.cluster.calls) == 4


# ---------------------------------------------------------------------- an answer that breaks


@pytest.mark.parametrize(
    "end",
    [
        (reset,),
        (GROUPS[2][:-1], reset),
        (),
        (GROUPS[2][:20],),
        (event_of("rank_lost"),),
        (event_of("engine_fault"),),
        (event_of("transfer_failed"),),
        (event_of("worker_unavailable"),),
        (event_of("draining"),),
    ],
    ids=[
        "reset",
        "part of a group and reset",
        "no end",
        "half an event",
        "rank_lost",
        "engine_fault",
        "transfer_failed",
        "worker_unavailable",
        "draining",
    ],
)
async def test_the_rest_of_a_stream_comes_from_another_pair(end: Any, lines: Callable[[], list[str]]) -> None:
    rig = await Rig.make("p0 d0 d1")
    rig.script(p0=[never, prefilled], d0=stream(origin() + GROUPS[0], GROUPS[1], *end), d1=going_on)
    answer = await ended(rig, rig.post(STREAMED, **{"X-Request-Id": "r-1", "traceparent": "00-1-2-01"}))
    assert (answer.status, answer.body) == (200, UNDISTURBED)
    assert attempts(rig) == [("1", "d0"), ("1", "p0"), ("2", "d1"), ("2", "p0")]
    assert rig.cluster.of("p0")[0].state == "cancelled"
    first, second = rig.cluster.of("d0")[0], rig.cluster.of("d1")[0]
    told = {"token_ids": [11, 12, 13], "seed": -5, "created": 1767225600, "prompt_digest": "0f" * 16}
    for call in (second, rig.cluster.of("p0")[1]):
        assert json.loads(call.body) == {**STREAMED, "resume": told}
        assert call.body.startswith(first.body[:-1])
        assert call.headers["x-longcat-failover"] == "resume"
        assert (call.headers["x-request-id"], call.headers["traceparent"]) == ("r-1", "00-1-2-01")
        assert call.headers["x-longcat-transfer-id"] == second.headers["x-longcat-transfer-id"]
    assert first.headers["x-longcat-transfer-id"] != second.headers["x-longcat-transfer-id"]
    assert outcomes(rig) == {"completed": 1}
    text = rig.means.metrics.render().decode()
    assert 'retries_total{instance="lb",role="load_balancer"} 0.0' in text
    assert 'outcome="stop",role="load_balancer"} 1.0' in text
    (told_line,) = [line for line in lines() if " failover " in line]
    assert "warning" in told_line and "ids=3" in told_line and "pair=p0,d1" in told_line
    assert f"old_transfer={first.headers['x-longcat-transfer-id']}" in told_line and "request=r-1" in told_line
    (last,) = [line for line in lines() if " request_finished " in line]
    assert "failovers=1" in last and "attempt=2" in last and "finish=stop" in last and "pair=p0,d1" in last


async def test_the_log_tells_of_the_prompt_and_the_first_token_of_the_client(lines: Callable[[], list[str]]) -> None:
    rig = await Rig.make("p0 d0 d1")

    async def again(_: LegCall) -> Reply:
        return Reply(200, b'{"object":"prefill","prompt_tokens":6}', {"content-type": "application/json"})

    rig.script(p0=[prefilled, again], d0=stream(origin() + GROUPS[0], 2.0, GROUPS[1], reset, clock=rig.clock), d1=going_on)
    exchange = rig.post(STREAMED)
    await ended(rig, exchange, within_s=2)
    (last,) = [line for line in lines() if " request_finished " in line]
    assert "prompt=3" in last and "ttft_ms=0" in last and "ms=2000" in last


@pytest.mark.parametrize("cut", [*range(0, len(TOLD), 9), len(TOLD) - 1])
async def test_wherever_the_stream_is_cut_the_client_has_the_undisturbed_answer(cut: int) -> None:
    rig = await Rig.make("p0 d0 d1")
    whole_stream = stream(TOLD)

    async def second(call: LegCall) -> Reply:
        return await (going_on if "resume" in json.loads(call.body) else whole_stream)(call)

    rig.script(d0=stream(TOLD[:cut], reset), d1=second)
    answer = await ended(rig, rig.post(STREAMED))
    assert answer.body == UNDISTURBED
    assert [event for event in answer.pieces if event] != []
    assert len(rig.cluster.calls) == 4


async def test_a_group_is_passed_on_whole_or_not_at_all() -> None:
    rig = await Rig.make("p0 d0 d1")
    pieces = [origin() + chunk("a"), 1.0, said(11, 12) + chunk("b"), 1.0, said(13), 1.0, chunk("c"), 1.0, reset]
    rig.script(d0=stream(*pieces, clock=rig.clock), d1=going_on)
    exchange = rig.post(STREAMED)
    for now in (b"", chunk("a") + chunk("b"), chunk("a") + chunk("b"), chunk("a") + chunk("b") + chunk("c")):
        await rig.clock.advance(0.9)
        assert exchange.body == now
        await rig.clock.advance(0.1)
    assert (await ended(rig, exchange)).body == UNDISTURBED


@pytest.mark.parametrize("has_all", [False, True])
async def test_the_end_of_an_answer_is_passed_on_whole_or_not_at_all(has_all: bool) -> None:
    rig = await Rig.make("p0 d0 d1")
    usage = b'data: {"choices":[],"usage":{}}\n\n'
    end = (DONE,) if has_all else (reset,)
    rig.script(d0=stream(origin() + b"".join(GROUPS), 1.0, usage, 1.0, *end, clock=rig.clock), d1=going_on)
    exchange = rig.post(STREAMED)
    await rig.clock.advance(1.9)
    assert exchange.body == UNDISTURBED[: UNDISTURBED.index(chunk("g"))]
    await ended(rig, exchange)
    if has_all:
        assert exchange.body == UNDISTURBED[: -len(DONE)] + usage + DONE
        assert len(rig.cluster.calls) == 2
    else:
        assert exchange.body == UNDISTURBED
        assert retellings(rig)[0]["token_ids"] == [11, 12, 13, 14, 15, 16]


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (stream(origin() + GROUPS[0], event_of("deadline_exceeded")), "deadline_exceeded"),
        (stream(origin() + GROUPS[0], event_of("context_length_exceeded")), "context_length_exceeded"),
        (stream(origin() + GROUPS[0], b"data: {\n\n"), "bad_worker_answer"),
        (stream(origin() + GROUPS[0], b": ids AAA\n" + chunk("x")), "bad_worker_answer"),
        (stream(origin() + GROUPS[0], b": ids AAAA\n" + chunk("x")), "bad_worker_answer"),
        (stream(origin() + GROUPS[0], said(-1) + chunk("x")), "bad_worker_answer"),
        (stream(origin() + GROUPS[0], origin() + chunk("x")), "bad_worker_answer"),
    ],
)
async def test_other_failures_of_a_stream_are_told_at_once(script: Script, code: str) -> None:
    rig = await Rig.make("p0 d0 d1")
    rig.script(p0=never, d0=script, d1=going_on)
    answer = await ended(rig, rig.post(STREAMED))
    assert answer.events[:2] == [event.decode()[6:-2] for event in STEPS[0][0]]
    assert len(answer.events) == 3 and last_error(answer)["code"] == code
    assert len(rig.cluster.calls) == 2
    assert outcomes(rig) == {}


@pytest.mark.parametrize(
    "head",
    [
        b": answer {\n",
        b": answer []\n",
        origin(seed=None),
        origin(seed=True),
        origin(created="1"),
        origin(prompt_digest=7),
        origin(prompt_digest=""),
        said(1),
        origin() + origin(),
        origin() + b": ids !!!!\n",
    ],
)
@pytest.mark.parametrize("body", [BODY, STREAMED], ids=["whole", "stream"])
async def test_malformed_comments_are_a_bad_answer_of_the_worker(head: bytes, body: Any) -> None:
    rig = await Rig.make("p0 d0 d1")
    rig.script(d0=stream(head + chunk("a"), DONE))
    answer = await ended(rig, rig.post(body))
    assert (answer.status, answer.error["code"]) == (502, "bad_worker_answer")
    assert rig.means.pool.instances["d0"].breaker._failures == 1


async def test_events_whose_ids_never_come_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longcat_pd.load_balancer.events.MAX_EVENT_BYTES", 1000)
    rig = await Rig.make("p0 d0")
    rig.script(p0=never, d0=stream(origin(), *[chunk("x") for _ in range(100)]))
    answer = await ended(rig, rig.post(STREAMED))
    assert (answer.status, answer.error["code"]) == (502, "bad_worker_answer")
    assert "ids" in answer.error["message"]


async def test_switched_off_a_break_is_the_end_and_comments_are_only_dropped() -> None:
    rig = await Rig.make("p0 d0 d1", failover=False)
    rig.script(d0=stream(TOLD[: -len(DONE)], reset))
    answer = await ended(rig, rig.post(STREAMED))
    assert last_error(answer)["code"] == "worker_unavailable"
    assert answer.body.startswith(UNDISTURBED[: -len(DONE)])
    assert len(rig.cluster.calls) == 2
    assert outcomes(rig) == {}


# ---------------------------------------------------------------------- the wait for a pair


async def broken(rig: Rig, *, body: Any = STREAMED, **headers: str) -> Exchange:
    """A request whose answer has broken on d0, with half of it passed on, at this moment."""
    rig.script(p0=[never, prefilled], d0=[stream(origin() + GROUPS[0], GROUPS[1], 3.0, reset, clock=rig.clock), going_on])
    exchange = rig.post(body, **headers)
    await rig.clock.advance(3)
    assert not exchange.task.done()
    return exchange


async def test_without_another_pair_the_break_is_told_after_five_seconds(lines: Callable[[], list[str]]) -> None:
    rig = await Rig.make()
    exchange = await broken(rig)
    assert rig.is_idle() is False and all(call.state != "open" for call in rig.cluster.calls)  # no leg, but the request
    assert not any(i.open_legs for i in rig.means.pool.instances.values())
    for _ in range(4):  # the dead instance still says that it is ready
        await rig.poll()
        await rig.clock.advance(1)
    await rig.clock.advance(0.9)
    assert not exchange.task.done()
    await ended(rig, exchange, within_s=0.2)
    assert last_error(exchange)["code"] == "worker_unavailable"
    assert len(rig.cluster.calls) == 2
    assert outcomes(rig) == {"no_pair": 1}
    (last,) = [line for line in lines() if " request_failed " in line]
    assert "failovers" not in last and "attempt=1" in last


async def test_a_pair_is_used_as_soon_as_there_is_one() -> None:
    rig = await Rig.make("p0 d0 d1")
    rig.cluster.ready["d1"] = {**rig.cluster.ready["d1"], "ready": False}
    await rig.poll()
    rig.script(d1=going_on)
    exchange = await broken(rig)
    await rig.clock.advance(2.3)
    rig.cluster.ready["d1"]["ready"] = True
    assert not exchange.task.done()
    await rig.poll()
    await ended(rig, exchange, within_s=0)
    assert exchange.body == UNDISTURBED
    assert rig.cluster.of("d1")[0].started == rig.cluster.of("p0")[0].ended + 2.3  # type: ignore[operator]


async def test_a_new_incarnation_of_the_dead_instance_is_another_instance() -> None:
    rig = await Rig.make()
    exchange = await broken(rig)
    rig.cluster.ready["d0"] = refused()
    await rig.poll()
    await rig.clock.advance(2)
    assert not exchange.task.done()
    rig.cluster.ready["d0"] = {
        "ready": True,
        "role": "decode",
        "instance": "d0",
        "incarnation": "d0-2",
        "config_digest": "digest-d0",
        "peers": {"p0": "up"},
    }
    await rig.poll()
    await ended(rig, exchange)
    assert exchange.body == UNDISTURBED
    assert attempts(rig) == [("1", "d0"), ("1", "p0"), ("2", "d0"), ("2", "p0")]


async def test_an_instance_that_is_back_before_its_break_is_noticed_goes_on_at_once() -> None:
    rig = await Rig.make()
    rig.script(d0=[stream(origin() + GROUPS[0], 3.0, reset, clock=rig.clock), going_on])
    exchange = rig.post(STREAMED)
    await rig.clock.advance(2)
    rig.cluster.ready["d0"]["incarnation"] = "d0-2"
    await rig.poll()
    await ended(rig, exchange, within_s=1)
    assert exchange.body == UNDISTURBED
    assert rig.cluster.of("d0")[1].started == rig.cluster.of("d0")[0].ended


async def test_an_instance_without_incarnations_is_always_the_same() -> None:
    rig = await Rig.make()
    del rig.cluster.ready["d0"]["incarnation"]
    await rig.poll()
    exchange = await broken(rig)
    await rig.poll()
    await ended(rig, exchange, within_s=5.1)
    assert outcomes(rig) == {"no_pair": 1}


async def test_a_drained_pair_does_not_go_on_with_an_answer() -> None:
    rig = await Rig.make("p0 d0 d1")
    rig.means.pool.drain("d1", out=True)
    rig.script(d1=going_on)
    exchange = await broken(rig)
    await rig.clock.advance(1)
    assert len(rig.cluster.calls) == 2
    rig.means.pool.drain("d1", out=False)
    await ended(rig, exchange)
    assert exchange.body == UNDISTURBED


@pytest.mark.parametrize(("limit_s", "waits_s"), [(3.9, 0.0), (6.0, 2.0), (60.0, 5.0)])
async def test_nothing_is_begun_in_the_last_second_of_the_deadline(limit_s: float, waits_s: float) -> None:
    rig = await Rig.make()
    rig.script(p0=never, d0=stream(origin() + GROUPS[0], GROUPS[1], 3.0, reset, clock=rig.clock))
    exchange = rig.post(STREAMED, **{"X-Request-Timeout": str(limit_s)})
    await rig.clock.advance(3)
    if waits_s:
        await rig.clock.advance(waits_s - 0.05)
        assert not exchange.task.done()
    await ended(rig, exchange, within_s=0.1)
    assert last_error(exchange)["code"] == "worker_unavailable"


async def test_in_the_last_second_another_pair_is_not_asked() -> None:
    rig = await Rig.make("p0 d0 d1")
    rig.script(p0=never, d0=stream(origin() + GROUPS[0], 3.0, reset, clock=rig.clock), d1=going_on)
    exchange = rig.post(STREAMED, **{"X-Request-Timeout": "3.9"})
    await ended(rig, exchange, within_s=3)
    assert last_error(exchange)["code"] == "worker_unavailable"
    assert len(rig.cluster.calls) == 2


# ---------------------------------------------------------------------- what cuts it short


@pytest.mark.parametrize("moment", ["wait", "resumed"])
async def test_a_client_that_leaves_ends_a_failover_at_once(moment: str) -> None:
    rig = await Rig.make("p0 d0" if moment == "wait" else "p0 d0 d1")
    if moment == "resumed":
        rig.script(d1=never)
    exchange = await broken(rig)
    await rig.clock.advance(1)
    await exchange.leave()
    assert exchange.task.done() and rig.is_idle()
    assert len(rig.cluster.calls) == (2 if moment == "wait" else 4)
    await rig.clock.advance(10)
    assert len(rig.cluster.calls) == (2 if moment == "wait" else 4)
    assert outcomes(rig) == {}
    assert 'cancels_total{from="client",instance="lb",role="load_balancer"} 1.0' in rig.means.metrics.render().decode()


async def test_the_deadline_ends_a_resumed_answer() -> None:
    rig = await Rig.make("p0 d0 d1")
    rig.script(d1=stream(chunk("d"), 100.0, DONE, clock=rig.clock))
    exchange = await broken(rig, **{"X-Request-Timeout": "10"})
    assert rig.cluster.of("d1")[0].headers["x-longcat-deadline-ms"] == "7000"  # is not renewed
    await rig.clock.advance(6.9)
    assert not exchange.task.done()
    await ended(rig, exchange)
    assert last_error(exchange)["code"] == "deadline_exceeded"
    assert exchange.body.startswith(b"".join(map(chunk, "abcd")))
    assert outcomes(rig) == {"failed": 1}


@pytest.mark.parametrize(("names", "outcome"), [("p0 d0", "no_pair"), ("p0 d0 d1", "failed")])
async def test_the_end_of_the_drain_time_cuts_a_failover(names: str, outcome: str) -> None:
    rig = await Rig.make(names)
    if "d1" in names:
        rig.script(d1=never)
    exchange = await broken(rig)
    rig.face.gate.drain()
    await rig.clock.advance(1)
    assert not exchange.task.done()  # what is open goes on while the balancer drains
    rig.face.gate.cut(WorkerUnavailable("the server ended", code="draining"))
    await settle()
    assert exchange.task.done() and rig.is_idle()
    assert last_error(exchange)["code"] == "draining"
    assert outcomes(rig) == {outcome: 1}


async def test_an_answer_is_finished_elsewhere_while_the_balancer_drains() -> None:
    rig = await Rig.make()
    exchange = await broken(rig)
    rig.face.gate.drain()
    rig.cluster.ready["d0"]["incarnation"] = "d0-2"
    await rig.poll()
    await ended(rig, exchange)
    assert exchange.body == UNDISTURBED


async def test_comments_that_keep_the_connection_go_on() -> None:
    rig = await Rig.make(keepalive_comment_s=2)
    exchange = await broken(rig)
    before = exchange.body
    await rig.clock.advance(4.2)
    assert exchange.body == before + b": keep-alive\n\n" * 2
    rig.cluster.ready["d0"]["incarnation"] = "d0-2"
    await rig.poll()
    await ended(rig, exchange)
    assert exchange.body.replace(b": keep-alive\n\n", b"") == UNDISTURBED


async def test_a_client_that_reads_slowly_gets_every_piece_once_and_in_order() -> None:
    rig = await Rig.make("p0 d0 d1")
    rig.script(d0=stream(origin() + GROUPS[0], 1.0, GROUPS[1], GROUPS[2][:-4], reset, clock=rig.clock), d1=going_on)
    exchange = rig.post(STREAMED)
    await rig.clock.advance(0.5)
    exchange.reads.clear()
    await rig.clock.advance(60)
    assert len(rig.cluster.of("d1")) == 0  # what has come is passed on first
    exchange.reads.set()
    await ended(rig, exchange)
    assert exchange.body == UNDISTURBED


async def test_a_client_that_stops_reading_a_resumed_answer_and_leaves_frees_everything() -> None:
    rig = await Rig.make("p0 d0 d1")
    rig.script(d1=[going_on])
    rig.script(d0=stream(origin() + GROUPS[0], 3.0, reset, clock=rig.clock))
    exchange = rig.post(STREAMED)
    await rig.clock.advance(2.9)
    exchange.reads.clear()
    await rig.clock.advance(10)
    assert [call.state for call in rig.cluster.of("d1")] == ["open"]
    await exchange.leave()
    assert exchange.task.done() and rig.is_idle()


# ---------------------------------------------------------------------- at most once


async def test_a_resumed_answer_that_does_not_begin_tells_the_break_that_it_was_to_mend() -> None:
    for second in (raises(reset), error(400, "invalid_value", "client"), error(503, "overloaded", "load"), stream(DONE)):
        rig = await Rig.make("p0 p1 d0 d1 d2", retry=5)
        rig.script(d0=stream(origin() + GROUPS[0], event_of("rank_lost")), d1=second, d2=second)
        answer = await ended(rig, rig.post(STREAMED))
        assert last_error(answer)["code"] == "rank_lost"
        assert last_error(answer)["message"] == "rank_lost of a worker"
        assert len(answer.events) == 3
        assert len(rig.cluster.calls) == 4  # no other attempt
        assert outcomes(rig) == {"failed": 1}


async def test_a_prefill_instance_that_refuses_a_resumed_answer_tells_the_break_too() -> None:
    rig = await Rig.make("p0 d0 d1")
    unlike = error(503, "worker_unavailable", "self")
    rig.script(p0=[prefilled, unlike], d0=stream(origin() + GROUPS[0], event_of("rank_lost")), d1=never)
    answer = await ended(rig, rig.post(STREAMED))
    assert last_error(answer)["code"] == "rank_lost"
    assert outcomes(rig) == {"failed": 1}


@pytest.mark.parametrize("how", [refused, unreached])
@pytest.mark.parametrize("at", ["p0", "d1"])
async def test_a_pair_that_refuses_the_connection_is_not_there(at: str, how: Callable[[], Exception]) -> None:
    rig = await Rig.make("p0 p1 d0 d1 d2")
    rig.script(p0=prefilled, d0=stream(origin() + GROUPS[0], 1.0, reset, clock=rig.clock), d1=going_on, d2=going_on)
    exchange = rig.post(STREAMED)
    await rig.clock.advance(0.5)
    rig.script(**{"d1": never, at: raises(how)})
    with rig.means.pool.leg(rig.means.pool.instances["p1"], 10_000):
        await rig.clock.advance(0.5)
    await ended(rig, exchange, within_s=0)
    assert exchange.body == UNDISTURBED
    assert [call.headers["x-longcat-attempt"] for call in rig.cluster.calls if call.worker[0] == "d"] == ["1", "2", "3"]
    assert outcomes(rig) == {"completed": 1}


async def test_when_all_pairs_refuse_the_wait_goes_on_and_ends() -> None:
    rig = await Rig.make("p0 d0 d1 d2")
    rig.script(d0=stream(origin() + GROUPS[0], event_of("rank_lost")), d1=raises(refused), d2=raises(refused))
    exchange = rig.post(STREAMED)
    await rig.clock.advance(4.9)
    assert not exchange.task.done() and not any(i.open_legs for i in rig.means.pool.instances.values())
    await ended(rig, exchange, within_s=0.2)
    assert last_error(exchange)["code"] == "rank_lost"
    assert len(rig.cluster.calls) == 6
    assert outcomes(rig) == {"no_pair": 1}


async def test_a_resumed_answer_that_breaks_tells_its_own_error_and_is_not_finished_again() -> None:
    rig = await Rig.make("p0 d0 d1 d2", retry=5)
    rig.script(d0=stream(origin() + GROUPS[0], event_of("draining")), d1=stream(chunk("c"), event_of("transfer_failed")))
    rig.script(d2=going_on)
    answer = await ended(rig, rig.post(STREAMED))
    assert last_error(answer)["code"] == "transfer_failed"
    assert answer.body.startswith(b"".join(map(chunk, "abc")))
    assert len(rig.cluster.calls) == 4
    assert outcomes(rig) == {"failed": 1}
    assert rig.cluster.of("d2") == []


async def test_the_breaker_counts_a_break_and_not_what_the_other_side_did() -> None:
    rig = await Rig.make("p0 d0 d1")
    rig.script(d0=stream(origin() + GROUPS[0], reset), d1=going_on)
    await ended(rig, rig.post(STREAMED))
    failures = {name: i.breaker._failures for name, i in rig.means.pool.instances.items()}
    assert failures == {"p0": 0, "d0": 1, "d1": 0}
    text = rig.means.metrics.render().decode()
    assert 'leg_failures_total{cause="self",instance="lb",leg="decode",role="load_balancer"} 1.0' in text


# ---------------------------------------------------------------------- before the first piece; workers that die


@pytest.mark.parametrize("body", [BODY, STREAMED, {**BODY, "n": 2}], ids=["whole", "stream", "choices"])
@pytest.mark.parametrize("at", ["p0", "d0"])
async def test_a_lost_rank_before_the_first_piece_is_tried_elsewhere_once(body: Any, at: str) -> None:
    lost = error(500, "rank_lost", "self")
    good = stream(TOLD) if body is STREAMED else whole
    rig = await Rig.make("p0 p1 d0 d1")
    rig.script(p0=never, d0=never, d1=good)
    rig.script(**{at: lost})
    answer = await ended(rig, rig.post(body))
    assert answer.status == 200
    assert {call.headers.get("x-longcat-failover") for call in rig.cluster.calls} <= {"ids", None}
    rig = await Rig.make("p0 p1 d0 d1", retry=5)
    rig.script(p0=never, p1=never, d0=never, d1=never)
    rig.script(**{at: lost, at[0] + "1": lost})
    answer = await ended(rig, rig.post(body))
    assert (answer.status, answer.error["code"], len(rig.cluster.calls)) == (500, "rank_lost", 4)
    rig = await Rig.make("p0 p1 d0 d1", failover=False)
    rig.script(p0=never, d0=never, d1=good)
    rig.script(**{at: lost})
    answer = await ended(rig, rig.post(body))
    assert (answer.status, answer.error["code"], len(rig.cluster.calls)) == (500, "rank_lost", 2)


async def test_who_has_lost_a_rank_is_not_asked_again_even_with_another_partner() -> None:
    rig = await Rig.make("p0 p1 d0")
    rig.script(p0=never, p1=never, d0=error(500, "rank_lost", "self"))
    answer = await ended(rig, rig.post())
    assert (answer.status, len(rig.cluster.calls)) == (500, 2)


async def test_a_request_under_which_two_workers_died_is_not_tried_again() -> None:
    lost, fault = error(500, "rank_lost", "self"), event_of("engine_fault")
    rows: list[tuple[list[Script], int]] = [
        ([raises(reset), raises(reset)], 2),
        ([lost, raises(reset)], 2),
        ([raises(reset), stream(origin() + GROUPS[0], reset)], 2),  # nor finished elsewhere
        ([raises(reset), stream(origin() + GROUPS[0], fault)], 2),
        ([error(503, "overloaded", "load"), raises(reset), raises(reset)], 3),
        ([raises(refused), error(503, "draining", "load"), error(503, "overloaded", "load"), good_stream], 4),
    ]
    for scripts, num_attempts in rows:
        rig = await Rig.make("p0 d0 d1 d2 d3 d4", retry=9)
        rig.script(**{f"d{i}": scripts[i] if i < len(scripts) else good_stream for i in range(5)})
        await ended(rig, rig.post(STREAMED), within_s=6)
        assert len(rig.cluster.of("p0")) == num_attempts, (scripts, num_attempts)


async def test_a_retried_request_may_still_be_finished_elsewhere() -> None:
    rig = await Rig.make("p0 d0 d1 d2")
    rig.script(d0=error(503, "overloaded", "load"), d1=stream(origin() + GROUPS[0], reset), d2=going_on)
    answer = await ended(rig, rig.post(STREAMED))
    assert answer.body == UNDISTURBED
    assert [number for number, name in attempts(rig) if name != "p0"] == ["1", "2", "3"]
    assert rig.cluster.of("d2")[0].headers["x-longcat-attempt"] == "3"


async def test_a_connection_that_is_never_made_is_no_death() -> None:
    rig = await Rig.make("p0 d0 d1 d2", retry=9)
    slow = raises(lambda: httpx.ConnectTimeout("slow"))
    rig.script(d0=slow, d1=slow, d2=stream(TOLD))
    assert (await ended(rig, rig.post(STREAMED))).body == UNDISTURBED


# ---------------------------------------------------------------------- answers that do not stream

ANSWER = b"data: " + WHOLE_BYTES + b"\n\n"
EARLY = origin() + said() + b"\n"


async def test_a_whole_answer_that_is_told_in_steps_is_passed_on_as_json() -> None:
    rig = await Rig.make()
    told = EARLY + said(11, 12) + b"\n: keep-alive\n\n" + said(13) + b"\n" + ANSWER + DONE
    rig.script(d0=stream(*in_bits(told)))
    exchange = rig.post()
    await settle(1000)
    answer = await ended(rig, exchange)
    assert (answer.status, answer.body) == (200, WHOLE_BYTES)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["content-length"] == str(len(WHOLE_BYTES))
    assert rig.cluster.of("d0")[0].state == "done"
    assert not any(i.breaker._failures for i in rig.means.pool.instances.values())
    text = rig.means.metrics.render().decode()
    assert 'requests_total{instance="lb",outcome="stop",role="load_balancer"} 1.0' in text


async def test_a_whole_answer_larger_than_an_event_of_a_stream_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longcat_pd.load_balancer.attempt.MAX_EVENT_BYTES", 10)
    monkeypatch.setattr("longcat_pd.load_balancer.events.MAX_EVENT_BYTES", 10)
    rig = await Rig.make()
    rig.script(d0=stream(EARLY, ANSWER[:50], ANSWER[50:], DONE))
    assert (await ended(rig, rig.post())).body == WHOLE_BYTES


@pytest.mark.parametrize(
    "end",
    [(reset,), (ANSWER, reset), (ANSWER[:40], reset), (), (ANSWER,), (event_of("rank_lost"),), (event_of("draining"),)],
)
@pytest.mark.parametrize("ids", [(), (11, 12, 13)])
async def test_the_rest_of_a_whole_answer_comes_from_another_pair(end: Any, ids: tuple[int, ...]) -> None:
    rig = await Rig.make("p0 d0 d1")
    some = [said(*ids[:2]) + b"\n", said(*ids[2:]) + b"\n"] if ids else []
    rig.script(p0=[never, prefilled], d0=stream(EARLY, *some, *end), d1=whole)
    answer = await ended(rig, rig.post())
    assert (answer.status, answer.body) == (200, WHOLE_BYTES)
    assert [told["token_ids"] for told in retellings(rig)] == [list(ids)] * 2
    assert attempts(rig) == [("1", "d0"), ("1", "p0"), ("2", "d1"), ("2", "p0")]
    assert outcomes(rig) == {"completed": 1}


async def test_a_whole_answer_that_cannot_be_finished_is_a_status() -> None:
    rig = await Rig.make()
    rig.script(d0=stream(EARLY, said(11) + b"\n", event_of("rank_lost")))
    exchange = rig.post()
    await rig.clock.advance(4.9)
    assert exchange.status == 0
    answer = await ended(rig, exchange)
    assert (answer.status, answer.error["code"], answer.headers["x-should-retry"]) == (500, "rank_lost", "true")
    rig = await Rig.make("p0 d0 d1")
    rig.script(d0=stream(EARLY, said(11) + b"\n", event_of("draining")), d1=raises(reset))
    answer = await ended(rig, rig.post())
    assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "draining", "5")
    assert outcomes(rig) == {"failed": 1}


@pytest.mark.parametrize("body", [BODY, STREAMED], ids=["whole", "stream"])
async def test_what_no_worker_could_do_is_the_clients_also_behind_the_first_token(body: Any) -> None:
    """As a grammar that gets too large in mid-answer: the status of any bad request, and nothing against the instance."""
    rig = await Rig.make("p0 d0 d1")
    begun = EARLY + said(11) + b"\n" if body is BODY else origin() + GROUPS[0]
    rig.script(d0=stream(begun, event_of("unsupported_parameter")))
    answer = await ended(rig, rig.post(body))
    assert answer.status == (400 if body is BODY else 200)
    assert (answer.error if body is BODY else last_error(answer))["code"] == "unsupported_parameter"
    assert len(rig.cluster.calls) == 2 and not any(i.breaker._failures for i in rig.means.pool.instances.values())


@pytest.mark.parametrize(
    "script",
    [
        stream(EARLY, DONE),
        stream(EARLY, ANSWER, ANSWER, DONE),
        stream(EARLY, b"data: {}\n\n", DONE),
        stream(EARLY, said(11)[:-3] + b"\n\n", ANSWER, DONE),
        raw(200, b"<html/>", "text/html"),
    ],
)
async def test_nonsense_in_place_of_a_whole_answer_is_a_bad_answer(script: Script) -> None:
    rig = await Rig.make("p0 d0 d1")
    rig.script(d0=script)
    answer = await ended(rig, rig.post())
    assert (answer.status, answer.error["code"]) == (502, "bad_worker_answer")
    assert len(rig.cluster.calls) == 2


async def test_an_error_before_a_whole_answer_has_begun_follows_the_retry_rule() -> None:
    rig = await Rig.make("p0 d0 d1")
    rig.script(d0=stream(b": keep-alive\n\n", event_of("overloaded")), d1=whole)
    assert (await ended(rig, rig.post())).body == WHOLE_BYTES
    assert outcomes(rig) == {} and len(rig.cluster.calls) == 4 and retellings(rig) == []


async def test_a_whole_answer_that_is_tried_again_says_its_ids_anew() -> None:
    rig = await Rig.make("p0 d0 d1 d2")
    first = stream(origin(seed=1) + said(21) + b"\n", event_of("overloaded"))
    rig.script(d0=first, d1=stream(EARLY, said(11) + b"\n", reset), d2=whole)
    assert (await ended(rig, rig.post())).body == WHOLE_BYTES
    assert [(told["token_ids"], told["seed"]) for told in retellings(rig)] == [([11], -5)] * 2


async def test_an_answer_with_several_choices_that_breaks_is_tried_again_whole() -> None:
    rig = await Rig.make("p0 d0 d1")
    body = {**BODY, "n": 2}
    rig.script(d0=later(rig.clock, 3, raises(reset)), d1=whole)
    answer = await ended(rig, rig.post(body), within_s=3.5)
    assert (answer.status, answer.body) == (200, WHOLE_BYTES)
    assert {call.body for call in rig.cluster.calls} == {json.dumps(body).encode()}


# ---------------------------------------------------------------------- what the client is told


@pytest.mark.parametrize("at", ["p0", "d0"])
async def test_a_message_names_the_instance_whose_connection_failed(at: str) -> None:
    for make, words in ((reset, f"connection to {at} was cut"), (refused, f"connection to {at} refused")):
        rig = await Rig.make()
        rig.script(p0=never, d0=never)
        rig.script(**{at: raises(make)})
        assert words in (await ended(rig, rig.post())).error["message"]
