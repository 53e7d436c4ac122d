import asyncio
import io
import json
import subprocess
import sys
from typing import Any

import pytest

from longcat_pd import log
from longcat_pd.load_balancer.face import Keys
from longcat_pd.server.intake import KeyRing
from tests.balancer_rig import (
    BODY,
    CHAT,
    COMPLETIONS,
    DONE,
    WHOLE_BYTES,
    LegCall,
    Reply,
    Rig,
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

OPEN = ("/health", "/ready", "/metrics")
CLIENT_GETS = ("/v1/models", "/v1/models/longcat", "/server_info", "/model_info", "/debug/accounting")
CLIENT_POSTS = (CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/flush_cache")


def keys() -> Keys:
    return Keys(client=KeyRing([b"right", "schlüssel".encode()]), admin=KeyRing([b"chief"]))


def answers(rig: Rig, path: str, **values: Any) -> None:
    """Let workers answer a GET."""
    for name, value in values.items():
        rig.cluster.routes[name, path] = value if callable(value) else raw(200, json.dumps(value).encode())


def account(name: str, **more: Any) -> dict[str, Any]:
    return {"role": "x", "instance": name, "idle": True, "outstanding": 0, "mismatch": [], **more}


async def test_flushing_reaches_every_instance_and_says_where_it_did_not() -> None:
    rig, flushed = await Rig.make("p0 p1 d0"), []

    async def flush(call: LegCall) -> Reply:
        flushed.append(call.worker)
        return await raw(200, b'{"success":true}')(call)

    answers(rig, "/flush_cache", p0=flush, p1=flush, d0=flush)
    answer = await rig.post(b"", path="/flush_cache").end()
    assert (answer.status, json.loads(answer.body), sorted(flushed)) == (200, {"success": True}, ["d0", "p0", "p1"])
    answers(rig, "/flush_cache", p1=raw(503, b"{}"), d0=raises(refused))
    answer = await rig.post(b"", path="/flush_cache").end()
    assert answer.status == 503 and "p1, d0" in answer.error["message"]


# ---------------------------------------------------------------------- routes, keys, bodies


@pytest.mark.parametrize(
    "path", ["/v1", "/status/", "/health/", "/v1/models/", "/v1/chat/completions/", "/docs", "/admin/drain"]
)
async def test_what_is_not_a_route_is_404_and_not_redirected(path: str) -> None:
    rig = await Rig.make()
    answer = await rig.get(path, **{"X-Request-Id": "r-9"})
    assert answer.status == 404
    assert answer.error["code"] == ("model_not_found" if path == "/v1/models/" else "unknown_route")
    assert answer.headers["x-request-id"] == "r-9"


@pytest.mark.parametrize(("method", "path"), [("GET", CHAT), ("PUT", CHAT), ("POST", "/health"), ("DELETE", "/v1/models")])
async def test_another_method_is_405_and_names_those_that_are(method: str, path: str) -> None:
    rig = await Rig.make()
    answer = await rig.get(path, method=method)
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
    assert set(answer.headers["allow"].split(", ")) == ({"POST"} if path == CHAT else {"GET", "HEAD"})


async def test_get_routes_answer_head() -> None:
    rig = await Rig.make()
    for path in (*OPEN, *CLIENT_GETS[:2], "/model_info"):
        assert (await rig.get(path, method="HEAD")).status == 200


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "right", "Basic right", "Bearer " + "x" * 50_000, "Bearer ключ", "Bearer "]
)
async def test_client_routes_need_a_key_before_anything_is_read(header: str | None) -> None:
    rig = await Rig.make(keys=keys())
    given = {"authorization": header} if header is not None else {}
    for path in CLIENT_GETS:
        assert (await rig.get(path, **given)).status == 401
    for path in CLIENT_POSTS:
        exchange = rig.post(b"not json", path=path, **given)
        exchange._unread.clear()  # the body never comes
        answer = await exchange.end()
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.error["code"] == ("missing_api_key" if header is None else "invalid_api_key")
    for path in OPEN:
        assert (await rig.get(path, **given)).status == 200
    assert rig.cluster.calls == []


