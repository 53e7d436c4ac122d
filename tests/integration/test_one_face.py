"""Every route answers the same through the balancer and at a standalone server, to the byte where no id, time or name is.

The two are asked one after the other with the same bytes and the same request id; real processes behind both.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx

from longcat_pd import log
from longcat_pd.config import resolve
from longcat_pd.config.schema import LoadBalancerConfig
from longcat_pd.tiny.make import write_tiny
from tests.contract import Contract
from tests.topology import cluster_file, pools, standalone

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CLIENT, ADMIN = "key-of-a-client-é", "key-of-the-operator"
NAME = "longcat/tiny"
CONTRACT = Contract()
MAX_BODY = 4096

# what may differ: when it was made, and the layout that made it; the request id is given, so the ids made of it are equal
ITS_OWN = (
    (rb'"created":\d+', b'"created":0'),
    (rb'"system_fingerprint":"fp_[0-9a-f]{8}"', b'"system_fingerprint":"fp"'),
    (rb'"ms":\d+', b'"ms":0'),
    (rb'"pair":\["[^"]*","[^"]*"\]', b'"pair":[]'),
)
HEADERS_OF_TRANSPORT = {"date", "server", "content-length"}  # the length follows from the body, which is compared


class Asked(NamedTuple):
    """One request, as it is sent to both."""

    method: str
    path: str
    headers: Mapping[str, str] = MappingProxyType({})
    content: bytes | None = None

    def __str__(self) -> str:
        return f"{self.method} {self.path} {dict(self.headers)} {(self.content or b'')[:200]!r}"


def body(path: str, _headers: dict[str, str] | None = None, **fields: Any) -> Asked:
    return Asked("POST", path, {"Content-Type": "application/json", **(_headers or {})}, json.dumps(fields).encode())


def raw(path: str, content: bytes, **headers: str) -> Asked:
    return Asked("POST", path, {"Content-Type": "application/json", **headers}, content)


def ids(**fields: Any) -> Asked:
    return body(COMPLETIONS, prompt=[5, 6, 7, 8, 9], temperature=0, max_tokens=6, ignore_eos=True, **fields)


def chat(**fields: Any) -> Asked:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "你好 hello"}]
    return body(CHAT, **{"messages": messages, "temperature": 0, "max_tokens": 6, **fields})


STREAM = {"stream": True}
FOREIGN = {  # what a balancer says to workers; of a client it means nothing
    "X-Longcat-Transfer-Id": "0" * 32,
    "X-Longcat-Peer": "d9",
    "X-Longcat-Deadline-Ms": "1",
    "X-Longcat-Attempt": "2",
    "X-Longcat-Failover": "resume",
    "X-Longcat-Cause": "self",
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

GOOD = [
    ids(),
    ids(logprobs=3, return_token_ids=True),
    ids(n=2, seed=4),
    ids(priority=-7),
    body(COMPLETIONS, FOREIGN, prompt=[5, 6, 7], max_tokens=3, temperature=0, ignore_eos=True),
    body(COMPLETIONS, FOREIGN, prompt=[5, 6, 7], max_tokens=3, temperature=0, ignore_eos=True, stream=True),
    body(
        COMPLETIONS,
        prompt=["a long river", [5, 6, 7], "hello"],
        n=2,
        seed=4,
        max_tokens=5,
        return_token_ids=True,
        logprobs=1,
    ),
    body(COMPLETIONS, prompt="a long river", max_tokens=8, temperature=0, stop=["e", "a"], include_stop_str_in_output=True),
    body(COMPLETIONS, prompt="a long river", max_tokens=8, seed=-3, temperature=1.5, top_p=0.9, top_k=50),
    ids(**STREAM),
    ids(**STREAM, stream_options={"include_usage": True}, return_token_ids=True, logprobs=0),
    ids(**STREAM, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    ids(**STREAM, stream_options={}),
    chat(),
    chat(logprobs=True, top_logprobs=2),
    chat(**STREAM),
    chat(**STREAM, tools=[TOOL], stop=["e", "zz"], model=NAME, logprobs=True),
    chat(enable_thinking=True, separate_reasoning=False, user="someone", metadata={"a": 1}),
    chat(max_completion_tokens=2, bootstrap_host="10.0.0.1"),
    body("/tokenize", prompt="你好 hello"),
    body("/tokenize", prompt="hello", add_special_tokens=False),
    body("/tokenize", messages=[{"role": "user", "content": "hello"}]),
    body("/tokenize", messages=[{"role": "user", "content": "hello"}], tools=[TOOL], enable_thinking=True, model=NAME),
    body("/tokenize", messages=[{"role": "user", "content": "x"}], add_special_tokens=False, reasoning_effort="none"),
    body("/detokenize", tokens=[5, 60, 700]),
    body("/flush_cache"),
    Asked("POST", "/flush_cache"),
    Asked("GET", "/health"),
    Asked("GET", "/health_generate"),
    Asked("GET", "/v1/models"),
    Asked("GET", f"/v1/models/{NAME}"),
    Asked("GET", "/model_info"),
    Asked("GET", "/openapi.json"),
]

# "/" is a page at the balancer alone.
REFUSED = [
    *(
        Asked("GET", path) for path in ("/nothing", "/health/", "/docs", "/v1", "/v1/models/other")
    ),  # "/" is the status page of a balancer
    *(Asked("POST", path) for path in ("/health", "/ready", "/metrics", "/v1/models", "/server_info", "/v1/models/x")),
    *(Asked(method, path) for method in ("GET", "DELETE", "OPTIONS") for path in (CHAT, "/tokenize", "/flush_cache")),
    *(raw(path, b"{") for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize")),
    *(raw(path, b"[1]") for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize")),
    *(raw(path, b" " * (MAX_BODY + 1)) for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize")),
    *(Asked("POST", path) for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize")),
    *(
        raw(path, b"{}", **{name: value})
        for path in (CHAT, "/tokenize")
        for name, value in (
            ("Content-Type", "application/x-www-form-urlencoded"),
            ("Content-Type", "application/json; charset=latin-1"),
            ("Content-Encoding", "gzip"),
            ("X-Request-Timeout", "soon"),
            ("X-Request-Timeout", "0"),
        )
    ),
    raw(COMPLETIONS, b'{"prompt": "\\ud800"}'),
    raw(COMPLETIONS, b'{"prompt": "x", "temperature": NaN}'),
    raw(COMPLETIONS, b'{"prompt": "\xff"}'),
    raw(COMPLETIONS, b'{"prompt": ' + b"[" * 70 + b"]" * 70 + b"}"),
    ids(model="gpt-4"),
    ids(**STREAM, best_of=2),
    ids(min_tokens=7),
    ids(logit_bias={"999999": 1}),
    ids(min_tokens="2"),
    ids(echo=True),
    body(COMPLETIONS),
    body(COMPLETIONS, prompt=[]),
    body(COMPLETIONS, prompt=""),
    body(COMPLETIONS, prompt=[999999]),
    body(COMPLETIONS, prompt=["a", ""]),
    body(COMPLETIONS, prompt=["a", [5, 999999]]),
    body(COMPLETIONS, prompt=["a", 5]),
    body(COMPLETIONS, prompt=["a"] * 33, n=2),
    body(COMPLETIONS, prompt=["a", "b", [5] * 600]),
    ids(priority=101),
    body(COMPLETIONS, prompt=[5], stop_token_ids=[999999]),
    body(COMPLETIONS, prompt=[5], max_tokens=5000),
    body(COMPLETIONS, prompt=[5], max_tokens=5000, **STREAM),
    chat(temperature=3),
    chat(messages=[]),
    chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
    chat(tool_choice="required"),
    chat(tools=[TOOL], response_format={"type": "json_object"}),
    chat(response_format={"type": "json_schema", "json_schema": {}}),
    chat(response_format={"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}),
    body("/tokenize"),
    body("/tokenize", prompt=5),
    body("/detokenize", tokens=["a"]),
    body("/detokenize", tokens=[999999]),
    body("/detokenize", tokens=[-1]),
    body("/detokenize", tokens=[5], model="other"),
    body("/tokenize", prompt="x", model="other"),
    body("/tokenize", messages=[{"role": "robot", "content": "x"}]),
    body("/detokenize"),
]

TOKENIZED: list[dict[str, Any]] = [
    {"prompt": "你好 hello"},
    {"messages": [{"role": "user", "content": "hello"}]},
    {"messages": [{"role": "user", "content": "hello"}], "tools": [TOOL]},
    {"messages": [{"role": "user", "content": "hello"}], "tools": [TOOL], "tool_choice": "none"},
    {"messages": [{"role": "user", "content": "hello"}], "chat_template_kwargs": {"enable_thinking": True}},
]

KEYED = [ids(), chat(), body("/tokenize", prompt="x"), *(Asked("GET", path) for path in ("/v1/models", "/server_info"))]
WRONG_KEYS = (b"Bearer wrong", b"Bearer", b"Basic abc", "Bearer schlüssel".encode(), b"Bearer " + b"k" * 8000)

ADMIN_ROUTES = [
    raw("/admin/drain", b"{"),
    raw("/admin/drain", b"[]"),
    body("/admin/drain", instance=7),
    Asked("GET", "/admin/drain"),
    Asked("POST", "/admin/undrain"),
    body("/admin/drain"),
    Asked("POST", "/admin/drain"),
    ids(),
    ids(**STREAM),
    body("/admin/undrain"),
    ids(),
]


class Both(NamedTuple):
    """A balancer's client and a standalone server's."""

    balancer: httpx.AsyncClient
    alone: httpx.AsyncClient

    async def compare(self, asked: Asked, *, key: str | bytes = CLIENT) -> httpx.Response:
        """Ask both; the balancer's answer, once it is found equal."""
        headers: list[tuple[str, str | bytes]] = [("X-Request-Id", "asked-twice"), *asked.headers.items()]
        if key:
            headers.append(("Authorization", b"Bearer " + key.encode() if isinstance(key, str) else key))
        found, expected = [
            await client.request(asked.method, asked.path, content=asked.content, headers=headers) for client in self
        ]
        assert found.status_code == expected.status_code, f"{asked}: {found.text} {expected.text}"
        assert _told(found) == _told(expected), str(asked)
        assert _headers(found) == _headers(expected), str(asked)
        assert found.headers["x-request-id"] == "asked-twice"
        CONTRACT.check(asked.method, asked.path, status=found.status_code, headers=found.headers, content=found.content)
        return found


