"""Every field of the two generation routes: it changes what it should and nothing else, with drafts and without.

Each row of the table is a field with a value, beside what it changes in an answer; all else has to be as it is without the
field. The answers come from a whole engine, many at a time; streamed they are the same, and so they are with drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

from longcat_pd.server.openai import CHAT_ROUTE, COMPLETIONS_ROUTE, read_body
from tests.answer_parts import Parts, differences, joined, parts_of
from tests.inline_server import Asked, InlineServer, inline_server, write_phrase

LENGTH, EOS, NUM_DRAFTS = 16, 2, 3
THINK_CLOSE, CALL_OPEN, CALL_CLOSE = 8, 9, 10
# behind the newline at the end of every conversation: reasoning, its end, and one call after the other
PHRASE = (217, 83, THINK_CLOSE, 84, 421, CALL_OPEN, 88, CALL_CLOSE, 278, 86, CALL_OPEN)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "hi"}
HISTORY = [USER, {"role": "assistant", "content": "b", "reasoning_content": "a"}, USER]
COMMON = {"temperature": 1.4, "seed": 5, "max_tokens": LENGTH, "return_token_ids": True}
BASES = {
    CHAT_ROUTE: Asked(CHAT_ROUTE, {"messages": [USER], "logprobs": True, **COMMON}),
    COMPLETIONS_ROUTE: Asked(COMPLETIONS_ROUTE, {"prompt": "a long river", "logprobs": 1, **COMMON}),
}
USAGE = {"stream_options": {"include_usage": True}}

DRAWN = {"ids", "text", "logprobs"}
SHORTER = {*DRAWN, "usage"}
STOPPED = {*SHORTER, "finish", "matched"}
OF_CHAT = {"reasoning", "calls"}  # what another text may hold
ANYTHING = {*STOPPED, *OF_CHAT, "prompts"}
ONLY_EOS = {"logit_bias": {str(EOS): 100}}
NARROW = {"temperature": 0, "logit_bias": {str(token): 9 for token in range(100, 106)}}
TOOLS = {"tools": [TOOL], "temperature": 0}
ONLY_YES = {"type": "json_schema", "json_schema": {"name": "yes", "schema": {"const": "yes"}}}

Check = Callable[[Parts, Parts], bool]


@dataclass(frozen=True)
class Row:
    """``name`` = ``value``, or what ``value`` makes of the base answer.

    ``changes``: parts that differ from the answer without it; ``may``: parts that may. ``beside``: other fields of both.
    ``like``: the same answer can be had by these fields in place of it. ``check``: of the answers without it and with it.
    """

    name: str
    value: Any
    changes: set[str] = field(default_factory=set)
    may: set[str] = field(default_factory=set)
    beside: dict[str, Any] = field(default_factory=dict)
    like: dict[str, Any] | None = None
    check: Check = lambda before, after: True

    def without(self, route: str) -> Asked:
        return BASES[route].having(**self.beside)

    def having(self, route: str, base: Parts) -> Asked:
        return self.without(route).having(**{self.name: self.value(base) if callable(self.value) else self.value})

    def as_well(self, route: str) -> list[Asked]:
        return [] if self.like is None else [self.without(route).having(**self.like)]


def is_cut(before: Parts, after: Parts) -> bool:
    (all_ids,), (ids,) = before["ids"], after["ids"]
    return len(ids) < len(all_ids) and all_ids[: len(ids)] == ids


def cut_text(before: Parts, after: Parts) -> bool:
    (text,), (stop,) = before["text"], after["matched"]
    return after["text"] == [text[: text.index(stop)]] and is_cut(before, after) and after["finish"] == ["stop"]


def cut_at_token(before: Parts, after: Parts) -> bool:
    (ids,), (stop,) = before["ids"], after["matched"]
    return after["ids"] == [ids[: ids.index(stop) + 1]]


def keeps_the_stop(before: Parts, after: Parts) -> bool:
    (cut,), (text,), (stop,) = before["text"], after["text"], after["matched"]
    return bool(text.startswith(cut)) and text[len(cut) :] == (stop if isinstance(stop, str) else text[len(cut) :]) != ""


def repeats_less(before: Parts, after: Parts) -> bool:
    return len(set(after["ids"][0])) > len(set(before["ids"][0]))


def several(num_prompts: int, n: int) -> Check:
    def check(before: Parts, after: Parts) -> bool:
        usage, ids = after["usage"], after["ids"]
        prompts = [len(prompt) for prompt in after["prompts"]] if num_prompts > 1 else [len(after["prompts"])]
        return (
            [len(part) for name, part in after.items() if name in STOPPED - {"usage"}] == [num_prompts * n] * 5
            and ids[0] == before["ids"][0]
            and usage["completion_tokens"] == sum(map(len, ids))
            and usage["prompt_tokens"] == sum(prompts[::n])
            and len({tuple(one) for one in ids}) == num_prompts * n
        )

    return check


def best(num: int) -> Check:
    """So many candidates with each token, in order; the same tokens as before."""

    def check(before: Parts, after: Parts) -> bool:
        found = after["logprobs"][0]
        if "content" in found:
            tops = [[top["logprob"] for top in entry["top_logprobs"]] for entry in found["content"]]
            return all(top == sorted(top, reverse=True) and len(top) == num for top in tops)
        return all(num <= len(top) <= num + 1 for top in found["top_logprobs"])

    return check


def begins_object(after: Parts) -> bool:
    return bool(after["text"][0].startswith("{")) and after["reasoning"] == [None]


def only_calls(after: Parts) -> bool:
    (calls,) = after["calls"]
    return after["text"] == [None] and {call["function"]["name"] for call in calls} == {"f"}


ROWS = [
    Row("max_tokens", 5, SHORTER, OF_CHAT, check=is_cut),
    Row("max_completion_tokens", 5, SHORTER, OF_CHAT, beside={"max_tokens": LENGTH}, like={"max_tokens": 5}),
    Row("temperature", 0, DRAWN, OF_CHAT, like={"top_k": 1}),
    Row("top_k", 1, DRAWN, OF_CHAT, like={"temperature": 0}),
    Row("top_k", -1),
    Row("top_p", 0.001, DRAWN, OF_CHAT, like={"temperature": 0}),
    Row("top_p", 1.0),
    Row("min_p", 1, DRAWN, OF_CHAT, like={"temperature": 0}),
    Row("min_p", 0),
    Row("seed", 7, DRAWN, OF_CHAT),
    Row("n", 3, {*STOPPED, *OF_CHAT, "shape"}, check=several(1, 3)),
    Row("n", 1),
    Row("stop", lambda base: base["text"][0][3:5], STOPPED, OF_CHAT, check=cut_text),
    Row("stop", lambda base: ["never said", base["text"][0][4:7]], STOPPED, OF_CHAT, check=cut_text),
    Row("stop", "never said"),
    Row("stop_token_ids", lambda base: [base["ids"][0][6]], STOPPED, OF_CHAT, check=cut_at_token),
    Row("stop_token_ids", [999]),
    Row("include_stop_str_in_output", True, {"text"}, beside={"stop": ["d", "e", "o", "t"]}, check=keeps_the_stop),
    Row("include_stop_str_in_output", True, {"text"}, beside={"stop_token_ids": [*range(278, 342)]}, check=keeps_the_stop),
    Row("include_stop_str_in_output", True),
    Row("ignore_eos", True, {"ids", "logprobs", "usage", "finish"}, beside=ONLY_EOS),
    Row("ignore_eos", True),
    Row("min_tokens", 4, SHORTER, beside=ONLY_EOS, check=lambda _, after: [len(ids) for ids in after["ids"]] == [5]),
    Row("min_tokens", 0),
    Row("frequency_penalty", 2, DRAWN, OF_CHAT, beside=NARROW, check=repeats_less),
    Row("frequency_penalty", 0),
    Row("presence_penalty", 2, DRAWN, OF_CHAT, beside=NARROW, check=repeats_less),
    Row("presence_penalty", 0),
    Row("repetition_penalty", 2, DRAWN, OF_CHAT, beside=NARROW, check=repeats_less),
    Row("repetition_penalty", 1),
    Row("logit_bias", {"300": 100}, DRAWN, OF_CHAT, check=lambda _, after: after["ids"] == [[300] * LENGTH]),
    Row("logit_bias", {"300": 0}),
    Row("response_format", {"type": "text"}),
    Row(
        "response_format", {"type": "json_object"}, DRAWN, {*STOPPED, *OF_CHAT}, check=lambda _, after: begins_object(after)
    ),
    Row("response_format", ONLY_YES, {*SHORTER, "finish"}, OF_CHAT, check=lambda _, after: after["text"] == ['"yes"']),
    Row("return_token_ids", False, {"ids", "prompts", "shape"}),
    Row("stream", False),
    Row("stream_options", {"include_usage": True, "continuous_usage_stats": True}),
    Row("priority", -100),
    Row("priority", 100),
    Row("model", "m"),
    Row("model", ""),
    Row("best_of", 1),
    Row("add_generation_prompt", True),
]
ROWS_OF_CHAT = [
    Row("messages", [{"role": "user", "content": "hello"}], {"prompts"}, ANYTHING),
    Row("logprobs", False, {"logprobs"}),
    Row("top_logprobs", 4, {"logprobs"}, check=best(4)),
    Row("top_logprobs", 0),
    Row("tools", [TOOL], {"prompts", "calls", "text", "usage"}, ANYTHING, beside={"temperature": 0}),
    Row("tool_choice", "none", {"prompts", "calls"}, ANYTHING, beside=TOOLS, like={"tools": []}),
    Row("tool_choice", "auto", beside=TOOLS),
    Row("tool_choice", "required", {"ids", "text"}, ANYTHING, beside=TOOLS, check=lambda _, after: only_calls(after)),
    Row(
        "tool_choice",
        {"type": "function", "function": {"name": "f"}},
        {*SHORTER, "calls", "finish"},
        ANYTHING,
        beside=TOOLS,
        check=lambda _, after: only_calls(after) and (len(after["calls"][0]), after["finish"]) == (1, ["tool_calls"]),
    ),
    Row(
        "parallel_tool_calls",
        False,
        {*SHORTER, "calls", "finish"},
        beside=TOOLS,
        check=lambda before, after: is_cut(before, after) and len(before["calls"][0]) > len(after["calls"][0]) == 1,
    ),
    Row("parallel_tool_calls", True, beside=TOOLS),
    Row("chat_template_kwargs", {"enable_thinking": True}, {"prompts", "reasoning", "text"}, ANYTHING),
    Row(
        "chat_template_kwargs",
        {"save_history_reasoning_content": True},
        {"prompts"},
        ANYTHING,
        beside={"messages": HISTORY, "enable_thinking": True},
    ),
    Row("chat_template_kwargs", {"unknown to the template": 1}),
    Row(
        "enable_thinking",
        True,
        {"prompts", "reasoning", "text"},
        ANYTHING,
        like={"chat_template_kwargs": {"enable_thinking": True}},
    ),
    Row("enable_thinking", False),
    Row("reasoning_effort", "low", {"prompts", "reasoning", "text"}, ANYTHING, like={"enable_thinking": True}),
    Row("reasoning_effort", "none"),
    Row(
        "separate_reasoning",
        False,
        {"reasoning", "text"},
        beside={"enable_thinking": True},
        check=lambda before, after: after["text"] == [f"{before['reasoning'][0]}</longcat_think>{before['text'][0]}"],
    ),
    Row("separate_reasoning", True, beside={"enable_thinking": True}),
]
ROWS_OF_COMPLETIONS = [
    Row("prompt", "the mountain", {"prompts", *DRAWN}, ANYTHING),
    Row("prompt", ["a long river", "mountains", [7, 8, 9]], {*STOPPED, *OF_CHAT, "shape", "prompts"}, check=several(3, 1)),
    Row(
        "prompt",
        ["a long river", "mountains"],
        {*STOPPED, *OF_CHAT, "shape", "prompts"},
        beside={"n": 2},
        check=several(2, 2),
    ),
    Row("prompt", ["a long river"]),
    Row("logprobs", None, {"logprobs"}),
    Row("logprobs", 4, {"logprobs"}, check=best(4)),
]
_OF_OPENAI = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity")
NO_EFFECT: dict[str, Any] = dict.fromkeys(_OF_OPENAI, "x") | {
    "prompt_cache_options": {"a": 1},
    "prompt_cache_retention": "24h",
    "bootstrap_host": "h",
    "data_parallel_rank": 3,
    "echo": False,
    "suffix": "",
    "functions": [],
    "function_call": "none",
    "modalities": ["text"],
    "use_beam_search": False,
    "length_penalty": 1.0,
    "guided_json": [],
    "unknown": {"deep": [1]},
}
CASES = [
    (route, row)
    for route, more in ((CHAT_ROUTE, ROWS_OF_CHAT), (COMPLETIONS_ROUTE, ROWS_OF_COMPLETIONS))
    for row in [*ROWS, *more]
]


class Desk:
    """Answers of both servers. All bodies are asked at once, so each is answered in the company of others."""

    def __init__(self, servers: dict[int, InlineServer]) -> None:
        self._servers = servers
        self._found: dict[tuple[int, Asked], Parts] = {}

    def ask_all(self, asked: set[Asked]) -> None:
        """Whole and streamed, which has to be the same."""
        order = list(asked)
        streams = [one.having(**USAGE) for one in order]

        def both(server: InlineServer) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
            return server.ask(*order), server.stream(*streams)

        with ThreadPoolExecutor() as threads:
            found = dict(zip(self._servers, threads.map(both, self._servers.values()), strict=True))
        for drafts, answers in found.items():
            for one, whole, chunks in zip(order, *answers, strict=True):
                self._found[drafts, one] = parts_of(whole)
                assert differences(parts_of(whole), parts_of(joined(chunks))) == set(), f"streamed {one}"

    def told(self, drafts: int, asked: Asked) -> Parts:
        """What was answered."""
        return self._found[drafts, asked]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, InlineServer]]:
    model = tmp_path_factory.mktemp("fields") / "m"
    write_phrase(model, PHRASE)
    settings = ("engine.prefix_cache=false", "model.served_name=m")  # or usage tells who was asked before
    with (
        inline_server(model, *settings) as plain,
        inline_server(model, *settings, f"engine.num_draft_tokens={NUM_DRAFTS}") as drafting,
    ):
        yield {0: plain, NUM_DRAFTS: drafting}


@pytest.fixture(scope="module")
def desk(servers: dict[int, InlineServer]) -> Desk:
    found = Desk(servers)
    found.ask_all(set(BASES.values()))
    asked = {row.without(route) for route, row in CASES}
    asked |= {row.having(route, found.told(0, BASES[route])) for route, row in CASES}
    asked |= {one for route, row in CASES for one in row.as_well(route)}
    asked |= {base.having(**NO_EFFECT) for base in BASES.values()}
    found.ask_all(asked - set(BASES.values()))
    return found


@pytest.mark.parametrize(
    ("route", "row"), CASES, ids=[f"{route[4:8]}-{row.name}-{n}" for n, (route, row) in enumerate(CASES)]
)
def test_a_field_changes_what_it_should_and_nothing_else(desk: Desk, route: str, row: Row) -> None:
    having = row.having(route, desk.told(0, BASES[route]))
    for drafts in (0, NUM_DRAFTS):
        before, after = desk.told(drafts, row.without(route)), desk.told(drafts, having)
        changed = differences(before, after)
        changes = row.changes if route == CHAT_ROUTE else row.changes - OF_CHAT if row.name != "n" else row.changes
        assert changes <= changed <= row.changes | row.may, (before, after)
        assert row.check(before, after), (before, after)
        for other in row.as_well(route):
            assert differences(after, desk.told(drafts, other)) == set()


@pytest.mark.parametrize("route", BASES)
def test_what_is_accepted_without_effect_has_none(desk: Desk, route: str) -> None:
    for drafts in (0, NUM_DRAFTS):
        assert differences(desk.told(drafts, BASES[route]), desk.told(drafts, BASES[route].having(**NO_EFFECT))) == set()


@pytest.mark.parametrize("route", BASES)
def test_nobody_can_tell_that_there_are_drafts(desk: Desk, route: str) -> None:
    for own, row in CASES:
        if own == route:
            asked = row.having(route, desk.told(0, BASES[route]))
            (one, other) = (desk.told(drafts, asked) for drafts in (0, NUM_DRAFTS))
            assert differences(one, other) <= {"head"}, asked


class Noting(dict[str, Any]):
    """A body that notes which fields are looked at."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