async def test_a_right_key_opens_client_routes_and_stays_here() -> None:
    rig = await Rig.make(keys=keys())
    for key in ("Bearer right", "bearer schlüssel"):
        answer = await rig.post(authorization=key).end()
        assert answer.status == 200
    assert rig.cluster.keys == {None}
    assert (await rig.post({}, path="/admin/drain", authorization="Bearer right").end()).status == 401


async def test_no_key_prompt_or_text_reaches_the_log() -> None:
    out = io.StringIO()
    log.set_up(level="debug", stream=out)
    rig = await Rig.make("p0 d0 d1", keys=keys(), key="cluster-secret")
    rig.script(d0=raises(reset), d1=whole)
    secret = {"messages": [{"role": "user", "content": "geheim"}]}
    await rig.post(secret, authorization="Bearer right", **{"X-Request-Id": "r-7"}).end()
    await rig.post(secret, authorization="Bearer almost").end()
    rig.script(d1=error(400, "invalid_value", "client"))
    await rig.post(secret, authorization="Bearer right").end()
    lines = out.getvalue()
    assert "request_finished" in lines
    assert "retry" in lines
    assert not any(word in lines for word in ("geheim", "right", "almost", "secret", "好"))
    assert "invalid_value of a worker" not in lines, "a client's error quotes the request"
    about = [line for line in lines.splitlines() if "request=r-7" in line]
    assert [line.split()[2] for line in about] == ["leg_failed", "retry", "request_finished"]


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_finished_request_tells_what_can_be_seen_from_here(is_stream: bool) -> None:
    out = io.StringIO()
    log.set_up(stream=out)
    rig = await Rig.make()
    rig.script(p0=prefilled, d0=good_stream if is_stream else whole)
    await rig.post({**BODY, "stream": is_stream}).end()
    (line,) = [part for part in out.getvalue().splitlines() if "request_finished" in part]
    assert "finish=stop" in line and "pair=p0,d0 attempt=1" in line and "prompt=3 queue_ms=1 prefill_ms=2.5" in line
    text = (await rig.get("/metrics")).body.decode()
    first = 'longcat_pd_first_token_seconds_count{instance="lb",role="load_balancer"} '
    assert ("ttft_ms=" in line) == is_stream and f"{first}{float(is_stream)}" in text


async def test_each_request_has_one_line_at_its_end() -> None:
    out = io.StringIO()
    log.set_up(stream=out)
    rig = await Rig.make()
    rig.script(p0=never, d0=never)
    late = rig.post(BODY, **{"X-Request-Timeout": "3", "X-Request-Id": "late"})
    gone = rig.post(BODY, **{"X-Request-Id": "gone"})
    await settle()
    await gone.leave()
    await rig.clock.advance(4)
    await late.end()
    lines = {part.partition("request=")[2].split()[0]: part for part in out.getvalue().splitlines() if "request=" in part}
    assert len(lines) == out.getvalue().count("request=") == 2
    assert "info request_cancelled by=client hop=prefilling" in lines["gone"]
    assert "request_failed status=504 code=deadline_exceeded cause=self hop=prefilling" in lines["late"]
    text = (await rig.get("/metrics")).body.decode()
    for name in ('cancels_total{from="client"', 'cancels_total{from="deadline"'):
        assert f"longcat_pd_{name}" in text


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b'{"messages": [', 400, "invalid_json"),
        (b"\xff\xfe{}", 400, "invalid_json"),
        (b"{}", 400, "missing_field"),
        (b'{"messages": "x"}', 400, "invalid_type"),
        (json.dumps(BODY | {"temperature": 9}).encode(), 400, "invalid_value"),
        (json.dumps(BODY | {"echo": True}).encode(), 400, "unsupported_parameter"),
        (json.dumps(BODY | {"model": "other"}).encode(), 404, "model_not_found"),
        (json.dumps(BODY | {"temperature": 9, "stream": True}).encode(), 400, "invalid_value"),
    ],
)
async def test_a_bad_body_is_refused_before_a_worker_is_called(body: bytes, status: int, code: str) -> None:
    rig = await Rig.make()
    answer = await rig.post(body).end()
    assert (answer.status, answer.error["code"]) == (status, code)
    assert rig.cluster.calls == []
    assert rig.is_idle()


