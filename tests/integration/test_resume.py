"""An answer that breaks off behind any step and goes on in another engine is the undisturbed one: each field by itself and
all together, with drafts here and none there.

The engines answer legs, but encode their prompts themselves: what a prefill and a decode instance do of it in one process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from longcat_pd.config.schema import LoadBalancerConfig
from longcat_pd.metrics import Metrics
from longcat_pd.server.checked_face import checked_face
from longcat_pd.server.envelope import dress
from longcat_pd.server.gate import Gate
from longcat_pd.server.legs import generation_routes
from longcat_pd.server.openai import CHAT_ROUTE, COMPLETIONS_ROUTE
from longcat_pd.server.service import Service
from longcat_pd.server.text import TextProcessor
from longcat_pd.tiny.make import write_tiny
from tests.answer_parts import differences
from tests.inline_server import Asked, InlineServer, inline_server
from tests.integration.test_structured import ENDS
from tests.resumption import IDS, RESUME, Told, changed, read_plain, read_told, steady_parts
from tests.unit.fake_service import LEG

NUM_DRAFTS, NUM_NEW = 3, 12
SOME = 2
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "sizes": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "sizes"],
}
BOUND = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
NARROW = {str(token): 30 for token in range(100, 106)}  # nothing else is said, so ids come again and again
PENALTIES = {"frequency_penalty": 0.7, "presence_penalty": -0.4, "repetition_penalty": 1.4}
DRAWN = {"temperature": 0.9, "seed": -5}

COMPLETIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.0},  # the server draws the seed
    {**DRAWN, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "logprobs": 0},
    {"temperature": 0, "logit_bias": NARROW, **PENALTIES},
    {**DRAWN, "logit_bias": {**NARROW, "2": 20}, **PENALTIES, "min_tokens": 7, "logprobs": 1},
    {**DRAWN, "logit_bias": {"2": 100}, "min_tokens": 6},
    {**DRAWN, "logit_bias": {"2": 4}, "ignore_eos": True},
    {"temperature": 0, "stop": ["e", "ou"], "min_tokens": 9, "logprobs": 1},
    {"temperature": 0, "response_format": BOUND, "max_tokens": 28},
    {**DRAWN, "response_format": BOUND, **PENALTIES, "min_tokens": 9, "max_tokens": 28, "logprobs": 1},
)
CHATS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "enable_thinking": True, "logprobs": True, "top_logprobs": 2},
    {**DRAWN, "enable_thinking": True, "separate_reasoning": False, "stop": ["zzzz", "e"]},
    {**DRAWN, "tools": [TOOL], "tool_choice": "required", "max_tokens": 28},
    {**DRAWN, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 28, **PENALTIES},
    {**DRAWN, "enable_thinking": True, "response_format": BOUND, "max_tokens": 28, "logprobs": True},
)

Servers = Mapping[int, InlineServer]

some_or_every = pytest.mark.parametrize("share", [1, pytest.param(2, marks=pytest.mark.slow)])


def leg_app(service: Service, text: TextProcessor, metrics: Metrics, *, gate: Gate, front: LoadBalancerConfig) -> FastAPI:
    """The routes of a decode instance, over any."""
    face = checked_face(service, text, gate=gate, metrics=metrics.requests)
    posts = generation_routes(face, "decode", front=front, metrics=metrics.http)
    app = FastAPI(openapi_url=None)
    for path, endpoint in posts.items():
        app.add_api_route(path, endpoint, methods=["POST"])
    dress(app, metrics.http, paths=(*posts,), is_worker=True)
    return app


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny(folder, "2.0+predictable", dtype="float32")
    return folder


@pytest.fixture(scope="module")
def servers(model: Path) -> Iterator[Servers]:
    """By drafts; that with drafts finds prefixes, also those that an answer has left."""
    settings = {0: ("engine.prefix_cache=false",), NUM_DRAFTS: (f"engine.num_draft_tokens={NUM_DRAFTS}",)}
    with ExitStack() as stack:
        yield {n: stack.enter_context(inline_server(model, *more, app_of=leg_app)) for n, more in settings.items()}


@pytest.fixture(scope="module")
def bias(model: Path) -> dict[str, float]:
    """Towards an end of what a grammar has opened."""
    tokenizer = TextProcessor.load(str(model)).need_tokenizer("x")
    return {str(tokenizer.token_to_id(text)): value for text, value in ENDS.items()}


def asked_of(case: dict[str, Any], bias: dict[str, float]) -> Asked:
    bound = {"logit_bias": bias} if "response_format" in case or "tools" in case else {}
    fields = {"max_tokens": NUM_NEW, "return_token_ids": True, **bound, **case}
    if case in CHATS:
        return Asked(CHAT_ROUTE, {"messages": HELLO, **fields})
    return Asked(COMPLETIONS_ROUTE, {"prompt": [40, 41, 102, 103, 300], **fields})


def told_of(server: InlineServer, asked: Asked) -> Told:
    (answer,) = server.post(asked, headers={**LEG, **IDS})
    return read_told(answer.content, is_stream=bool(asked.fields.get("stream")))


def cuts(told: Told, first: int, share: int) -> list[int]:
    """Places to break at, the first and the last among them: every one, or some."""
    last = len(told.groups)
    assert last >= first, "there is something to cut"
    return sorted({*range(first, last + 1, 1 if share > 1 else max((last - first) // SOME, 1)), last})


def answered(server: InlineServer, told: Told, asked: Asked, places: list[int]) -> list[bytes]:
    """What goes on behind so many groups; the fingerprint is that of the engine that has begun."""
    resumed = [Asked(asked.route, told.resumed(asked.fields, place)) for place in places]
    answers = server.post(*resumed, headers={**LEG, **RESUME})
    own = read_any(answers[0].content)["system_fingerprint"]
    begun = told.ending[0]["system_fingerprint"]
    assert own != begun, "drafts are part of it"
    return [answer.content.replace(own.encode(), begun.encode()) for answer in answers]


def read_any(content: bytes) -> dict[str, Any]:
    """The first record."""
    first: dict[str, Any] = json.loads(content.removeprefix(b"data: ").split(b"\n")[0])
    return first


@some_or_every
@pytest.mark.parametrize("case", [*COMPLETIONS, *CHATS], ids=lambda case: "-".join(case))
def test_a_stream(servers: Servers, bias: dict[str, float], case: dict[str, Any], share: int) -> None:
    usage = {"include_usage": True, "continuous_usage_stats": True}
    asked = asked_of(case, bias).having(stream=True, stream_options=usage)
    for begun, continued in ((0, NUM_DRAFTS), (NUM_DRAFTS, 0)):
        told = told_of(servers[begun], asked)
        places = cuts(told, 1, share)
        for cut, content in zip(places, answered(servers[continued], told, asked, places), strict=True):
            rest = read_plain(content)
            found = changed(told.events(cut) + rest, told.all_events)
            assert found - {"usage"} == set(), f"behind {told.ids(cut)}"
            assert counts(rest) == counts(told.all_events)


def counts(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the last chunk, without what the prefix cache of an instance has spared it."""
    usage: dict[str, Any] = events[-1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


@some_or_every
@pytest.mark.parametrize("case", [*COMPLETIONS[:5:2], *CHATS[1:3]], ids=lambda case: "-".join(case))
def test_a_whole_answer(servers: Servers, bias: dict[str, float], case: dict[str, Any], share: int) -> None:
    asked = asked_of(case, bias)
    for begun, continued in ((0, NUM_DRAFTS), (NUM_DRAFTS, 0)):
        told = told_of(servers[begun], asked)
        (answer,) = told.ending
        assert case.get("logprobs") is None or told.ids(len(told.groups)) == []
        for content in answered(servers[continued], told, asked, cuts(told, 0, share)):
            found = json.loads(content)
            assert differences(steady_parts(found), steady_parts(answer)) - {"usage"} == set()
            assert counts([found]) == counts([answer])


def test_what_it_began_with_counts(servers: Servers) -> None:
    """The seed and the time, which the body does not say; not what the engine would draw, nor the clock."""
    asked = Asked(COMPLETIONS_ROUTE, {"prompt": "once", "max_tokens": 8, "temperature": 2, "return_token_ids": True})
    told = told_of(servers[0], asked)
    told.origin["created"] = 12345
    (found,) = servers[0].post(Asked(asked.route, told.resumed(asked.fields, 1)), headers={**LEG, **RESUME})
    assert found.json()["created"] == 12345
    assert found.json()["choices"] == told.ending[0]["choices"]
    told.origin["seed"] ^= 1
    (found,) = servers[0].post(Asked(asked.route, told.resumed(asked.fields, 1)), headers={**LEG, **RESUME})
    assert found.json()["choices"] != told.ending[0]["choices"]


def test_another_prompt_is_not_gone_on_with(servers: Servers) -> None:
    asked = Asked(COMPLETIONS_ROUTE, {"prompt": [5, 6], "max_tokens": 4, "return_token_ids": True})
    told = told_of(servers[0], asked)
    other = Asked(asked.route, told.resumed({**asked.fields, "prompt": [5, 7]}, 1))
    (answer,) = servers[0].responses(other, headers={**LEG, **RESUME})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "worker_unavailable")
    assert told.origin["prompt_digest"] in error["message"]


def test_a_field_of_a_client_is_nothing(servers: Servers) -> None:
    """Without the header it is an unknown key, whatever it holds."""
    asked = Asked(COMPLETIONS_ROUTE, {"prompt": [5, 6], "max_tokens": 4, "return_token_ids": True, "temperature": 0})
    plain, other = servers[0].post(asked, asked.having(resume={"token_ids": "x"}), headers=LEG)
    assert json.loads(plain.content)["choices"] == json.loads(other.content)["choices"]