@pytest.mark.parametrize("route", BASES)
def test_no_field_is_left_out(route: str) -> None:
    body = Noting(dict(BASES[route].fields))
    read_body(route, body, "m")
    assert body.names == {row.name for own, row in CASES if own == route}


@pytest.mark.parametrize("drafts", [0, NUM_DRAFTS])
def test_usage_on_the_chunks_of_a_stream(servers: dict[int, InlineServer], desk: Desk, drafts: int) -> None:
    """Each combination of the options, with one choice and with several."""
    options = [None, {}] + [
        {name: value for name, value in (("include_usage", a), ("continuous_usage_stats", b)) if value != "absent"}
        for a, b in product(("absent", None, False, True), repeat=2)
    ]
    for route, plain in BASES.items():
        base = plain.having(max_tokens=6)
        several = base.having(n=2) if route == CHAT_ROUTE else base.having(n=2, prompt=["a long river", [5, 6]])
        for asked in (base, several):
            (whole,) = servers[drafts].ask(asked)
            streams = servers[drafts].stream(*(asked.having(stream_options=chosen) for chosen in options))
            for chosen, chunks in zip(options, streams, strict=True):
                is_told, is_running = (
                    (chosen or {}).get(name) is True for name in ("include_usage", "continuous_usage_stats")
                )
                assert ([chunk["choices"] for chunk in chunks].count([]), chunks[-1]["choices"] == []) == (is_told, is_told)
                assert all(("usage" in chunk) is is_told for chunk in chunks)
                if not is_told:
                    continue
                *usages, last = (chunk["usage"] for chunk in chunks)
                assert last == whole["usage"]
                assert is_running or set(map(bool, usages)) == {False}
                counts = [usage["completion_tokens"] for usage in usages] if is_running else []
                assert counts == sorted(counts) and (not counts or counts[-1] == last["completion_tokens"])


def test_as_many_choices_as_there_may_be(servers: dict[int, InlineServer]) -> None:
    """More than there are slots; each says what its prompt says alone."""
    prompts = [[7 * number, 30 + number] for number in range(2, 10)]
    asked = BASES[COMPLETIONS_ROUTE].having(prompt=prompts, n=8, max_tokens=3)
    alone = [asked.having(prompt=prompt, n=1) for prompt in prompts]
    for server in servers.values():
        (whole,), others = server.ask(asked), server.ask(*alone)
        told = parts_of(whole)
        assert told["ids"][::8] == [answer["choices"][0]["token_ids"] for answer in others]
        assert told["prompts"] == [prompt for prompt in prompts for _ in range(8)]
        assert (told["usage"]["prompt_tokens"], told["usage"]["completion_tokens"]) == (16, 64 * 3)
        assert server.account()["idle"]