async def test_envelopes_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longcat_pd.server.errors.LINGER_S", 0.01)
    rig = await Rig.make(max_body_bytes=200)
    for headers in (
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-encoding": "gzip"},
    ):
        assert (await rig.post(**headers).end()).status == 415
    assert (await rig.post(**{"content-length": "201"}).end()).status == 413
    answer = await rig.post(BODY | {"user": "x" * 200}).end()
    assert (answer.status, answer.headers["connection"]) == (413, "close")
    for seconds in ("0", "-1", "x", "inf", "nan", ""):
        answer = await rig.post(**{"x-request-timeout": seconds}).end()
        assert (answer.status, answer.error["param"]) == (400, "X-Request-Timeout")
    assert rig.cluster.calls == []


async def test_a_client_that_leaves_while_it_sends_its_body_is_forgotten() -> None:
    rig = await Rig.make()
    exchange = rig.post()
    exchange._unread[0]["more_body"] = True
    await settle()
    assert rig.face.gate.num_open == 1
    await exchange.leave()
    assert exchange.task.done()
    assert rig.is_idle()


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_a_body_that_does_not_come_ends_with_the_time_of_the_request(path: str) -> None:
    rig = await Rig.make()
    exchange = rig.post(path=path, **{"x-request-timeout": "30"})
    exchange._unread[0]["more_body"] = True
    await rig.clock.advance(29)
    assert rig.face.gate.num_open == (path == CHAT) and not exchange.task.done()
    await rig.clock.advance(2)
    assert (exchange.status, exchange.error["code"]) == (504, "deadline_exceeded")
    assert rig.is_idle() and rig.cluster.calls == []


# ---------------------------------------------------------------------- health


async def test_ready_is_a_linked_pair_and_its_reasons_tell_what_lacks() -> None:
    rig = await Rig.make("p0 d0 d1")
    answer = await rig.get("/ready")
    value = json.loads(answer.body)
    assert (answer.status, value["ready"], value["role"], value["ranks"]) == (
        200,
        True,
        "load_balancer",
        {"total": 6, "ok": 6},
    )
    for name in ("d0", "d1"):
        rig.cluster.ready[name] = {
            **rig.cluster.ready[name],
            "ready": False,
            "reasons": [{"code": "rank_silent", "detail": "5.1 s", "rank": 1}],
        }
    await rig.poll()
    answer = await rig.get("/ready")
    value = json.loads(answer.body)
    assert (answer.status, value["ready"]) == (503, False)
    assert [reason["code"] for reason in value["reasons"]] == ["no_decode"]
    assert value["instances"]["d0"] == {"ready": False, "reasons": [{"code": "rank_silent", "detail": "5.1 s", "rank": 1}]}
    assert (await rig.get("/health")).status == 200
    rig.cluster.ready["p0"] = refused()
    await rig.poll()
    value = json.loads((await rig.get("/ready")).body)
    assert [reason["code"] for reason in value["reasons"]] == ["no_prefill", "no_decode"]


async def test_busy_is_ready() -> None:
    rig = await Rig.make()
    rig.cluster.ready["d0"]["busy"] = True
    await rig.poll()
    answer = await rig.get("/ready")
    assert (answer.status, json.loads(answer.body)["busy"]) == (200, True)


async def test_models_are_told_once_the_cluster_was_ready() -> None:
    rig = await Rig.make()
    rig.cluster.ready["d0"] = refused()
    await rig.poll()
    entry = json.loads((await rig.get("/v1/models/longcat")).body)
    assert entry == {
        "id": "longcat",
        "object": "model",
        "created": 7,
        "owned_by": "longcat",
        "root": "/w/longcat",
        "parent": None,
        "max_model_len": 64,
    }
    assert json.loads((await rig.get("/v1/models")).body) == {"object": "list", "data": [entry]}
    answer = await rig.get("/v1/models/or/another")
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    rig.means.pool.has_been_ready.clear()
    answer = await rig.get("/v1/models")
    assert (answer.status, answer.error["code"]) == (503, "starting")


# ---------------------------------------------------------------------- the end-to-end proof


