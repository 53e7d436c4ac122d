"""The OpenAPI document says what the readers read, what the routes are and what is answered, and no more."""

# ruff: noqa: E501 - tables

import json
import re
from dataclasses import replace
from pathlib import Path

import httpx
import jsonschema
import pytest

from longcat_pd.errors import LongcatError
from longcat_pd.load_balancer.face import Keys
from longcat_pd.server.errors import to_json
from longcat_pd.server.fields import Fields
from longcat_pd.server.intake import KeyRing
from longcat_pd.server.openai import CHAT_ROUTE, COMPLETIONS_ROUTE, INERT, READERS, decode_body, read_body
from longcat_pd.server.openapi import document
from longcat_pd.server.openapi_answers import STATUSES, errors_of
from longcat_pd.server.openapi_bodies import WITHOUT_EFFECT
from longcat_pd.server.openapi_examples import ANSWERS, REQUESTS, STREAMS
from longcat_pd.server.text_bodies import TEXT_READERS
from tests.balancer_rig import Rig
from tests.contract import Contract, event_schema, events, fields
from tests.mutations import Mutator
from tests.unit.fake_service import EOS, FakeService, make_app, plays, write_folder

NAME = "tiny"
CONTRACT = Contract()
READ = [CHAT_ROUTE, COMPLETIONS_ROUTE, "/tokenize", "/detokenize"]
RELATIONS = {  # what a schema cannot say: relations between fields, and texts inside of texts
    ("model_not_found", "model"),
    ("invalid_value", "min_tokens"),  # > max_tokens
    ("invalid_value", "top_logprobs"),  # without logprobs
    ("invalid_value", "prompt"),  # prompts x n
    ("unsupported_parameter", "best_of"),  # > n
    ("invalid_value", "tools[].function.name"),  # twice
    ("invalid_value", "tool_choice"),  # required without tools
    ("invalid_value", "tool_choice.function.name"),  # not among the tools
    ("invalid_value", "messages[].tool_calls[].function.arguments"),  # a JSON text
    ("unsupported_combination", "response_format"),
}


def read(path, body):
    return TEXT_READERS[path](body, NAME) if path in TEXT_READERS else read_body(path, body, NAME)


def refusal(path, body):
    """(code, param) of what the reader does not accept, without the numbers; None for what it does."""
    try:
        read(path, body)
    except LongcatError as error:
        return error.code, re.sub(r"\[\d+\]", "[]", error.param or "")
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model"))


# ---------------------------------------------------------------------- the document itself


def test_every_schema_is_one_and_every_reference_leads_somewhere():
    whole = CONTRACT.document
    for schema in whole["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for target in re.findall(r'"\$ref": "([^"]+)"', json.dumps(whole)):
        assert CONTRACT.resolve({"$ref": target})
    used = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(whole)))
    assert whole["components"]["schemas"].keys() <= used
    operations = CONTRACT.operations.values()
    parameters = [CONTRACT.resolve(given) for operation in operations for given in operation.get("parameters", ())]
    assert all(given["in"] == "query" or "allowReserved" not in given for given in parameters)  # else not OpenAPI 3.1
    names = [operation["operationId"] for operation in operations]
    assert len(names) == len(set(names))


OF_THE_PAGE = {("GET", "/"), ("GET", "/status"), ("GET", "/status/events")}  # the balancer's own, for people


def routes_of(app):
    named = ((method, route.path) for route in app.routes for method in route.methods - {"HEAD"})
    return {(method, path.replace(":path}", "}")) for method, path in named}


@pytest.mark.parametrize("keyed", [False, True])
async def test_it_has_the_routes_of_both_servers_and_is_the_same_at_both(folder, tmp_path, keyed):
    (tmp_path / "key").write_text("k\n")
    files = {f"{name}_key_file": str(tmp_path / "key") for name in ("api", "admin")} if keyed else {}
    ring = KeyRing([b"k"])
    alone = make_app(FakeService(folder, plays([EOS])), **files)
    rig = await Rig.make(keys=Keys(client=ring, admin=ring) if keyed else None)
    expected = document(has_keys=keyed, has_admin_keys=keyed)
    assert routes_of(alone) == routes_of(rig.app) - OF_THE_PAGE == set(Contract(expected).operations)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(alone), base_url="http://face") as client:
        for client_key in ({}, {"authorization": "Bearer k"}):
            found = await client.get("/openapi.json", headers=client_key)
            assert found.content == (await rig.get("/openapi.json")).body == to_json(expected)
        guarded = {key for key, operation in Contract(expected).operations.items() if "security" in operation}
        for method, path in routes_of(alone):
            answer = await client.request(method, path.replace("{model_id}", NAME))
            assert (answer.status_code == 401) == ((method, path) in guarded), path