async def _fingerprint(client: httpx.AsyncClient) -> str:
    """It is the same for every answer of one layout, and another for another."""
    auth = {"Authorization": f"Bearer {CLIENT}".encode()}
    found = {
        (await client.post(asked.path, content=asked.content, headers=auth)).json()["system_fingerprint"]
        for asked in (ids(), chat())
    }
    assert len(found) == 1
    return str(found.pop())


def _bytes(answer: httpx.Response) -> bytes:
    content = answer.content
    for pattern, replacement in ITS_OWN:
        content = re.sub(pattern, replacement, content)
    return content


def _told(answer: httpx.Response) -> bytes | list[Any]:
    """The body; of a stream its events, those that bring text joined: tokens can come together in one event or apart."""
    content = _bytes(answer)
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        return content
    told: list[Any] = []
    for event in content.decode().removesuffix("\n\n").split("\n\n"):
        data = json.loads(event.removeprefix("data: ")) if event.startswith("data: {") else event
        if told and _brings_text(told[-1]) and _brings_text(data):
            data = _joined(told.pop(), data)
        told.append(data)
    return told


def _brings_text(event: Any) -> bool:
    choices = event.get("choices") if isinstance(event, dict) else None
    return bool(choices) and choices[0]["finish_reason"] is None and bool({"text", "content"} & {*_holder(choices[0])})