async def test_probes_at_the_same_time_share_one_which_no_request_metric_counts() -> None:
    rig = await Rig.make()
    rig.script(d0=later(rig.clock, 0.041, whole))
    exchanges = [asyncio.ensure_future(rig.get("/health_generate")) for _ in range(20)]
    await rig.clock.advance(0.1)
    found = [json.loads((await exchange).body) for exchange in exchanges]
    assert found == [{"status": "ok", "by": "probe", "ms": 41, "pair": ["p0", "d0"]}] * 20
    (leg,) = rig.cluster.of("d0")
    body = json.loads(leg.body)
    assert (leg.path, body["temperature"], body["ignore_eos"], body["max_tokens"] > 2) == (COMPLETIONS, 0, True, True)
    assert all(isinstance(token, int) for token in body["prompt"])
    text = (await rig.get("/metrics")).body.decode()
    assert "longcat_pd_requests_total{" not in text
    assert rig.is_idle()


async def test_traffic_is_proof_for_five_seconds() -> None:
    rig = await Rig.make()
    await rig.post().end()
    await rig.clock.advance(4.9)
    found = json.loads((await rig.get("/health_generate")).body)
    assert (found["by"], found["pair"]) == ("traffic", ["p0", "d0"])
    assert len(rig.cluster.of("d0")) == 1
    await rig.clock.advance(0.2)
    assert json.loads((await rig.get("/health_generate")).body)["by"] == "probe"
    assert json.loads((await rig.get("/health_generate")).body)["by"] == "probe"  # a probe is not traffic


async def test_a_running_stream_is_proof_however_long_it_is() -> None:
    rig = await Rig.make()
    rig.script(d0=stream(chunk("a"), 60.0, chunk("b"), 60.0, DONE, clock=rig.clock))
    exchange = rig.post(BODY | {"stream": True})
    await rig.clock.advance(63)
    assert json.loads((await rig.get("/health_generate")).body)["by"] == "traffic"
    await exchange.leave()


@pytest.mark.parametrize(
    ("p0", "d0", "seconds", "hop"),
    [
        (raises(reset), never, 1, "p0"),
        (prefilled, error(500, "rank_lost", "self"), 1, "d0"),
        (never, never, 20.5, "p0"),
        (prefilled, never, 20.5, "d0"),
    ],
)
async def test_a_failing_probe_names_the_hop_in_at_most_twenty_seconds(p0: Any, d0: Any, seconds: float, hop: str) -> None:
    rig = await Rig.make()
    rig.script(p0=p0, d0=d0)
    asking = asyncio.ensure_future(rig.get("/health_generate"))
    await rig.clock.advance(seconds)
    answer = await asking
    assert answer.status == 503
    assert hop in answer.error["message"]
    assert rig.is_idle()


async def test_a_probe_survives_the_one_who_asked_first_and_leaves_nothing() -> None:
    rig = await Rig.make()
    rig.script(d0=later(rig.clock, 1, whole))
    first = asyncio.ensure_future(rig.get("/health_generate"))
    await settle()
    second = asyncio.ensure_future(rig.get("/health_generate"))
    await settle()
    first.cancel()
    await rig.clock.advance(1.1)
    assert json.loads((await second).body)["by"] == "probe"
    rig.script(d0=later(rig.clock, 1, raises(reset)))
    third = asyncio.ensure_future(rig.get("/health_generate"))
    await settle()
    third.cancel()
    await rig.clock.advance(1.5)  # fails unheard, without a warning
    assert rig.is_idle()


# ---------------------------------------------------------------------- what is passed to or gathered from workers


async def test_tokenize_goes_through_a_ready_prefill_instance() -> None:
    rig = await Rig.make("p0 p1 d0", key="k")
    rig.cluster.ready["p0"] = refused()
    await rig.poll()
    told = b'{"tokens":[1,2],"count":2,"max_model_len":64}'
    seen: list[LegCall] = []

    async def tokenize(call: LegCall) -> Reply:
        seen.append(call)
        return Reply(200, told, {"content-type": "application/json"})

    rig.cluster.routes["p1", "/tokenize"] = tokenize
    given = {"X-Request-Id": "t-1", "traceparent": "00-1-2-01", "X-Longcat-Peer": "d0", "Authorization": "Bearer c"}
    answer = await rig.post({"prompt": "你好"}, path="/tokenize", **given).end()
    assert (answer.status, answer.body, answer.headers["content-type"]) == (200, told, "application/json")
    assert json.loads(seen[0].body) == {"prompt": "你好"}
    assert (seen[0].headers["x-request-id"], seen[0].headers["authorization"]) == ("t-1", "Bearer k")
    assert seen[0].headers["traceparent"] == "00-1-2-01" and "x-longcat-peer" not in seen[0].headers
    rig.cluster.routes["p1", "/detokenize"] = error(400, "invalid_value", "client", kind="invalid_request_error")
    answer = await rig.post({"tokens": [9]}, path="/detokenize").end()
    assert (answer.status, answer.error["code"]) == (400, "invalid_value")
    rig.cluster.routes["p1", "/detokenize"] = raw(500, b"<html/>")
    assert (await rig.post({"tokens": [9]}, path="/detokenize").end()).status == 502
    rig.cluster.routes["p1", "/detokenize"] = raises(refused)
    assert (await rig.post({"tokens": [9]}, path="/detokenize").end()).status == 503
    rig.cluster.ready["p1"] = refused()
    await rig.poll()
    assert (await rig.post({"prompt": "x"}, path="/tokenize").end()).status == 503