async def test_workers_have_no_document(folder):
    for role in ("prefill", "decode"):
        app = make_app(FakeService(folder, plays([EOS]), role=role))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://face") as client:
            assert (await client.get("/openapi.json")).status_code == 404


# ---------------------------------------------------------------------- bodies


class Recorded(dict):
    """A JSON object that notes which of its fields are asked for."""

    def __init__(self, values, path, asked):
        super().__init__({name: _recorded(v, f"{path}.{name}" if path else name, asked) for name, v in values.items()})
        self._path, self._asked = path, asked

    def get(self, name, default=None):
        self._asked.add(f"{self._path}.{name}" if self._path else name)
        return super().get(name, default)


def _recorded(value, path, asked):
    if isinstance(value, list):
        return [_recorded(v, f"{path}[]", asked) for v in value]
    return Recorded(value, path, asked) if isinstance(value, dict) else value


def test_every_field_that_is_read_is_described_and_the_other_way_round():
    for path in (CHAT_ROUTE, COMPLETIONS_ROUTE):
        asked: set[str] = set()
        for body in REQUESTS[path].values():
            READERS[path](Fields(Recorded(body, "", asked)), NAME)
        asked -= {f"logit_bias.{token_id}" for token_id in range(10)}
        described = set(fields(CONTRACT, CONTRACT.body_schema(path)))
        assert asked <= described
        assert described - asked == {*WITHOUT_EFFECT, *INERT} - asked


@pytest.mark.parametrize("path", [*READ, "/admin/drain", "/admin/undrain"])
def test_every_example_is_described_and_accepted(path):
    for name, body in REQUESTS[path].items():
        assert CONTRACT.accepts(path, body), name
        if path in READ:
            assert refusal(path, body) is None, name


@pytest.mark.parametrize("path", READ)
def test_the_document_and_the_reader_judge_alike(path):
    """Bodies that are almost right: what the one refuses the other refuses, and what is accepted is the same."""
    names = sorted({name for name in fields(CONTRACT, CONTRACT.body_schema(path)) if not set(name) & set(".[")})
    mutator = Mutator(path, names, 1)
    judged = {True: 0, False: 0}
    for _ in range(2000):
        try:
            body = decode_body(json.dumps(mutator.body()).encode())
        except LongcatError:
            continue
        is_described, refused = CONTRACT.accepts(path, body), refusal(path, body)
        assert is_described or refused is not None, body
        assert refused is None or not is_described or refused in RELATIONS, (refused, body)
        judged[is_described] += 1
    assert min(judged.values()) > 100


def variants(schema):
    """A schema's alternatives, each alone."""
    node = CONTRACT.resolve(schema)
    for part in node.get("anyOf", [node]):
        yield from variants(part) if part is not node else [node]


@pytest.mark.parametrize("path", [CHAT_ROUTE, COMPLETIONS_ROUTE])
def test_bounds_are_where_the_document_has_them(path):
    base = {"max_tokens": 100, "n": 8, **next(iter(REQUESTS[path].values()))}
    base |= {"logprobs": True} if path == CHAT_ROUTE else {"prompt": [5]}
    num_bounds = 0
    for name, schema in CONTRACT.resolve(CONTRACT.body_schema(path))["properties"].items():
        for node in variants(schema):
            for key, step in (("minimum", -1), ("exclusiveMinimum", 0), ("maximum", 1)):
                if key not in node:
                    continue
                num_bounds += 1
                inside, outside = node[key] + (1e-9 if key == "exclusiveMinimum" else 0), node[key] + step
                assert refusal(path, {**base, name: inside}) is None, name
                assert refusal(path, {**base, name: outside}) == (
                    ("unsupported_parameter", name) if name == "best_of" and step == 1 else ("invalid_value", name)
                )
            if "maxItems" in node and name in ("stop", "stop_token_ids"):
                item = "a" if name == "stop" else 3
                assert refusal(path, {**base, name: [item] * node["maxItems"]}) is None
                assert refusal(path, {**base, name: [item] * (node["maxItems"] + 1)}) == ("invalid_value", name)
                num_bounds += 1
    assert num_bounds > 25


