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
from tests.schemas import parameters, schemas, validator

DRAFTS = (0, 3)
AT_ONCE = 10
PLENTY = 160  # tokens: a model without opinion takes some time to close what it has opened
ENDS = {'"': 4.0, "]": 5.0, "}": 5.0, "</longcat_s>": 3.0, "</longcat_think>": 6.0, "</longcat_arg_value>": 5.0}
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
    settings = ("engine.prefix_cache=false", "engine.max_model_len=4096", "engine.num_blocks=2600")
    with ExitStack() as stack:
        yield {n: stack.enter_context(inline_server(model, *settings, f"engine.num_draft_tokens={n}")) for n in DRAFTS}


@pytest.fixture(scope="module")
def bias(model: Path) -> dict[str, float]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return {str(tokenizer.token_to_id(text)): value for text, value in ENDS.items()}


def answers(servers: Servers, asked: list[Asked]) -> list[dict[str, Any] | None]:
    """The whole answers, with drafts and without the same, and what a stream comes to; None where they are refused."""
    plain, other = (servers[drafts].responses(*asked) for drafts in DRAFTS)
    good = [answer.status_code == 200 for answer in plain]
    assert {answer.status_code for answer in (*plain, *other)} <= {200, 400}, [answer.text for answer in plain]
    assert [answer.status_code == 200 for answer in other] == good
    taken = [one for one, is_good in zip(asked, good, strict=True) if is_good]
    streams = servers[DRAFTS[-1]].stream(*(one.having(stream_options={"include_usage": True}) for one in taken))
    wholes = [[answer.json() for answer in found if answer.status_code == 200] for found in (plain, other)]
    for one, *told in zip(taken, *wholes, (joined(chunks) for chunks in streams), strict=True):
        first, *others = (without_ids(parts_of(answer)) for answer in told)
        assert [differences(first, parts) - {"head", "shape"} for parts in others] == [set(), set()], one
    return [answer.json() if is_good else None for answer, is_good in zip(plain, good, strict=True)]


def without_ids(parts: dict[str, Any]) -> dict[str, Any]:
    return {**parts, "calls": [[call["function"] for call in calls or []] for calls in parts["calls"]]}


def value_of(text: str) -> Any:
    """A number beyond those of a processor is one of JSON all the same; it counts as a large one."""

    def number(digits: str) -> float | Decimal:
        found = float(digits)
        return found if math.isfinite(found) else Decimal("1e400").copy_sign(Decimal(found))

    return json.loads(text, parse_float=number)


def generated(num_examples: int) -> settings:
    """Random in the same way each time, and not made smaller: what fails takes long."""
    return settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def body_of(schema: dict[str, Any], seed: int, bias: dict[str, float]) -> Asked:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    fields = {"response_format": form, "temperature": 1, "seed": seed, "max_tokens": PLENTY, "logit_bias": bias}
    if seed % 3:
        return Asked(CHAT_ROUTE, {**fields, "messages": HELLO, "enable_thinking": seed % 3 == 2})
    return Asked(COMPLETIONS_ROUTE, {**fields, "prompt": "hello"})


def check_schemas(servers: Servers, bias: dict[str, float], num_examples: int) -> tuple[int, int]:
    """How many schemas were taken, and how many answers finished."""
    counts = [0, 0]

    @generated(num_examples)
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


def forced(tools: list[dict[str, Any]], choice: Any, seed: int, bias: dict[str, float]) -> Asked:
    fields = {"messages": HELLO, "enable_thinking": seed % 2 == 1, "parallel_tool_calls": seed % 3 > 0}
    return Asked(
        CHAT_ROUTE,
        {
            **fields,
            "tools": [{"type": "function", "function": tool} for tool in tools],
            "tool_choice": choice,
            "temperature": 1,
            "seed": seed,
            "max_tokens": PLENTY,
            "logit_bias": bias,
        },
    )


def check_calls(servers: Servers, bias: dict[str, float], num_examples: int) -> tuple[int, int]:
    """How many bodies were taken, and how many calls were judged."""
    counts = [0, 0]
    named = {"type": "function", "function": {"name": "g.1"}}

    @generated(num_examples)
    @given(
        found=st.lists(
            st.tuples(parameters(), parameters(), st.sampled_from(["required", "g.1"]), st.integers(0, 10**6)),
            min_size=AT_ONCE,
            max_size=AT_ONCE,
        )
    )
    def check(found: list[tuple[dict[str, Any], dict[str, Any], str, int]]) -> None:
        asked = [
            forced(
                [{"name": "f", "parameters": one}, {"name": "g.1", "parameters": other}, {"name": "bare"}],
                choice if choice == "required" else named,
                seed,
                bias,
            )
            for one, other, choice, seed in found
        ]
        for (one, other, choice, seed), answer in zip(found, answers(servers, asked), strict=True):
            if answer is None:
                continue
            counts[0] += 1
            judged = {"f": one, "g.1": other, "bare": {"type": "object"}}
            counts[1] += judged_calls(answer["choices"][0], judged, choice, only_one=choice != "required" or seed % 3 == 0)

    check()
    return counts[0], counts[1]


def judged_calls(answered: dict[str, Any], by_name: dict[str, Any], choice: str, *, only_one: bool) -> int:
    """Calls of an answer that ended by itself: nothing else is in it."""
    if answered["finish_reason"] == "length":
        return 0
    message = answered["message"]
    assert (answered["finish_reason"], message["content"]) == ("tool_calls", None)
    calls = [call["function"] for call in message["tool_calls"]]
    assert len(calls) == 1 or not only_one
    for call in calls:
        assert choice in ("required", call["name"])
        value = value_of(call["arguments"])
        assert isinstance(value, dict)
        validator(by_name[call["name"]]).validate(value)
    return len(calls)


def test_random_schemas(servers: Servers, bias: dict[str, float]) -> None:
    taken, finished = check_schemas(servers, bias, 1)
    assert taken >= 5 and finished >= 3


@pytest.mark.slow
def test_two_hundred_random_schemas(servers: Servers, bias: dict[str, float]) -> None:
    taken, finished = check_schemas(servers, bias, 30)
    print(f"{taken} schemas, {finished} answers finished")
    assert taken >= 200 and finished >= 100


def test_forced_calls(servers: Servers, bias: dict[str, float]) -> None:
    taken, judged = check_calls(servers, bias, 2)
    assert taken >= 5 and judged >= 2


@pytest.mark.slow
def test_many_forced_calls(servers: Servers, bias: dict[str, float]) -> None:
    taken, judged = check_calls(servers, bias, 20)
    print(f"{taken} bodies, {judged} calls judged")
    assert taken >= 80 and judged >= 50


def test_an_object_is_all_that_is_asked(servers: Servers, bias: dict[str, float]) -> None:
    fields = {"response_format": {"type": "json_object"}, "temperature": 1, "max_tokens": PLENTY, "logit_bias": bias}
    asked = [
        Asked(CHAT_ROUTE, {**fields, "messages": HELLO, "seed": seed, "n": 2, "enable_thinking": seed % 2 == 1})
        for seed in range(4)
    ]
    finished = 0
    for answer in answers(servers, asked):
        assert answer is not None
        for choice in answer["choices"]:
            if choice["finish_reason"] == "stop":
                finished += 1
                assert isinstance(value_of(choice["message"]["content"]), dict)
    assert finished
