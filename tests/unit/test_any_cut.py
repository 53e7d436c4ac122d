"""However an answer is cut into tokens, accepted runs and chunks: one message, and it is the one that the definition says."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longcat_pd.engine.request import Delta, FinishReason, TokenOutput
from longcat_pd.server.choice import ChoiceText, Piece
from longcat_pd.server.reasoning import ReasoningSplitter
from longcat_pd.server.stops import StopFinder
from longcat_pd.server.text import TextDecoder, TextProcessor
from longcat_pd.server.tool_calls import ToolCallParser
from tests.oracle_text import Message, Rules, answer
from tests.troubled_text import TOOLS, kinds, raw_answers, stop_strings
from tests.unit.fake_service import EOS, FakeService, deltas_of, events_of, make_app, write_folder

THINK = "<longcat_think>"
PROMPT_ENDS = [None, f"x{THINK}\n", f"x{THINK}", f"x{THINK}\n\n</longcat_think>\n", "ASSISTANT:"]

few_or_many = pytest.mark.parametrize("share", [1, pytest.param(20, marks=pytest.mark.slow)])


def holds(examples: st.SearchStrategy[Any], claim: Callable[[Any], None], num: int) -> None:
    """The claim holds for so many examples, the same ones each time."""

    def of_one(example: Any) -> None:
        claim(example)

    checks = settings(max_examples=num, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    checks(given(examples)(of_one))()


# ---- one choice, tokens of any bytes


@dataclass(frozen=True)
class Example:
    tokens: list[tuple[int, bytes]]
    finish: FinishReason
    stop_token: int | None
    rules: Rules
    runs: list[int]


sizes = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 8, 25, 400]), min_size=1, max_size=6).filter(any)


def sliced(whole: Sequence[Any], lengths: Sequence[int]) -> list[Any]:
    """The whole in slices of these lengths, over and over."""
    parts, place = [], 0
    for length in cycle(lengths):
        if place >= len(whole):
            return parts
        parts.append(whole[place : place + length])
        place += length
    return parts


@st.composite
def examples(draw: st.DrawFn, *, plain: bool = False) -> Example:
    raw = draw(raw_answers())
    parts = sliced(raw, draw(sizes))
    tokens = [(100 + place, part) for place, part in enumerate(parts)]
    ending = draw(st.sampled_from(["eos", "length", "stop token"]))
    stop_token = None
    if ending == "stop token" and tokens:
        tokens = tokens[: draw(st.integers(1, len(tokens)))]
        stop_token = tokens[-1][0]
    elif ending == "length" and tokens:
        tokens = tokens[: draw(st.integers(1, len(tokens)))]
    else:
        ending = "eos"
        tokens.append((EOS, b""))
    rules = Rules(
        stops=draw(stop_strings(raw)),
        num_exempt=draw(st.sampled_from([0, 0, 0, 1, 5])),
        prompt_end=None if plain else draw(st.sampled_from(PROMPT_ENDS)),
        keeps_markup=draw(st.booleans()),
        style=None if plain else draw(st.sampled_from(["longcat", "longcat_xml", None])),
        kinds=kinds,
        only_one=draw(st.booleans()),
    )
    finish = FinishReason.LENGTH if ending == "length" else FinishReason.STOP
    return Example(tokens, finish, stop_token, rules, draw(st.lists(st.integers(1, 6), min_size=1, max_size=5)))


class Spelt:
    """Tokens that are spelt in the example."""

    def __init__(self, tokens: Sequence[tuple[int, bytes]]) -> None:
        self._bytes = dict(tokens)

    def answer_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]


def reader(example: Example) -> ChoiceText:
    rules = example.rules
    splitter = tools = None
    if rules.prompt_end is not None:
        splitter = ReasoningSplitter(rules.prompt_end, keeps_markup=rules.keeps_markup)
    if rules.style is not None:
        tools = ToolCallParser(rules.style, TOOLS, only_one=rules.only_one)
    decoder = TextDecoder(Spelt(example.tokens))
    stops = StopFinder(rules.stops, rules.num_exempt)
    return ChoiceText(3, decoder, stops=stops, splitter=splitter, tools=tools)


def pieces_of(example: Example, runs: Sequence[int]) -> Iterator[Piece]:
    choice = reader(example)
    outputs = [TokenOutput(token_id) for token_id, _ in example.tokens]
    parts = sliced(outputs, runs)
    for place, part in enumerate(parts):
        is_last = place == len(parts) - 1
        yield from choice.push(Delta(tuple(part), *((example.finish, example.stop_token) if is_last else ())))
        if choice.is_finished:
            return


def joined(deltas: Sequence[dict[str, Any]]) -> tuple[str, str, list[tuple[str, str]]]:
    """As an obvious client joins them, which believes the form and checks it."""
    content, reasoning, calls, ids = "", "", [], []
    for delta in deltas:
        ((name, value),) = delta.items()
        assert value, "a delta says something"
        if name == "content":
            content += value
        elif name == "reasoning_content":
            reasoning += value
        else:
            (call,) = value
            function = call["function"]
            if "id" in call:
                assert name == "tool_calls" and call["index"] == len(calls) and call["type"] == "function"
                assert re.fullmatch("call_[0-9a-f]{24}", call["id"]) and function["arguments"] == ""
                calls.append((function["name"], ""))
                ids.append(call["id"])
            else:
                assert set(call) == {"index", "function"} and set(function) == {"arguments"}
                assert call["index"] == len(calls) - 1, "one call after the other"
                calls[-1] = (calls[-1][0], calls[-1][1] + function["arguments"])
    assert len(set(ids)) == len(ids)
    return content, reasoning, calls


def is_as_defined(example: Example) -> None:
    told = answer(example.tokens, example.finish.value, example.stop_token, example.rules)
    for runs in ([len(example.tokens)], [1], example.runs):
        opening, *middle, last = pieces_of(example, runs)
        assert opening.delta == {} == last.delta and {piece.index for piece in (opening, *middle, last)} == {3}
        assert [piece.finish_reason for piece in (opening, *middle)] == [None] * (len(middle) + 1)
        content, reasoning, calls = joined([piece.delta for piece in middle])
        assert (content, reasoning, calls) == (told.content, told.reasoning, [(c.name, c.arguments) for c in told.calls])
        assert (last.finish_reason, last.matched_stop) == (told.finish_reason, told.matched_stop)
        counted = [token for piece in (opening, *middle, last) for token in piece.tokens]
        assert [t.output.token_id for t in counted] == [token_id for token_id, _ in example.tokens[: told.num_tokens]]
        assert [t.text_offset for t in counted] == told.ends
        assert (last.num_tokens, last.num_reasoning_tokens) == (told.num_tokens, told.num_reasoning_tokens)
        assert told.num_reasoning_tokens <= told.num_tokens
        running = [piece.num_tokens for piece in (opening, *middle, last)]
        assert running == sorted(running)
    is_sound(told, example)


def is_sound(told: Message, example: Example) -> None:
    everything = told.content + told.reasoning + "".join(c.name + c.arguments for c in told.calls)
    everything.encode("utf-8")
    if "\ufffd".encode() not in b"".join(data for _, data in example.tokens):
        assert "\ufffd" not in everything
    values = [json.loads(call.arguments) for call in told.calls if is_json(call.arguments)]
    assert all(isinstance(value, dict) for value in values) and len(values) >= told.num_complete


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@few_or_many
def test_a_choice_is_what_the_definition_says_however_it_is_cut(share: int) -> None:
    holds(examples().map(of_keeping_both), is_as_defined, 600 * share)


def of_keeping_both(example: Example) -> Example:
    """Reasoning that stays in the content is told apart by the caller, so that both are compared."""
    return example


@few_or_many
def test_only_what_a_stop_string_may_take_back_is_held(share: int) -> None:
    def all_else_has_left(example: Example) -> None:
        plain = replace(example, rules=replace(example.rules, num_exempt=0, only_one=False))
        choice, sent, data = reader(plain), "", b""
        for token_id, part in plain.tokens[:-1]:
            sent += joined([p.delta for p in choice.push(Delta((TokenOutput(token_id),))) if p.delta])[0]
            data += part
            text = data.decode("utf-8", "ignore")
            if choice.is_finished:
                return
            tails = (cut for cut in range(len(text)) if any(stop.startswith(text[cut:]) for stop in plain.rules.stops))
            assert sent == text[: next(tails, len(text))]

    holds(examples(plain=True), all_else_has_left, 150 * share)