async def test_tokenize_goes_to_the_next_where_the_first_is_not_there() -> None:
    rig = await Rig.make("p0 p1 d0")
    told = b'{"tokens":[1],"count":1,"max_model_len":64}'
    answers(rig, "/tokenize", p0=raises(refused), p1=raw(200, told))
    answer = await rig.post({"prompt": "x"}, path="/tokenize").end()
    assert (answer.status, answer.body) == (200, told)
    assert [i.name for i in rig.face.means.pool.ready("prefill")] == ["p1"], "out until a poll succeeds"
    answers(rig, "/tokenize", p1=raises(refused))
    assert (await rig.post({"prompt": "x"}, path="/tokenize").end()).status == 503


async def test_server_info_has_the_shape_that_benchmarks_read() -> None:
    rig = await Rig.make("p0 d0 d1")

    def info(name: str, state: dict[str, Any], **parallel: int) -> dict[str, Any]:
        return {
            "version": "0.1.0",
            "role": "x",
            "instance": name,
            "tokenizer_path": "/w",
            "parallel": parallel,
            "internal_states": [state],
            "sampling_defaults": {"temperature": 1.0, "top_p": 1.0, "top_k": -1},
            "determinism": "batch_invariant",
            "peers_own_business": 1,
        }

    state = {"avg_spec_accept_length": 2.41, "dp_size": 1}
    answers(
        rig, "/server_info", p0=info("p0", {}, pp_size=2, cp_size=2), d0=info("d0", state, kvp_size=2), d1=raises(refused)
    )
    found = json.loads((await rig.get("/server_info")).body)
    assert found["role"] == "load_balancer"
    assert found["served_model_name"] == "longcat"
    assert found["sampling_defaults"] == {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    assert found["determinism"] == "batch_invariant"
    assert [entry["instance"] for entry in found["decode"]] == ["d0"]
    assert found["decode"][0]["internal_states"][0]["avg_spec_accept_length"] == 2.41
    assert found["internal_states"] == [state]
    assert found["prefill"] == [
        {"instance": "p0", "tokenizer_path": "/w", "parallel": {"pp_size": 2, "cp_size": 2}, "internal_states": [{}]}
    ]
    found = json.loads((await rig.get("/model_info")).body)
    assert found == {"model_path": "/w/longcat", "tokenizer_path": "/w/longcat", "is_generation": True}


async def test_accounting_is_idle_only_when_everybody_says_so() -> None:
    rig = await Rig.make()
    answers(rig, "/debug/accounting", p0=account("p0"), d0=account("d0"))
    found = json.loads((await rig.get("/debug/accounting")).body)
    assert found == {
        "role": "load_balancer",
        "idle": True,
        "outstanding": 0,
        "balancer": {"clients": 0, "legs": {"prefill": 0, "decode": 0}},
        "instances": {"p0": account("p0"), "d0": account("d0")},
        "unreachable": [],
    }
    rig.script(p0=never, d0=never)
    exchange = rig.post()
    await settle()
    answers(rig, "/debug/accounting", d0=account("d0", idle=False, outstanding=7))
    found = json.loads((await rig.get("/debug/accounting")).body)
    assert (found["idle"], found["outstanding"]) == (False, 10)
    assert found["balancer"] == {"clients": 1, "legs": {"prefill": 1, "decode": 1}}
    await exchange.leave()
    answers(rig, "/debug/accounting", d0=never)
    asking = asyncio.ensure_future(rig.get("/debug/accounting"))
    await rig.clock.advance(5)
    found = json.loads((await asking).body)
    assert (found["idle"], found["unreachable"]) == (False, ["d0"])


# ---------------------------------------------------------------------- drain


async def test_draining_the_balancer_and_one_instance() -> None:
    out = io.StringIO()
    log.set_up(stream=out)
    rig = await Rig.make("p0 d0 d1", keys=Keys(admin=KeyRing([b"chief"])))
    chief = {"authorization": "Bearer chief"}
    rig.script(d0=never, d1=never, p0=never)
    exchange = rig.post()
    await settle()
    answer = await rig.post({"instance": "d0"}, path="/admin/drain", **chief).end()
    assert (answer.status, json.loads(answer.body)) == (202, {"draining": True, "open": 1})
    rig.script(d0=whole, d1=whole, p0=prefilled)
    for _ in range(3):
        assert (await rig.post().end()).body == WHOLE_BYTES
    assert len(rig.cluster.of("d0")) == 1
    assert (await rig.post({"instance": "zz"}, path="/admin/drain", **chief).end()).status == 400
    for _ in range(2):
        answer = await rig.post({}, path="/admin/drain", **chief).end()
        assert (answer.status, json.loads(answer.body)) == (202, {"draining": True, "open": 1})
    answer = await rig.get("/ready")
    assert (answer.status, json.loads(answer.body)["reasons"][0]["code"]) == (503, "draining")
    assert (await rig.get("/health")).status == 200
    answer = await rig.post().end()
    assert (answer.status, answer.error["code"]) == (503, "draining")
    assert 'longcat_pd_draining{instance="lb",role="load_balancer"} 1.0' in (await rig.get("/metrics")).body.decode()
    for body in ({}, {"instance": "d0"}):
        answer = await rig.post(body, path="/admin/undrain", **chief).end()
        assert (answer.status, json.loads(answer.body)["draining"]) == (202, False)
    told = [" ".join(line.split()[1:5]) for line in out.getvalue().splitlines() if "drain" in line]
    assert told[-3:] == [
        "info drain_started target=lb open=1",
        *(f"info undrained target={t} open=1" for t in ("lb", "d0")),
    ]
    assert not exchange.task.done()
    await exchange.leave()
    assert {(await rig.post().end()).status for _ in range(4)} == {200}
    assert len(rig.cluster.of("d0")) > 1
    rig.face.gate.close()  # this process ends
    for body, is_out in (({}, True), ({"instance": "d0"}, False)):
        answer = await rig.post(body, path="/admin/undrain", **chief).end()
        assert (answer.status, json.loads(answer.body)["draining"]) == (202, is_out)
    assert (await rig.post().end()).error["code"] == "draining"


# ---------------------------------------------------------------------- the process


def test_a_fresh_interpreter_holds_no_torch_and_little_memory() -> None:
    code = (
        "import pathlib, sys, longcat_pd.load_balancer.__main__, longcat_pd.load_balancer.app\n"
        "heavy = [m for m in ('torch', 'numpy', 'transformers', 'tokenizers') if m in sys.modules]\n"
        "status = pathlib.Path('/proc/self/status').read_text()\n"
        "print(heavy, int(status.partition('VmRSS:')[2].split()[0]) // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    heavy, _, mib = done.stdout.rpartition(" ")
    assert heavy == "[]"
    assert int(mib) < 90


@pytest.mark.parametrize("host", ["h", "x?y", "[", "x/v1/completions?", "x#", ""])
@pytest.mark.parametrize("query", ["", "?\xff", "?a=[", "?//"])
async def test_neither_host_nor_query_hide_the_path(host: str, query: str) -> None:
    rig = await Rig.make()
    answers(rig, "/tokenize", p0=raw(200, b'{"tokens":[]}'))
    for path, body in ((CHAT, BODY), ("/tokenize", {"prompt": "hi"})):
        assert (await rig.post(body, path + query, host=host).end()).status == 200
    assert "no route /nothing" in (await rig.post(BODY, "/nothing" + query, host=host).end()).error["message"]
    assert f"is not allowed on {CHAT}" in (await rig.get(CHAT + query, host=host)).error["message"]
