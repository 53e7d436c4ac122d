"""One choice whose tokens are any bytes, read in any runs, and its pieces joined as an obvious client joins them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from longcat_pd.engine.request import Delta, FinishReason, TokenOutput
from longcat_pd.server.choice import ChoiceText, Piece
from longcat_pd.server.reasoning import ReasoningSplitter
from longcat_pd.server.stops import StopFinder
from longcat_pd.server.text import TextDecoder
from longcat_pd.server.tool_calls import ToolCallParser
from tests.oracle_text import Rules
from tests.troubled_text import TOOLS


@dataclass(frozen=True)
class Example:
    tokens: list[tuple[int, bytes]]
    finish: FinishReason
    stop_token: int | None
    rules: Rules
    runs: list[int] = field(default_factory=lambda: [1])


def sliced(whole: Sequence[Any], lengths: Sequence[int]) -> list[Any]:
    """The whole in slices of these lengths, over and over."""
    parts, place = [], 0
    for length in cycle(lengths):
        if place >= len(whole):
            return parts
        parts.append(whole[place : place + length])
        place += length
    return parts


class Spelt:
    """Tokens that are spelt in the example."""

    has_tokenizer = True

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
    stops = StopFinder(rules.stops, rules.num_exempt, keeps_match=rules.keeps_stop)
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