# ---------------------------------------------------------------------- the page for client authors


def test_the_page_names_every_route_field_and_code():
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w-]+", page))
    for path in (CHAT_ROUTE, COMPLETIONS_ROUTE):
        assert set(CONTRACT.resolve(CONTRACT.body_schema(path))["properties"]) <= named
    for status in STATUSES:
        assert set(errors_of(status)[1]) <= named, status
    for _, path in CONTRACT.operations:
        assert path.replace("{model_id}", "{id}") in page or path.rpartition("/")[2] in named, path
    assert set(CONTRACT.document["components"]["headers"]) - {"WWW-Authenticate"} <= named


# ---------------------------------------------------------------------- answers


def test_answers_that_are_shown_are_as_described():
    for path, answers in ANSWERS.items():
        content = CONTRACT.operations["POST", path]["responses"]["200"]["content"]
        for name, answer in answers.items():
            CONTRACT.judge(content["application/json"]["schema"]).validate(answer)
            assert content["application/json"]["examples"][name]["value"] == answer
    for path, stream in STREAMS.items():
        described = CONTRACT.operations["POST", path]["responses"]["200"]["content"]["text/event-stream"]
        for event in events(stream):
            CONTRACT.judge(event_schema(described)).validate(json.loads(event))
        assert stream.endswith("data: [DONE]\n\n")


BODIES = [
    (CHAT_ROUTE, {"messages": [{"role": "user", "content": "hi"}]}),
    (CHAT_ROUTE, {"messages": [{"role": "user", "content": "hi"}], "enable_thinking": True, "logprobs": True, "top_logprobs": 2}),
    (CHAT_ROUTE, {"messages": [{"role": "user", "content": "hi"}], "n": 2, "return_token_ids": True, "stop": "a"}),
    (COMPLETIONS_ROUTE, {"prompt": "hi"}),
    (COMPLETIONS_ROUTE, {"prompt": [5, 6], "logprobs": 2, "return_token_ids": True, "stop_token_ids": [60], "n": 2}),
    ("/tokenize", {"prompt": "hi"}),
    ("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/detokenize", {"tokens": [5, 60]}),
    ("/flush_cache", {}),
    (CHAT_ROUTE, {"messages": []}),
    (CHAT_ROUTE, {"messages": [{"role": "user", "content": "hi"}], "model": "other"}),
    (COMPLETIONS_ROUTE, {"prompt": [5], "max_tokens": 4096}),
]  # fmt: skip
OPTIONS = [None, {}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]


async def test_what_is_answered_is_as_described(folder):
    service = FakeService(folder, plays([*range(55, 65), 6, EOS], group=3))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(service)), base_url="http://face") as client:

        async def ask(method, path, **request):
            answer = await client.request(method, path, **request)
            CONTRACT.check(method, path, status=answer.status_code, headers=answer.headers, content=answer.content)
            return answer

        for path, body in BODIES:
            await ask("POST", path, json=body)
            for options in OPTIONS if path in (CHAT_ROUTE, COMPLETIONS_ROUTE) else ():
                await ask("POST", path, json={**body, "stream": True, "stream_options": options})
        for path in ("/health", "/ready", "/metrics", "/health_generate", "/v1/models", "/v1/models/tiny", "/model_info"):
            assert (await ask("GET", path)).status_code == 200
            assert (await ask("HEAD", path)).content == b""
        for method, path in (("GET", "/nothing"), ("GET", CHAT_ROUTE), ("DELETE", "/health"), ("GET", "/v1/models/other")):
            assert (await ask(method, path)).status_code in (404, 405)
        service.state = replace(service.state, reasons=({"code": "starting", "detail": "weights", "rank": None},))
        for method, path in (("GET", "/ready"), ("GET", "/v1/models"), ("POST", CHAT_ROUTE)):
            assert (await ask(method, path, json=BODIES[0][1])).status_code == 503
