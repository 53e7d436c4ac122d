"""Routes, keys, envelopes, legs of a balancer, and clients that leave."""

# ruff: noqa: E501 - tables

import asyncio
import io
import json
from dataclasses import replace

import httpx
import pytest

from longcat_pd import log
from longcat_pd.config.schema import LoadBalancerConfig
from longcat_pd.engine.request import Delta, Event
from longcat_pd.errors import ConfigError, Overloaded, RankLost, TransferFailed, WorkerUnavailable
from longcat_pd.metrics import Metrics
from longcat_pd.server.app import worker_front
from longcat_pd.server.gate import Gate
from longcat_pd.server.text import TextProcessor
from tests.manual_clock import settle
from tests.unit.fake_service import EOS, LEG, TRANSFER, FakeService, events_of, make_app, plays, write_folder

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OPEN = ["/health", "/ready", "/metrics"]
BODY = {"prompt": [5, 6], "max_tokens": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model"))


def client_of(service, **options):
    transport = httpx.ASGITransport(make_app(service, **options))
    return httpx.AsyncClient(transport=transport, base_url="http://face")


async def ask(service, method, path, *, options=None, **request):
    async with client_of(service, **(options or {})) as client:
        return await client.request(method, path, **request)


ROLES = {
    "standalone": {
        "GET": [*OPEN, "/openapi.json", "/health_generate", "/v1/models", "/v1/models/tiny", "/server_info", "/model_info", "/debug/accounting"],
        "POST": [CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/flush_cache"],
    },
    "prefill": {
        "GET": [*OPEN, "/server_info", "/model_info", "/debug/accounting", "/debug/seen"],
        "POST": [CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/flush_cache"],
    },
    "decode": {
        "GET": [*OPEN, "/server_info", "/model_info", "/debug/accounting", "/debug/seen"],
        "POST": [CHAT, COMPLETIONS, "/flush_cache"],
    },
}  # fmt: skip
EVERY = {path for routes in ROLES.values() for paths in routes.values() for path in paths}


@pytest.mark.parametrize("role", ROLES)
async def test_which_routes_there_are(folder, role):
    service = FakeService(folder, plays([EOS]), role=role)
    async with client_of(service) as client:
        for path in ROLES[role]["GET"]:
            assert (await client.get(path)).status_code == 200, path
            assert (await client.head(path)).status_code == 200, path
        for path in ROLES[role]["POST"]:
            answer = await client.post(path, json={})
            assert answer.status_code in (200, 400), path
        for method, wrong in (("GET", "POST"), ("POST", "GET")):
            for path in ROLES[role][method]:
                answer = await client.request(wrong, path)
                assert answer.status_code == 405, path
                assert answer.headers["allow"] == ("GET, HEAD" if method == "GET" else "POST")
                assert answer.json()["error"]["code"] == "method_not_allowed"
        known = {path for paths in ROLES[role].values() for path in paths}
        for path in (EVERY - known) | {"/", "/nothing", "/docs", "/health/", "/admin/drain", CHAT + "/"}:
            for method in ("GET", "POST"):
                answer = await client.request(method, path)
                assert answer.status_code == 404 and not answer.history, path
                error = answer.json()["error"]
                assert (error["type"], error["code"], error["param"]) == ("not_found_error", "unknown_route", None)
                assert answer.headers["x-request-id"]


async def test_the_model_routes(folder):
    service = FakeService(folder, plays([EOS]))
    listed = (await ask(service, "GET", "/v1/models")).json()
    [entry] = listed["data"]
    assert listed["object"] == "list" and isinstance(entry.pop("created"), int)
    assert entry == {
        "id": "tiny", "object": "model", "owned_by": "longcat", "root": folder, "parent": None, "max_model_len": 512,
    }  # fmt: skip
    assert (await ask(service, "GET", "/v1/models/tiny")).json()["id"] == "tiny"
    other = await ask(service, "GET", "/v1/models/org/tiny")
    assert other.status_code == 404 and other.json()["error"]["code"] == "model_not_found"


async def test_a_served_name_may_hold_slashes(folder):
    service = FakeService(folder, plays([EOS]))
    service.model = replace(service.model, served_name="org/tiny")
    assert (await ask(service, "GET", "/v1/models/org/tiny")).json()["id"] == "org/tiny"


async def test_health_and_readiness(folder):
    service = FakeService(folder, plays([EOS]), role="decode")
    assert (await ask(service, "GET", "/health")).json() == {"status": "ok"}
    service.state = replace(service.state, busy=True, peers={"p0": "up"})
    assert (await ask(service, "GET", "/ready")).json() == {
        "ready": True, "busy": True, "role": "decode", "instance": "d0", "incarnation": "9f2c", "config_digest": "51d0",
        "ranks": {"total": 1, "ok": 1}, "peers": {"p0": "up"}, "reasons": [],
    }  # fmt: skip
    silent = {"code": "rank_silent", "detail": "5 s", "rank": 0}
    service.state = replace(service.state, reasons=(silent,))
    gate = Gate()
    gate.drain()
    answer = await ask(service, "GET", "/ready", options={"gate": gate})
    assert answer.status_code == 503 and answer.json()["ready"] is False
    assert [r["code"] for r in answer.json()["reasons"]] == ["rank_silent", "draining"]
    service.state = replace(service.state, is_lost=True)
    assert (await ask(service, "GET", "/health")).status_code == 503


async def test_starting_refuses_work_and_says_so(folder):
    service = FakeService(folder, plays([EOS]))
    service.state = replace(service.state, reasons=({"code": "starting", "detail": "weights", "rank": None},))
    for method, path in (("POST", CHAT), ("POST", COMPLETIONS), ("GET", "/v1/models"), ("GET", "/health_generate")):
        answer = await ask(service, method, path, json=BODY if method == "POST" else None)
        error = answer.json()["error"]
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5", path
        assert error["code"] in ("starting", "worker_unavailable")
    assert (await ask(service, "GET", "/health")).status_code == 200
    service.state = replace(service.state, reasons=({"code": "rank_silent", "detail": "", "rank": 0},))
    assert (await ask(service, "GET", "/v1/models")).status_code == 200


async def test_what_an_instance_says_of_itself(folder):
    info = (await ask(FakeService(folder, plays([EOS])), "GET", "/server_info")).json()
    assert info["role"] == "standalone" and info["served_model_name"] == "tiny" and info["max_model_len"] == 512
    assert info["model_path"] == info["tokenizer_path"] == folder and "decode" not in info
    assert info["sampling_defaults"] == {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    assert info["internal_states"] == [{"avg_spec_accept_length": None}] and info["determinism"] == "batch_invariant"
    model = (await ask(FakeService(folder, plays([EOS])), "GET", "/model_info")).json()
    assert model == {"model_path": folder, "tokenizer_path": folder, "is_generation": True}
    service = FakeService(folder, plays([EOS]))
    assert (await ask(service, "POST", "/flush_cache")).json() == {"success": True}
    assert service.num_flushes == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_tells_what_of_the_prompt_was_not_computed(folder, path):
    """Of several choices that share a prompt: what none of them computed."""

    async def script(request):
        request.life.num_cached_tokens = 2 if request.sampling.choice else 1
        async for delta in plays([7, EOS])(request):
            yield delta

    metrics = Metrics(role="standalone", instance="s0")
    asked = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": [5, 6, 7]}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    for fields in ({}, {"n": 2}, streamed, {**streamed, "n": 2}):
        answer = await ask(
            FakeService(folder, script),
            "POST",
            path,
            json={**asked, "max_tokens": 4, **fields},
            options={"metrics": metrics},
        )
        usage = events_of(answer.content)[-2]["usage"] if "stream" in fields else answer.json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
    assert b'longcat_pd_cached_tokens_total{instance="s0",role="standalone"} 4.0' in metrics.render()


async def test_tokenize_gives_the_ids_that_generation_uses(folder):
    service = FakeService(folder, plays([EOS]))
    text = TextProcessor.load(folder)
    async with client_of(service) as client:
        answer = (await client.post("/tokenize", json={"prompt": "Hello 你好"})).json()
        assert answer == {"tokens": text.encode("Hello 你好"), "count": len(answer["tokens"]), "max_model_len": 512}
        await client.post(COMPLETIONS, json={"prompt": "Hello 你好"})
        assert list(service.requests[-1].prompt_token_ids) == answer["tokens"]
        chat = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"enable_thinking": True}}
        tokens = (await client.post("/tokenize", json=chat)).json()["tokens"]
        await client.post(CHAT, json=chat)
        assert list(service.requests[-1].prompt_token_ids) == tokens
        back = (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json()
        assert back == {"text": "Hello 你好", "prompt": "Hello 你好"}
        assert "<longcat_user>x" in (await client.post("/detokenize", json={"tokens": tokens})).json()["text"]
        for path, body, param in (
            ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": 5}, "prompt"), ("/tokenize", {"messages": []}, "messages"),
            ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": [5000]}, "tokens[0]"), ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
        ):  # fmt: skip
            refused = await client.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_the_probe(folder):
    going = asyncio.Event()

    async def script(request):
        await going.wait()
        async for delta in plays([300, 301, 302, 303])(request):
            yield delta

    service = FakeService(folder, script)
    service.time = 100.0
    async with client_of(service) as client:
        probes = [asyncio.create_task(client.get("/health_generate")) for _ in range(5)]
        await settle(500)  # turns, and no time: all of them have joined, however slow the machine is
        going.set()
        answers = [(await probe).json() for probe in probes]
        assert len(service.requests) == 1 and service.requests[0].sampling.temperature == 0
        assert {(a["status"], a["by"], tuple(a["pair"])) for a in answers} == {("ok", "probe", ("s0", "s0"))}
        await client.post(COMPLETIONS, json=BODY)
        service.time = 104.0
        assert (await client.get("/health_generate")).json()["by"] == "traffic"
        service.time = 106.0
        assert (await client.get("/health_generate")).json()["by"] == "probe"
        assert b'outcome="length"' in (metrics := (await client.get("/metrics")).content)
        assert b'requests_total{instance="s0",outcome="length",role="standalone"} 1.0' in metrics, "a probe is not counted"


async def test_a_probe_that_fails_names_the_hop(folder):
    async def script(request):
        raise RankLost("rank 1 has ended")
        yield

    answer = await ask(FakeService(folder, script), "GET", "/health_generate")
    assert answer.status_code == 503 and "s0: rank_lost" in answer.json()["error"]["message"]


# keys


def key_file(tmp_path, *lines):
    path = tmp_path / f"keys{len(lines)}"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


async def test_client_keys(folder, tmp_path):
    options = {"api_key_file": key_file(tmp_path, b"alpha", b"", " bêta ".encode())}
    service = FakeService(folder, plays([EOS]))

    async def status(path, key=None, method="GET"):
        headers = [] if key is None else [(b"Authorization", key)]
        content = b"{}" if method == "POST" else None
        answer = await ask(service, method, path, headers=headers, content=content, options=options)
        if answer.status_code == 401:
            assert answer.headers["www-authenticate"] == "Bearer" and answer.headers["x-request-id"]
            assert answer.json()["error"]["type"] == "authentication_error"
        return answer.status_code, answer.json()["error"]["code"] if answer.status_code == 401 else None

    for path in ("/health", "/ready", "/health_generate"):
        assert await status(path) == (200, None)
    for path in ("/v1/models", "/v1/models/tiny", "/server_info", "/model_info", "/debug/accounting"):
        assert await status(path) == (401, "missing_api_key")
        assert await status(path, b"Bearer wrong") == (401, "invalid_api_key")
        assert await status(path, b"Basic alpha") == (401, "invalid_api_key")
        assert await status(path, b"Bearer " + b"a" * 100000) == (401, "invalid_api_key")
        assert await status(path, b"Bearer \xff\xfe") == (401, "invalid_api_key")
        assert await status(path, b"Bearer alpha") == (200, None)
        assert await status(path, "bearer bêta".encode()) == (200, None)
    for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/flush_cache"):
        assert await status(path, method="POST") == (401, "missing_api_key")
        assert (await status(path, b"Bearer alpha", method="POST"))[0] in (200, 400)


async def test_a_wrong_key_is_refused_before_the_body_is_read(folder, tmp_path):
    app = make_app(FakeService(folder, plays([EOS])), api_key_file=key_file(tmp_path, b"alpha"))

    async def receive():
        raise AssertionError("the body was read")

    sent = await drive(app, CHAT, receive=receive)
    assert sent[0]["status"] == 401


async def test_a_key_file_without_a_key_is_refused(folder, tmp_path):
    empty = tmp_path / "empty"
    empty.write_bytes(b"\n \n")
    for path in (str(empty), str(tmp_path / "none")):
        with pytest.raises(ConfigError):
            make_app(FakeService(folder, plays([EOS])), api_key_file=path)


async def test_draining_by_the_operator(folder, tmp_path):
    options = {"admin_key_file": key_file(tmp_path, b"root"), "api_key_file": key_file(tmp_path, b"a", b"b")}
    admin, client_key = {"Authorization": "Bearer root"}, {"Authorization": "Bearer a"}
    service, out = FakeService(folder, plays([EOS])), io.StringIO()
    async with client_of(service, **options) as client:
        log.set_up(stream=out)
        assert (await client.post("/admin/drain", headers=client_key)).status_code == 401
        for wrong in ({"instance": "d7"}, {"instance": 7}, []):
            assert (await client.post("/admin/drain", headers=admin, json=wrong)).status_code == 400, wrong
        assert (await client.get("/ready")).status_code == 200
        assert (await client.post("/admin/drain", headers=admin, json={"instance": "s0"})).status_code == 202
        for _ in range(2):
            answer = await client.post("/admin/drain", headers=admin, json={})
            assert (answer.status_code, answer.json()) == (202, {"draining": True, "open": 0})
        refused = await client.post(COMPLETIONS, headers=client_key, json=BODY)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        assert refused.headers["x-should-retry"] == "true" and refused.headers["retry-after"] == "5"
        assert (await client.get("/ready")).status_code == 503
        assert (await client.post("/admin/undrain", headers=admin)).json() == {"draining": False, "open": 0}
        assert (await client.post(COMPLETIONS, headers=client_key, json=BODY)).status_code == 200
    lines = [line.split()[1:] for line in out.getvalue().splitlines()]
    told = [" ".join(line[:3]) for line in lines if "drain" in line[1]]
    assert told == [*["info drain_started open=0"] * 3, "info undrained open=0"]


async def test_too_many_and_the_accounts(folder):
    arrived = asyncio.Semaphore(0)

    async def script(request):
        arrived.release()
        await asyncio.Event().wait()
        yield

    service = FakeService(folder, script)
    gate = Gate(2)
    async with client_of(service, gate=gate) as client:
        running = [asyncio.create_task(client.post(COMPLETIONS, json={**BODY, "stream": s})) for s in (True, False)]
        for _ in running:
            await arrived.acquire()
        account = (await client.get("/debug/accounting")).json()
        assert account["driver"]["request_sockets"] == 2 and account["outstanding"] == 2 and account["idle"] is False
        refused = await client.post(COMPLETIONS, json=BODY)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"] | {"message": ""} == {
            "message": "", "type": "rate_limit_error", "param": None, "code": "too_many_requests",
        }  # fmt: skip
        gate.drain()
        assert gate.cut(RankLost("rank 1 ended with status -9")) == 2
        for task in running:
            answer = await task
            assert answer.status_code == 500 and answer.json()["error"]["code"] == "rank_lost"
        await gate.empty()
        account = (await client.get("/debug/accounting")).json()
        assert account["idle"] is True and account["outstanding"] == 0 and service.num_running == 0


# envelopes


@pytest.mark.parametrize(
    "headers,status",
    [
        ({}, 200),
        ({"Content-Type": "application/json"}, 200),
        ({"Content-Type": "Application/JSON; charset=UTF-8"}, 200),
        ({"Content-Type": 'application/json; charset="utf-8"'}, 200),
        ({"Content-Type": "application/json", "Content-Encoding": "identity"}, 200),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/json; charset=latin-1"}, 415),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, 415),
    ],
)
async def test_media_types(folder, headers, status):
    async with client_of(FakeService(folder, plays([EOS]))) as client:
        request = client.build_request("POST", COMPLETIONS, content=json.dumps(BODY))
        request.headers.pop("content-type", None)
        request.headers.update(headers)
        answer = await client.send(request)
    assert answer.status_code == status
    if status == 415:
        error = answer.json()["error"]
        assert error["code"] == "unsupported_media_type" and "application/json" in error["message"]


async def test_long_bodies(folder):
    app = make_app(FakeService(folder, plays([EOS])), max_body_bytes=100)

    for length, num_needed in ((b"101", 0), (b"60", 2), (None, 2)):
        sent, read = [], []

        async def receive(read=read, sent=sent):
            read.append(len(sent))
            return {"type": "http.request", "body": b"x" * 60, "more_body": len(read) < 5}

        headers = [] if length is None else [(b"content-length", length)]
        await drive(app, COMPLETIONS, receive=receive, headers=headers, sent=sent)
        assert sent[0]["status"] == 413 and (b"connection", b"close") in sent[0]["headers"]
        assert json.loads(sent[1]["body"])["error"]["code"] == "body_too_large"
        # told as soon as it is known; what comes then is thrown away before the connection is closed
        assert read == [0] * num_needed + [2] * (5 - num_needed) and sent[2]["more_body"] is False


async def test_a_long_body_that_does_not_end_is_not_waited_for(folder, monkeypatch):
    monkeypatch.setattr("longcat_pd.server.errors.LINGER_S", 0.01)

    async def never():
        await asyncio.Event().wait()

    app = make_app(FakeService(folder, plays([EOS])), max_body_bytes=100)
    sent = await drive(app, COMPLETIONS, receive=never, headers=[(b"content-length", b"101")])
    assert [message.get("status") for message in sent] == [413, None, None]


@pytest.mark.parametrize(
    "given,kept", [("a.B:c_d-9", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False)]
)
async def test_request_ids(folder, given, kept):
    for path in ("/health", "/nothing"):
        answer = await ask(FakeService(folder, plays([EOS])), "GET", path, headers={"X-Request-Id": given})
        got = answer.headers["x-request-id"]
        assert (got == given) is kept and len(got) >= 9 and answer.headers.get_list("x-request-id") == [got]


@pytest.mark.parametrize("given", ["0", "-1", "x", "nan", "inf", "1e3", ""])
async def test_a_malformed_time_limit(folder, given):
    answer = await ask(
        FakeService(folder, plays([EOS])), "POST", COMPLETIONS, json=BODY, headers={"X-Request-Timeout": given}
    )
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "X-Request-Timeout"


async def test_a_time_limit_never_lengthens(folder):
    service = FakeService(folder, plays([EOS]))
    options = {"request_timeout_s": 10.0}
    await ask(service, "POST", COMPLETIONS, json=BODY, headers={"X-Request-Timeout": "9999"}, options=options)
    assert service.requests[0].deadline - service.now() <= 10


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
async def test_a_body_that_does_not_come_ends_with_the_time_of_the_request(folder, path):
    async def never():
        await asyncio.Event().wait()

    service = FakeService(folder, plays([EOS]))
    sent = await drive(make_app(service), path, receive=never, headers=[(b"x-request-timeout", b"0.01")])
    assert sent[0]["status"] == 504 and json.loads(sent[1]["body"])["error"]["code"] == "deadline_exceeded"
    assert service.requests == []


async def test_headers_of_legs_from_a_client_change_nothing(folder):
    service = FakeService(folder, plays([EOS]))
    answer = await ask(service, "POST", COMPLETIONS, json=BODY, headers={**LEG, "X-Longcat-Deadline-Ms": "1"})
    assert answer.status_code == 200 and service.requests[0].transfer is None


async def test_http_metrics(folder):
    service = FakeService(folder, plays([EOS]))
    metrics = Metrics(role="standalone", instance="s0")
    async with client_of(service, metrics=metrics) as client:
        await client.post(COMPLETIONS, json=BODY)
        await client.post(COMPLETIONS, json={})
        await client.get("/secret/path")
        await client.get("/v1/models/tiny")
        text = (await client.get("/metrics")).text
    assert 'route="/v1/completions",status="200"} 1.0' in text.replace('role="standalone",', "")
    assert 'route="/v1/completions",status="400"} 1.0' in text.replace('role="standalone",', "")
    assert 'route="other"' in text and "secret" not in text and 'route="/v1/models/{model_id:path}"' in text
    assert 'longcat_pd_ready{instance="s0",role="standalone"} 1.0' in text
    assert 'longcat_pd_prompt_tokens_total{instance="s0",role="standalone"} 2.0' in text


# legs


async def test_a_prefill_leg(folder):
    async def script(request):
        request.life.stamp(Event.PREFILL_STARTED, 1.0)
        request.life.stamp(Event.PREFILL_ENDED, 1.0125 if request.sampling.choice else 1.01)
        yield Delta(())

    for stream in (False, True):
        service = FakeService(folder, script, role="prefill")
        body = {"messages": [{"role": "user", "content": "x"}], "stream": stream, "n": 2, "max_tokens": 9}
        answer = await ask(service, "POST", CHAT, json=body, headers=LEG)
        prompt = service.requests[0].prompt_token_ids
        told = answer.json()
        assert told.pop("timings_ms") == {"prefill": pytest.approx(12.5)}, "of the slowest choice"
        assert told == {"object": "prefill", "transfer_id": TRANSFER, "prompt_tokens": len(prompt)}
        assert [(r.transfer.id, r.transfer.peer) for r in service.requests] == [
            (f"{TRANSFER}.0", "p0"),
            (f"{TRANSFER}.1", "p0"),
        ]
        assert [r.sampling.choice for r in service.requests] == [0, 1] and service.requests[0].sampling.max_tokens == 9
        assert service.requests[0].deadline - service.now() == pytest.approx(60, abs=1)
    service = FakeService(folder, script, role="prefill")
    await ask(service, "POST", COMPLETIONS, json=BODY, headers=LEG)
    assert service.requests[0].transfer.id == TRANSFER


async def test_a_decode_leg_answers_the_client(folder):
    text = TextProcessor.load(folder)
    for offered, expected in (("<longcat_think>\n", "why"), ("<longcat_think>\n\n</longcat_think>\n", None)):
        service = FakeService(folder, plays([*text.encode("why\n</longcat_think>\nyes"), EOS]), role="decode")
        service.offered_prompt = tuple(text.encode("<longcat_assistant>" + offered))
        service.offered_max_tokens = 90
        body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "seed": 5}
        answer = await ask(service, "POST", CHAT, json=body, headers=LEG)
        message = answer.json()["choices"][0]["message"]
        assert message["reasoning_content"] == expected
        assert message["content"] == ("yes" if expected else "why\n</longcat_think>\nyes")
        assert answer.json()["usage"]["prompt_tokens"] == len(service.offered_prompt)
        [request] = service.requests
        assert (request.sampling.temperature, request.sampling.max_tokens, request.sampling.seed) == (0.0, 90, 77)
        assert [t.id for t in service.adopted] == [TRANSFER]
    service = FakeService(folder, plays([9, EOS]), role="decode")
    answer = await ask(service, "POST", COMPLETIONS, json={**BODY, "n": 2, "stream": True}, headers=LEG)
    *_, usage, end = answer.content.removesuffix(b"\n\n").splitlines()
    assert end == b"data: [DONE]" and usage.startswith(b": usage ")  # for the balancer, which passes no comment on
    assert json.loads(usage.removeprefix(b": usage "))["completion_tokens"] == 4
    assert sorted(t.id for t in service.adopted) == [f"{TRANSFER}.0", f"{TRANSFER}.1"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_leg_without_its_headers(folder, role):
    for missing in ("X-Longcat-Transfer-Id", "X-Longcat-Peer", "X-Longcat-Deadline-Ms"):
        headers = {name: value for name, value in LEG.items() if name != missing}
        options = {"host": "10.9.8.7", "port": 8081}
        answer = await ask(
            FakeService(folder, plays([EOS]), role=role), "POST", CHAT, json=BODY, headers=headers, options=options
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "missing_field", missing)
        assert "http://10.9.8.7:8081" in error["message"] and answer.headers["x-longcat-cause"] == "client"
    for name, value in (("X-Longcat-Transfer-Id", "zz"), ("X-Longcat-Deadline-Ms", "-5"), ("X-Longcat-Attempt", "x")):
        answer = await ask(
            FakeService(folder, plays([EOS]), role=role), "POST", CHAT, json=BODY, headers={**LEG, name: value}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


async def test_a_leg_without_an_attempt_is_the_first(folder):
    service = FakeService(folder, plays([EOS]), role="decode")
    headers = {name: value for name, value in LEG.items() if name != "X-Longcat-Attempt"}
    assert (await ask(service, "POST", COMPLETIONS, json=BODY, headers=headers)).status_code == 200


CAUSES = [
    (Overloaded("full"), 503, "load"),
    (WorkerUnavailable("no such peer"), 503, "self"),
    (WorkerUnavailable("bye", code="draining"), 503, "load"),
    (TransferFailed("lane"), 502, "self"),
    (TransferFailed("gone", peer_gone=True), 502, "peer"),
    (RankLost("rank 0"), 500, "self"),
    (KeyError("x"), 500, "self"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("error,status,cause", CAUSES)
async def test_a_worker_says_whose_fault_it_was(folder, stream, role, error, status, cause):
    async def script(request):
        raise error
        yield

    answer = await ask(
        FakeService(folder, script, role=role), "POST", COMPLETIONS, json={**BODY, "stream": stream}, headers=LEG
    )
    assert (answer.status_code, answer.headers["x-longcat-cause"]) == (status, cause)


async def test_one_key_guards_a_worker(folder, tmp_path):
    front = worker_front(
        LoadBalancerConfig(host="10.0.0.1", max_inflight=1, max_body_bytes=10), key_file(tmp_path, b"cluster")
    )
    assert front.max_inflight > 10**9 and front.max_body_bytes > 10**9 and front.host == "10.0.0.1"
    service = FakeService(folder, plays([EOS]), role="decode")
    options = {"api_key_file": front.api_key_file, "admin_key_file": front.admin_key_file}
    for path in (CHAT, "/admin/drain"):
        assert (await ask(service, "POST", path, json=BODY, headers=LEG, options=options)).status_code == 401
    headers = {**LEG, "Authorization": "Bearer cluster"}
    assert (await ask(service, "POST", COMPLETIONS, json=BODY, headers=headers, options=options)).status_code == 200


# clients that leave


async def drive(app, path, *, receive, headers=(), sent=None):
    """One request at the level of ASGI; what was sent."""
    sent = [] if sent is None else sent

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": path, "headers": list(headers), "query_string": b"", "http_version": "1.1",
    }  # fmt: skip
    await app(scope, receive, send)
    return sent


@pytest.mark.parametrize("role", ["standalone", "decode", "prefill"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_leaves_ends_its_request(folder, role, stream, num_tokens, n):
    gone, reached = asyncio.Event(), asyncio.Event()

    async def script(request):
        async for delta in plays([300, 301, 302, 303])(request):
            if num_tokens:
                yield delta
            if num_tokens < 1 or delta.tokens[0].token_id == 300 + num_tokens - 1:
                reached.set()
                await asyncio.Event().wait()

    service = FakeService(folder, script, role=role)
    metrics = Metrics(role=role, instance="x")
    gate = Gate()
    app = make_app(service, metrics=metrics, gate=gate)
    body = iter([{"type": "http.request", "body": json.dumps({**BODY, "stream": stream, "n": n}).encode()}])

    async def receive():
        for message in body:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    headers = [(name.lower().encode(), value.encode()) for name, value in LEG.items()]
    task = asyncio.create_task(drive(app, COMPLETIONS, receive=receive, headers=headers))
    await reached.wait()
    await settle()
    assert service.num_running == n and gate.num_open == 1
    gone.set()
    sent = await asyncio.wait_for(task, 10.0)
    assert service.num_running == 0 and gate.num_open == 0
    has_begun = stream and num_tokens and role != "prefill"
    assert [m["type"] for m in sent][:1] == (["http.response.start"] if has_begun else [])
    assert not any(b"[DONE]" in m.get("body", b"") or b"error" in m.get("body", b"") for m in sent)
    assert b'outcome="cancelled"' in metrics.render() and b'from="client"' in metrics.render()
    assert b'status="499"' in metrics.render()


async def test_a_client_that_leaves_while_it_sends(folder):
    async def receive():
        return {"type": "http.disconnect"}

    metrics = Metrics(role="standalone", instance="s0")
    assert await drive(make_app(FakeService(folder, plays([EOS])), metrics=metrics), CHAT, receive=receive) == []
    assert b'status="499"' in metrics.render()


async def test_a_stop_string_closes_the_engines_side_before_the_last_chunk(folder):
    text = TextProcessor.load(folder)
    service = FakeService(folder, plays([*text.encode("one STOP two three"), EOS]))
    seen = []
    body = iter([{"type": "http.request", "body": json.dumps({"prompt": "x", "stop": "STOP", "stream": True}).encode()}])

    async def receive():
        for message in body:
            return message
        return await asyncio.Event().wait()

    async def send(message):
        if b'"finish_reason":"stop"' in message.get("body", b""):
            seen.append(service.num_running)

    scope = {
        "type": "http",
        "method": "POST",
        "path": COMPLETIONS,
        "headers": [],
        "query_string": b"",
        "http_version": "1.1",
    }
    await make_app(service)(scope, receive, send)
    assert seen == [0]
