"""Any combination of fields: what is counted, what is told of each token, and what may not matter.

Whatever is asked, usage adds up, every counted token has its log-prob once, a stream joins to the whole answer, and the
answer is the one without drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longcat_pd.server.openai import CHAT_ROUTE, COMPLETIONS_ROUTE
from longcat_pd.server.text import TextProcessor
from tests.answer_parts import differences, joined, parts_of
from tests.inline_server import Asked, InlineServer, inline_server, write_phrase

NUM_DRAFTS, EXAMPLES = 3, 30
# letters, the end of reasoning, a character in three bytes, a call, and EOS; it begins with what ends every conversation
PHRASE = (217, 83, 8, 84, 184, 141, 265, 9, 88, 10, 278, 86, 2)
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[InlineServer, InlineServer, TextProcessor]]:
    model = tmp_path_factory.mktemp("properties") / "m"
    write_phrase(model, PHRASE)
    with (
        inline_server(model, "engine.prefix_cache=false") as plain,
        inline_server(model, "engine.prefix_cache=false", f"engine.num_draft_tokens={NUM_DRAFTS}") as drafting,
    ):
        text = TextProcessor.load(model)
        assert text.raw(PHRASE[4:7]) == "龘" and text.token_text(PHRASE[4])[0].startswith("bytes:")
        yield plain, drafting, text


PROMPTS = st.one_of(st.sampled_from(["a", "the river", "你好"]), st.lists(st.integers(3, 1000), min_size=1, max_size=20))
STOPS = st.sampled_from(["a", "e", " ", "</longcat_think>", "b你", "<longcat_", "d"])
COMMON = {
    "max_tokens": st.integers(1, 14),
    "temperature": st.sampled_from([0, 0.7, 1.5]),
    "seed": st.integers(0, 9),
    "n": st.integers(1, 3),
    "stop": st.lists(STOPS, max_size=3),
    "stop_token_ids": st.lists(st.sampled_from([84, 9, 278, 500]), max_size=2),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "min_tokens": st.integers(0, 1),
    "top_k": st.sampled_from([0, 1, 20]),
    "min_p": st.sampled_from([0, 0.1]),
    "frequency_penalty": st.sampled_from([0, 1.5]),
    "repetition_penalty": st.sampled_from([1, 1.3]),
    "logit_bias": st.dictionaries(st.sampled_from(["2", "8", "184", "300"]), st.sampled_from([-100, 5, 12]), max_size=2),
    "priority": st.integers(-100, 100),
}
CHAT = {
    **COMMON,
    "messages": st.sampled_from(["hi", "hello", "x"]).map(lambda text: [{"role": "user", "content": text}]),
    "tools": st.sampled_from([[], [TOOL]]),
    "parallel_tool_calls": st.booleans(),
    "enable_thinking": st.booleans(),
    "separate_reasoning": st.booleans(),
}
REQUIRED = {"messages", "prompt", "max_tokens", "seed"}


def bodies(route: str, fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Asked]:
    def asked(values: dict[str, Any]) -> Asked:
        logprobs = {"logprobs": True, "top_logprobs": 2} if route == CHAT_ROUTE else {"logprobs": 2}
        return Asked(route, {**values, **logprobs, "return_token_ids": True})

    some = {name: strategy for name, strategy in fields.items() if name not in REQUIRED}
    needed = {name: strategy for name, strategy in fields.items() if name in REQUIRED}
    return st.fixed_dictionaries(needed, optional=some).map(asked)


BODIES = st.one_of(
    bodies(CHAT_ROUTE, CHAT),
    bodies(COMPLETIONS_ROUTE, {**COMMON, "prompt": st.one_of(PROMPTS, st.lists(PROMPTS, min_size=1, max_size=3))}),
)


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(asked=BODIES)
def test_whatever_is_asked(servers: tuple[InlineServer, InlineServer, TextProcessor], asked: Asked) -> None:
    plain, drafting, text = servers
    (whole,) = plain.ask(asked)
    (with_drafts,) = drafting.ask(asked)
    options = {"include_usage": True, "continuous_usage_stats": True}
    streams = [server.stream(asked.having(stream_options=options))[0] for server in (plain, drafting)]
    told = parts_of(whole)
    assert differences(told, parts_of(with_drafts)) <= {"head"}
    for chunks in streams:
        assert differences(told, parts_of(joined(chunks))) <= {"head"}
        check_running_usage(chunks)
    check_usage(asked, whole)
    for choice in whole["choices"]:
        check_tokens(asked, choice, text)


def prompts_of(asked: Asked) -> int:
    prompt = asked.fields.get("prompt")
    return len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], (str, list)) else 1


def check_usage(asked: Asked, whole: dict[str, Any]) -> None:
    usage, choices, n = whole["usage"], whole["choices"], asked.fields.get("n", 1)
    assert [choice["index"] for choice in choices] == list(range(prompts_of(asked) * n))
    if prompts_of(asked) > 1:
        assert all(choice["prompt_token_ids"] == choices[i - i % n]["prompt_token_ids"] for i, choice in enumerate(choices))
        num_prompt = sum(len(choice["prompt_token_ids"]) for choice in choices[::n])
    else:
        num_prompt = len(whole["prompt_token_ids"])
    assert usage["prompt_tokens"] == num_prompt
    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
    check_identities(usage)


def check_identities(usage: dict[str, Any]) -> None:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    assert 0 <= usage["completion_tokens_details"]["reasoning_tokens"] <= usage["completion_tokens"]


def check_running_usage(chunks: Sequence[dict[str, Any]]) -> None:
    """What is counted so far covers what has been sent so far, and never falls."""
    sent, before = 0, 0
    for chunk in chunks:
        check_identities(chunk["usage"])
        sent += sum(len(choice["token_ids"]) for choice in chunk["choices"])
        assert sent <= chunk["usage"]["completion_tokens"] >= before
        before = chunk["usage"]["completion_tokens"]
    assert sent == before


def check_tokens(asked: Asked, choice: dict[str, Any], text: TextProcessor) -> None:
    ids, limit = choice["token_ids"], asked.fields["max_tokens"]
    assert 1 <= len(ids) <= limit
    assert choice["finish_reason"] != "length" or len(ids) == limit
    stop, stops = choice["matched_stop"], asked.fields.get("stop_token_ids", [])
    assert not isinstance(stop, int) or (ids[-1] == stop and stop in stops)
    assert not set(ids[:-1]) & set(stops) or len(ids) <= asked.fields.get("min_tokens", 0) + 1
    if asked.route == CHAT_ROUTE:
        entries = choice["logprobs"]["content"]
        assert [(entry["token"], bytes(entry["bytes"])) for entry in entries] == [text.token_text(i) for i in ids]
        for entry in entries:
            best = [top["logprob"] for top in entry["top_logprobs"]]
            assert len(best) == 2 and best == sorted(best, reverse=True) and entry["logprob"] <= best[0] <= 0
        return
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {len(ids)}
    assert logprobs["tokens"] == [text.token_text(i)[0] for i in ids]
    assert all(
        logprob <= max(top.values()) <= 0
        for logprob, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    )
    decoder, raw = text.decoder(), ""
    for token_id, offset in zip(ids, logprobs["text_offset"], strict=True):
        assert offset == len(raw)
        raw += decoder.push(token_id)
    assert raw.startswith(choice["text"])
    keeps = asked.fields.get("include_stop_str_in_output", False)
    if isinstance(stop, str):
        end = choice["text"] if keeps else choice["text"] + stop
        assert end.endswith(stop) and raw.startswith(end)
    elif stop is None or keeps:
        assert choice["text"] == raw
