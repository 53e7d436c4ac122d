"""Answers that are bound, from body to text: what is finished validates, with drafts and without, whole and streamed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from longcat_pd.server.openai import CHAT_ROUTE, COMPLETIONS_ROUTE
from longcat_pd.tiny.make import write_tiny
from tests.answer_parts import differences, joined, parts_of
from tests.inline_server import Asked, InlineServer, inline_server
from tests.schemas import schemas, validator

DRAFTS = (0, 3)
AT_ONCE = 10
PLENTY = 160  # tokens: a model without opinion takes some time to close what it has opened
ENDS = {'"': 2.0, "]": 3.0, "}": 3.0, "</longcat_s>": 1.0}
HELLO = [{"role": "user", "content": "hello"}]

Servers = Mapping[int, InlineServer]


@pytest.fixture(scope="module", params=["2.0+predictable", "chat"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reasoning, and calls in tags; no reasoning, and calls in JSON."""
    folder: Path = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny(folder, request.param, dtype="float32")
    return folder


@pytest.fixture(scope="module")
def servers(model: Path) -> Iterator[Servers]:
    drafts = DRAFTS if "predictable" in model.parent.name or has_draft(model) else DRAFTS[:1]
    with ExitStack() as stack:
        yield {n: stack.enter_context(inline_server(model, f"engine.num_draft_tokens={n}")) for n in drafts}


def has_draft(model: Path) -> bool:
    return "model.mtp.embed_tokens.weight" in (model / "model.safetensors.index.json").read_text()


@pytest.fixture(scope="module")
def bias(model: Path) -> dict[str, float]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return {str(tokenizer.token_to_id(text)): value for text, value in ENDS.items()}


def answers(servers: Servers, asked: list[Asked]) -> list[dict[str, Any] | None]:
    """The whole answers, of every server the same, and what their streams come to; None where all of them refuse."""
    found = {drafts: server.responses(*asked) for drafts, server in servers.items()}
    good = [answer.status_code == 200 for answer in found[0]]
    assert {answer.status_code for answer in found[0]} <= {200, 400}, [answer.text for answer in found[0]]
    streamed = [
        one.having(stream_options={"include_usage": True}) for one, is_good in zip(asked, good, strict=True) if is_good
    ]
    for drafts, server in servers.items():
        assert [answer.status_code == 200 for answer in found[drafts]] == good
        chunks = iter(server.stream(*streamed))
        for one, plain, other in zip(asked, found[0], found[drafts], strict=True):
            if plain.status_code == 200:
                told = without_ids(parts_of(plain.json()))
                assert differences(told, without_ids(parts_of(other.json()))) <= {"head", "shape"}, one
                assert differences(told, without_ids(parts_of(joined(next(chunks))))) <= {"head", "shape"}, one
    return [answer.json() if is_good else None for answer, is_good in zip(found[0], good, strict=True)]


def without_ids(parts: dict[str, Any]) -> dict[str, Any]:
    return {**parts, "calls": [[call["function"] for call in calls or []] for calls in parts["calls"]]}


def value_of(text: str) -> Any:
    """A number beyond those of a processor is one of JSON all the same."""
    return json.loads(text, parse_float=lambda digits: float(digits) if math.isfinite(float(digits)) else Decimal(digits))


def body_of(schema: dict[str, Any], seed: int, bias: dict[str, float]) -> Asked:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    fields = {"response_format": form, "temperature": 1, "seed": seed, "max_tokens": PLENTY, "logit_bias": bias}
    if seed % 3:
        return Asked(CHAT_ROUTE, {**fields, "messages": HELLO, "enable_thinking": seed % 3 == 2})
    return Asked(COMPLETIONS_ROUTE, {**fields, "prompt": "hello"})


def check_schemas(servers: Servers, bias: dict[str, float], num_examples: int) -> tuple[int, int]:
    """How many schemas were taken, and how many answers finished."""
    counts = [0, 0]

    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(found=st.lists(st.tuples(schemas(), st.integers(0, 10**6)), min_size=AT_ONCE, max_size=AT_ONCE))
    def check(found: list[tuple[dict[str, Any], int]]) -> None:
        asked = [body_of(schema, seed, bias) for schema, seed in found]
        for (schema, _), answer in zip(found, answers(servers, asked), strict=True):
            if answer is None:
                continue
            counts[0] += 1
            (choice,) = answer["choices"]
            if choice["finish_reason"] == "stop":
                counts[1] += 1
                validator(schema).validate(
                    value_of(choice["message"]["content"] if "message" in choice else choice["text"])
                )

    check()
    return counts[0], counts[1]


def test_random_schemas(servers: Servers, bias: dict[str, float]) -> None:
    taken, finished = check_schemas(servers, bias, 3)
    assert taken >= 20 and finished >= 10


@pytest.mark.slow
def test_two_hundred_random_schemas(servers: Servers, bias: dict[str, float]) -> None:
    taken, finished = check_schemas(servers, bias, 30)
    print(f"{taken} schemas, {finished} answers finished")
    assert taken >= 200 and finished >= 100