def _holder(choice: dict[str, Any]) -> dict[str, Any]:
    return dict(choice.get("delta", choice))


def _joined(first: Any, second: Any, name: str = "") -> Any:
    """Two events as one: texts and lists one behind the other, of everything else (usage so far) the later."""
    if isinstance(first, dict) and isinstance(second, dict):
        return {key: _joined(first.get(key), second.get(key), key) for key in {**first, **second}}
    if name == "choices":
        return [_joined(first[0], second[0])]
    if isinstance(first, list) and isinstance(second, list):
        return first + second
    if name in ("text", "content") and isinstance(first, str) and isinstance(second, str):
        return first + second
    return first if second is None else second


def _headers(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name not in HEADERS_OF_TRANSPORT}


async def test_what_a_route_answers_is_the_same_at_both(tmp_path: Path) -> None:
    model, lines = tmp_path / "model", io.StringIO()
    write_tiny(model, "2.0", dtype="float32")
    for name, key in (("client", CLIENT), ("admin", ADMIN)):
        (tmp_path / name).write_text(f"\nanother\n{key}\n", encoding="utf-8")
    limits: dict[str, Any] = {
        "api_key_file": str(tmp_path / "client"),
        "admin_key_file": str(tmp_path / "admin"),
        "max_body_bytes": MAX_BODY,
    }
    path = cluster_file(tmp_path, model)
    settings = [f"load_balancer.{name}={value}" for name, value in limits.items()]
    common = ["model.dtype=float32", f"model.served_name={NAME}"]
    log.set_up(stream=lines)
    async with (
        pools(resolve.load(path, [*settings, *common])) as pair,
        standalone(model, *common, front=LoadBalancerConfig(**limits)) as alone,
    ):
        both = Both(pair.client, alone.client)
        for asked in GOOD:
            answer = await both.compare(asked)
            assert answer.status_code == 200, f"{asked}: {answer.text}"
        times = []
        for asked in REFUSED:
            answer = await both.compare(asked)
            times.append(answer.elapsed.total_seconds())
            assert 400 <= answer.status_code < 500 and answer.status_code != 422, str(asked)
            assert sorted(answer.json()["error"]) == ["code", "message", "param", "type"], str(asked)
        assert min(times) < 0.1, "what is wrong is told at once"
        for asked in KEYED:
            assert (await both.compare(asked, key="")).json()["error"]["code"] == "missing_api_key"
            for wrong in WRONG_KEYS:
                assert (await both.compare(asked, key=wrong)).json()["error"]["code"] == "invalid_api_key"
            assert (await both.compare(asked, key=ADMIN)).status_code == 401
        for fields in TOKENIZED:
            told = await both.compare(body("/tokenize", **fields))
            counted = await both.compare(
                body(CHAT if "messages" in fields else COMPLETIONS, max_tokens=1, temperature=0, **fields)
            )
            assert told.json()["count"] == counted.json()["usage"]["prompt_tokens"] == len(told.json()["tokens"]), fields
        assert len({await _fingerprint(client) for client in both}) == 2
        for name in ("/health", "/health_generate", "/openapi.json"):
            assert (await both.compare(Asked("GET", name), key="")).status_code == 200
        statuses = [(await both.compare(asked, key=ADMIN if "admin" in asked.path else CLIENT)).status_code
                    for asked in ADMIN_ROUTES]  # fmt: skip
        assert statuses == [400, 400, 400, 405, 202, 202, 202, 503, 503, 202, 200]
        pair.client.headers = httpx.Headers({"authorization": f"Bearer {CLIENT}".encode()})
        for asked in (ids(), ids(**STREAM)):
            headers = {**asked.headers, "X-Request-Id": "seen-by-all"}
            assert (await pair.client.post(asked.path, content=asked.content, headers=headers)).status_code == 200
        await pair.idle_within()
    assert not any(key in lines.getvalue() for key in (CLIENT, ADMIN, "schlüssel", "hello", "你好"))
    seen = [line for line in lines.getvalue().splitlines() if "seen-by-all" in line and "request_finished" in line]
    assert len(seen) == 6 and all("pair=p0,d0" in line for line in seen), "a balancer, P and D, of two requests"
    assert "0" * 32 not in lines.getvalue(), "nothing is keyed by what a client says"
