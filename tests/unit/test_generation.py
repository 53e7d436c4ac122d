"""Answers and streams over HTTP, from a scripted instance."""

# ruff: noqa: E501 - tables

import asyncio
import json
import random

import httpx
import openai
import pytest

from longcat_pd.errors import EngineFault, Overloaded, RankLost, TransferFailed
from longcat_pd.server.text import TextProcessor
from tests.unit.fake_service import EOS, FakeService, events_of, folded, make_app, plays, write_folder

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}
THINK = "Let me see.\n</longcat_think>\n"
XML = (
    "<longcat_tool_call>f\n<longcat_arg_key>x</longcat_arg_key>\n<longcat_arg_value>1</longcat_arg_value>\n"
    "</longcat_tool_call>"
)
KEEP = {"include_stop_str_in_output": True}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(folder):
    return TextProcessor.load(folder)


def ids_of(text, content, *, eos=True):
    return [*text.encode(content), *([EOS] if eos else [])]


def client_of(service, **front):
    transport = httpx.ASGITransport(make_app(service, **front))
    return httpx.AsyncClient(transport=transport, base_url="http://face")


async def post(service, route, body, headers=None, **front):
    async with client_of(service, **front) as client:
        return await client.post(route, json=body, headers=headers)


async def test_a_chat_answer_has_exactly_this_form(folder, text):
    service = FakeService(folder, plays(ids_of(text, "Hello 你好")))
    answer = await post(service, CHAT, {"messages": [USER], "max_tokens": 50}, {"X-Request-Id": "r-1"})
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"] == "r-1"
    record = answer.json()
    assert isinstance(record.pop("created"), int) and record.pop("system_fingerprint").startswith("fp_")
    num_tokens = len(ids_of(text, "Hello 你好"))
    num_prompt = len(service.requests[0].prompt_token_ids)
    message = {"role": "assistant", "content": "Hello 你好", "reasoning_content": None, "tool_calls": None}
    assert record == {
        "id": "chatcmpl-r-1",
        "object": "chat.completion",
        "model": "tiny",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "matched_stop": None}],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt + num_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }
    assert "你好".encode() in answer.content and b"\n" not in answer.content and b'": ' not in answer.content


async def test_a_chat_stream_has_exactly_these_chunks(folder, text):
    service = FakeService(folder, plays(ids_of(text, "ab")))
    body = {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}}
    answer = await post(service, CHAT, body, {"X-Request-Id": "r-2"})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-accel-buffering"] == "no"
    assert "content-length" not in answer.headers and answer.headers["x-request-id"] == "r-2"
    *chunks, done = events_of(answer.content)
    assert done == "[DONE]"
    heads = {(c["id"], c["object"], c["created"], c["model"], c["system_fingerprint"]) for c in chunks}
    assert len(heads) == 1 and next(iter(heads))[:2] == ("chatcmpl-r-2", "chat.completion.chunk")
    role, *middle, last, usage = chunks
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    assert role["choices"] == [opening] and role["usage"] is None
    assert all(set(c["choices"][0]["delta"]) == {"content"} and c["usage"] is None for c in middle)
    assert "".join(c["choices"][0]["delta"]["content"] for c in middle) == "ab"
    ending = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "matched_stop": None}
    assert last["choices"] == [ending]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == len(ids_of(text, "ab"))


async def test_a_completions_answer_and_stream(folder, text):
    ids = ids_of(text, "once upon a time", eos=False)
    body = {"prompt": "There was", "max_tokens": 3}
    whole = (await post(FakeService(folder, plays(ids)), COMPLETIONS, body)).json()
    assert (whole["object"], whole["id"][:5]) == ("text_completion", "cmpl-")
    expected = text.raw(ids[:3])
    assert whole["choices"] == [
        {"index": 0, "text": expected, "logprobs": None, "finish_reason": "length", "matched_stop": None}
    ]
    answer = await post(FakeService(folder, plays(ids)), COMPLETIONS, {**body, "stream": True})
    *chunks, done = events_of(answer.content)
    assert done == "[DONE]" and {c["object"] for c in chunks} == {"text_completion"}
    assert all("usage" not in c for c in chunks)
    assert "".join(c["choices"][0]["text"] for c in chunks) == expected
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]


USAGES = [
    ({}, "absent", False),
    ({"include_usage": False, "continuous_usage_stats": True}, "absent", False),
    ({"include_usage": True}, None, True),
    ({"include_usage": True, "continuous_usage_stats": False}, None, True),
    ({"include_usage": True, "continuous_usage_stats": True}, "running", True),
]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("options,on_chunks,has_last", USAGES)
async def test_usage_in_streams(folder, text, route, options, on_chunks, has_last):
    body = {"messages": [USER], "prompt": "hi", "stream": True, "stream_options": options, "max_tokens": 4}
    answer = await post(FakeService(folder, plays(ids_of(text, "abcdefgh"))), route, body)
    *chunks, _ = events_of(answer.content)
    assert (chunks[-1]["choices"] == []) is has_last
    seen = [c.get("usage", "absent") for c in (chunks[:-1] if has_last else chunks)]
    if on_chunks == "running":
        counts = [u["completion_tokens"] for u in seen]
        assert counts == sorted(counts) and counts[-1] == 4 == chunks[-1]["usage"]["completion_tokens"]
    else:
        assert set(seen) == {on_chunks}


CASES = [
    # fields, generated text, content, reasoning, calls, finish, matched
    ({}, "plain", "plain", "", 0, "stop", None),
    ({"enable_thinking": True}, THINK + "answer", "answer", "Let me see.", 0, "stop", None),
    ({"enable_thinking": True, "separate_reasoning": False}, THINK + "answer", THINK + "answer", "", 0, "stop", None),
    ({"enable_thinking": True}, "never closed", "", "never closed", 0, "stop", None),
    ({"tools": [TOOL]}, "Hi " + XML, "Hi ", "", 1, "tool_calls", None),
    ({"tools": [TOOL]}, XML + "\n" + XML, "", "", 2, "tool_calls", None),
    ({"tools": [TOOL], "parallel_tool_calls": False}, XML + " and " + XML, "", "", 1, "tool_calls", None),
    ({"tools": [TOOL], "stop": "END"}, XML + " x END y", " x ", "", 1, "stop", "END"),
    ({"tools": [TOOL], "tool_choice": "none"}, XML, XML, "", 0, "stop", None),
    ({}, XML, XML, "", 0, "stop", None),
    ({"tools": [TOOL], "enable_thinking": True}, f"a {XML}</longcat_think>b", "b", f"a {XML}", 0, "stop", None),
    ({"stop": ["wor", "lo w"]}, "hello world", "hel", "", 0, "stop", "lo w"),
    ({"stop": "</longcat_think>", "enable_thinking": True}, THINK + "b", "", "Let me see.\n", 0, "stop", "</longcat_think>"),
    ({"stop": "zzz"}, "buzz", "buzz", "", 0, "stop", None),
    ({"max_tokens": 2}, "ab龘 龘龘", "ab", "", 0, "length", None),
    ({**KEEP, "stop": ["wor", "lo w"]}, "hello world", "hello w", "", 0, "stop", "lo w"),
    ({**KEEP, "stop": "zzz"}, "buzz", "buzz", "", 0, "stop", None),
    ({**KEEP, "stop": "see"}, THINK + "b", "Let me see", "", 0, "stop", "see"),
    ({**KEEP, "stop": "see", "enable_thinking": True}, THINK + "b", "", "Let me see", 0, "stop", "see"),
    ({**KEEP, "stop": "</longcat_think>", "enable_thinking": True}, THINK + "b", "", "Let me see.", 0, "stop", "</longcat_think>"),
    ({**KEEP, "stop": "think>\na", "enable_thinking": True}, THINK + "ab", "a", "Let me see.", 0, "stop", "think>\na"),
    ({**KEEP, "tools": [TOOL], "stop": "END"}, XML + " x END y", " x END", "", 1, "stop", "END"),
    ({**KEEP, "tools": [TOOL], "stop": "</longcat_tool_call>"}, XML + " x", "", "", 1, "stop", "</longcat_tool_call>"),
    ({"tools": [TOOL], "stop": "</longcat_tool_call>"}, "Hi " + XML, "Hi ", "", 1, "stop", "</longcat_tool_call>"),
]  # fmt: skip


@pytest.mark.parametrize("group", [1, 2, 3, 50])
@pytest.mark.parametrize("fields,generated,content,reasoning,calls,finish,matched", CASES)
async def test_streamed_is_not_streamed(folder, text, group, fields, generated, content, reasoning, calls, finish, matched):
    body = {"messages": [USER], "max_tokens": 200, **fields}
    whole = (await post(FakeService(folder, plays(ids_of(text, generated), group=group)), CHAT, body)).json()
    service = FakeService(folder, plays(ids_of(text, generated), group=group))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, done = events_of((await post(service, CHAT, {**body, **options})).content)
    assert done == "[DONE]" and service.num_running == 0
    [choice], [streamed] = whole["choices"], folded(chunks).values()
    message = choice["message"]
    assert (message["content"] or "", message["reasoning_content"] or "") == (content, reasoning)
    assert (message["content"] is None) == (calls > 0 and not content)
    assert (choice["finish_reason"], choice["matched_stop"]) == (finish, matched)
    assert [json.loads(c["function"]["arguments"]) for c in message["tool_calls"] or []] == [{"x": 1}] * calls
    assert all(c["id"].startswith("call_") and len(c["id"]) == 29 for c in message["tool_calls"] or [])
    assert (streamed["content"], streamed["reasoning_content"]) == (content, reasoning)
    assert (streamed["finish_reason"], streamed["matched_stop"]) == (finish, matched)
    assert streamed["tool_calls"] == [c["function"] for c in message["tool_calls"] or []]
    assert chunks[-1]["usage"] == whole["usage"]


JSON_CALL = '<longcat_tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</longcat_tool_call>'


@pytest.mark.parametrize(
    "variant,named,generated,num_calls",
    [
        ("chat", {}, JSON_CALL, 1),
        ("chat", {}, XML, 0),
        ("2.0", {}, XML, 1),
        ("2.0", {"tool_parser": "longcat"}, JSON_CALL, 1),
        ("2.0", {"tool_parser": "none"}, XML, 0),
        ("chat", {"tool_parser": "longcat_xml"}, XML, 1),
    ],
)
async def test_which_markup_is_read(tmp_path, variant, named, generated, num_calls):
    folder = write_folder(tmp_path / "m", variant)
    ids = ids_of(TextProcessor.load(folder), generated)
    body = {"messages": [USER], "tools": [TOOL], "max_tokens": 200}
    [choice] = (await post(FakeService(folder, plays(ids), **named), CHAT, body)).json()["choices"]
    assert len(choice["message"]["tool_calls"] or []) == num_calls
    assert (choice["message"]["content"] is None) == bool(num_calls)


@pytest.mark.parametrize(
    "variant,named,is_read",
    [
        ("2.0", {}, True),
        ("2.0", {"reasoning_parser": "none"}, False),
        ("chat", {}, False),
        ("chat", {"reasoning_parser": "longcat"}, True),
    ],
)
async def test_whether_reasoning_is_read(tmp_path, variant, named, is_read):
    folder = write_folder(tmp_path / "m", variant)
    ids = ids_of(TextProcessor.load(folder), "<longcat_think>\nwhy\n</longcat_think>\nyes")
    [choice] = (await post(FakeService(folder, plays(ids), **named), CHAT, {"messages": [USER]})).json()["choices"]
    assert choice["message"]["reasoning_content"] == ("why" if is_read else None)


async def test_counts_end_at_the_token_that_completes_the_stop(folder, text):
    ids = ids_of(text, "one two three four")
    end = next(i for i in range(len(ids)) if "two" in text.raw(ids[: i + 1])) + 1
    service = FakeService(folder, plays(ids, group=len(ids)))
    body = {"prompt": "x", "stop": "two", "max_tokens": 99, "return_token_ids": True, "logprobs": 1}
    answer = (await post(service, COMPLETIONS, body)).json()
    [choice] = answer["choices"]
    assert choice["text"] == "one " and choice["token_ids"] == ids[:end]
    assert answer["usage"]["completion_tokens"] == end == len(choice["logprobs"]["tokens"])


@pytest.mark.parametrize("fields,matched", [({"stop_token_ids": [300]}, 300), ({}, None)])
async def test_stop_tokens(folder, text, fields, matched):
    service = FakeService(folder, plays([*text.encode("a"), 300, EOS]))
    answer = (await post(service, COMPLETIONS, {"prompt": "x", **fields})).json()
    [choice] = answer["choices"]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", matched)
    assert choice["text"] == ("a" if matched else "a" + text.raw([300]))
    assert answer["usage"]["completion_tokens"] == (2 if matched else 3)


@pytest.mark.parametrize("group", [1, 2, 9])
@pytest.mark.parametrize(
    "fields,kept,cut,matched",
    [
        ({"stop": "two"}, "one two", "one ", "two"),
        ({"stop": ["e t", "wo"]}, "one t", "on", "e t"),
        ({"stop_token_ids": [301]}, None, None, 301),  # its text
        ({"stop_token_ids": [301], "stop": "its end"}, None, None, 301),  # which is not looked into
        ({"stop_token_ids": [EOS]}, None, None, EOS),  # has no text
        ({}, None, None, None),
    ],
)
async def test_what_stopped_the_answer_stays_in_its_text(folder, text, group, fields, kept, cut, matched):
    ids = [*text.encode("one two "), 301, EOS] if fields.get("stop_token_ids") == [301] else ids_of(text, "one two three")
    stop = text.raw([301]) if matched == 301 else ""
    if fields.get("stop") == "its end":
        fields = {**fields, "stop": stop[-1]}
        assert len(stop) > 1 and stop[-1] not in "one two "
    kept, cut = kept or text.raw(ids[:-1]), cut or text.raw(ids[:-1]).removesuffix(stop)
    answers = {}
    for keep in (True, False):
        body = {"prompt": "x", "logprobs": 1, "return_token_ids": True, "include_stop_str_in_output": keep, **fields}
        service = FakeService(folder, plays(ids, group=group))
        answers[keep] = (await post(service, COMPLETIONS, body, {"X-Request-Id": "r"})).json()
        service = FakeService(folder, plays(ids, group=group))
        *chunks, _ = events_of((await post(service, COMPLETIONS, {**body, "stream": True})).content)
        assert folded(chunks)[0]["content"] == answers[keep]["choices"][0]["text"]
        answers[keep]["created"] = 0
    texts = [answers[keep]["choices"][0].pop("text") for keep in (True, False)]
    assert texts == [kept, cut] and answers[True] == answers[False], "the text changes and nothing else"
    assert answers[True]["choices"][0]["matched_stop"] == matched


async def test_the_last_permitted_token_can_be_a_stop(folder, text):
    service = FakeService(folder, plays(ids_of(text, "a!")))
    answer = (await post(service, COMPLETIONS, {"prompt": "x", "max_tokens": 2, "stop": "!"})).json()
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_reasoning_tokens_count_to_the_closing_tag(folder, text):
    thought = text.encode("Let me see.\n</longcat_think>")
    service = FakeService(folder, plays([*thought, *ids_of(text, "\nanswer")]))
    answer = (await post(service, CHAT, {"messages": [USER], "enable_thinking": True})).json()
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(thought)


async def test_log_probs_of_chat(folder, text):
    ids = ids_of(text, "a龘")
    body = {"messages": [USER], "logprobs": True, "top_logprobs": 2}
    whole = (await post(FakeService(folder, plays(ids)), CHAT, body)).json()
    entries = whole["choices"][0]["logprobs"]["content"]
    assert [set(e) for e in entries] == [{"token", "logprob", "bytes", "top_logprobs"}] * len(ids)
    assert entries[0]["token"] == "a" and entries[0]["bytes"] == [97] and entries[0]["logprob"] == -0.5
    assert entries[1]["token"].startswith("bytes:\\x")
    assert b"".join(bytes(e["bytes"]) for e in entries[:-1]).decode() == "a龘"
    assert [len(e["top_logprobs"]) for e in entries] == [2] * len(ids)
    *chunks, _ = events_of((await post(FakeService(folder, plays(ids)), CHAT, {**body, "stream": True})).content)
    streamed = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == entries and chunks[0]["choices"][0]["logprobs"] is None


async def test_log_probs_of_completions(folder, text):
    ids = ids_of(text, "ab龘c")
    body = {"prompt": "x", "logprobs": 2}
    whole = (await post(FakeService(folder, plays(ids)), COMPLETIONS, body)).json()["choices"][0]["logprobs"]
    assert set(whole) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(values) for values in whole.values()} == {len(ids)}
    assert whole["text_offset"] == [len(text.raw(ids[:i])) for i in range(len(ids))]
    *chunks, _ = events_of((await post(FakeService(folder, plays(ids)), COMPLETIONS, {**body, "stream": True})).content)
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert {name: [v for part in parts for v in part[name]] for name in whole} == whole
    none = (await post(FakeService(folder, plays(ids)), COMPLETIONS, {**body, "logprobs": 0})).json()
    assert [len(top) for top in none["choices"][0]["logprobs"]["top_logprobs"]] == [1] * len(ids)


async def test_ids_in_and_out(folder, text):
    ids = [300, 301, EOS]
    body = {"prompt": [5, 6, 7], "return_token_ids": True}
    whole = (await post(FakeService(folder, plays(ids)), COMPLETIONS, body)).json()
    assert whole["prompt_token_ids"] == [5, 6, 7] and whole["choices"][0]["token_ids"] == ids
    for route in (COMPLETIONS, CHAT):
        service = FakeService(folder, plays(ids))
        answer = await post(service, route, {**body, "messages": [USER], "stream": True})
        *chunks, _ = events_of(answer.content)
        assert [i for c in chunks for i in c["choices"][0]["token_ids"]] == ids
        assert [("prompt_token_ids" in c) for c in chunks] == [True] + [False] * (len(chunks) - 1)
        assert chunks[0]["prompt_token_ids"] == list(service.requests[0].prompt_token_ids)


async def test_a_checkpoint_without_tokenizer(tmp_path):
    folder = write_folder(tmp_path / "m", has_tokenizer=False)
    good = {"prompt": [5, 6], "return_token_ids": True, "logprobs": 1}
    answer = (await post(FakeService(folder, plays([9, EOS])), COMPLETIONS, good)).json()
    assert answer["choices"][0]["token_ids"] == [9, EOS] and answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["logprobs"]["tokens"] == ["token_id:9", "token_id:2"]
    for route, body, param in (
        (COMPLETIONS, {"prompt": "a"}, "prompt"),
        (COMPLETIONS, {**good, "stop": "a"}, "stop"),
        (COMPLETIONS, {"prompt": [5]}, "return_token_ids"),
        (CHAT, {"messages": [USER]}, "messages"),
        ("/tokenize", {"prompt": "a"}, "prompt"),
        ("/detokenize", {"tokens": [5]}, "tokens"),
    ):
        refused = await post(FakeService(folder, plays([EOS])), route, body)
        assert refused.status_code == 400
        assert (refused.json()["error"]["code"], refused.json()["error"]["param"]) == ("tokenizer_missing", param)


async def test_ids_stream_without_a_text(tmp_path):
    folder = write_folder(tmp_path / "m", has_tokenizer=False)
    body = {"prompt": [5, 6], "return_token_ids": True, "stream": True}
    *chunks, _ = events_of((await post(FakeService(folder, plays([9, 8, 7, EOS])), COMPLETIONS, body)).content)
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[9], [8], [7], [EOS]]
    assert {chunk["choices"][0]["text"] for chunk in chunks} == {""}


async def test_what_the_engine_is_asked(folder, text):
    service = FakeService(folder, plays([EOS]))
    body = {"prompt": [5], "temperature": 0, "top_p": 0.5, "top_k": 7, "seed": -3, "n": 2, "stop_token_ids": [9]}
    await post(
        service, COMPLETIONS, body | {"ignore_eos": True, "logprobs": 4, "max_tokens": 6}, {"X-Request-Timeout": "5"}
    )
    first, second = service.requests
    assert (first.sampling.choice, second.sampling.choice) == (0, 1)
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.0, 0.5, 7, -3)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.num_logprobs, sampling.max_tokens) == ((9,), True, 4, 6)
    assert first.transfer is None and first.prompt_token_ids == (5,)
    assert 0 < first.deadline - service.now() <= 5


async def test_defaults_of_the_checkpoint(tmp_path):
    folder = write_folder(tmp_path / "m", temperature=0.7, top_p=0.95, top_k=11)
    service = FakeService(folder, plays([EOS]), default_max_tokens=40)
    await post(service, CHAT, {"messages": [USER], "n": 2})
    first, second = (request.sampling for request in service.requests)
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens) == (0.7, 0.95, 11, 40)
    assert first.seed == second.seed
    await post(service, COMPLETIONS, {"prompt": [5], "temperature": 1, "top_k": -1})
    assert service.requests[-1].sampling.temperature == 1.0 and service.requests[-1].sampling.top_k == 0
    assert service.requests[-1].sampling.max_tokens == 16 and service.requests[-1].sampling.seed != first.seed


async def test_the_length_of_the_context(folder):
    service = FakeService(folder, plays([EOS], group=1), default_max_tokens=1000)
    await post(service, CHAT, {"messages": [USER]})
    assert service.requests[0].sampling.max_tokens == 512 - len(service.requests[0].prompt_token_ids)
    assert (await post(service, COMPLETIONS, {"prompt": [5] * 500, "max_tokens": 12})).status_code == 200
    for prompt, max_tokens in (([5] * 500, 13), ([5] * 512, 1), ([5] * 600, None)):
        answer = await post(service, COMPLETIONS, {"prompt": prompt, "max_tokens": max_tokens})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
        assert "context_length_exceeded: this model's maximum context length is " in error["message"]  # clients look for it
        assert (
            str(len(prompt)) in error["message"] and str(max_tokens or 16) in error["message"] and "512" in error["message"]
        )
    long_chat = await post(service, CHAT, {"messages": [{"role": "user", "content": "word " * 2000}]})
    assert long_chat.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "route,body,param",
    [
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": [1024]}, "prompt[0]"),
        (COMPLETIONS, {"prompt": [5], "stop_token_ids": [5, 4000]}, "stop_token_ids[1]"),
    ],
)
async def test_what_needs_the_vocabulary(folder, route, body, param):
    service = FakeService(folder, plays([EOS]))
    error = (await post(service, route, body)).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", param) and service.requests == []


async def test_several_choices(folder, text):
    async def script(request):
        content = "first" if request.sampling.choice == 0 else "other"
        async for delta in plays(ids_of(text, content))(request):
            yield delta

    body = {"messages": [USER], "n": 3, "max_tokens": 60}
    whole = (await post(FakeService(folder, script), CHAT, body)).json()
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
    assert [c["message"]["content"] for c in whole["choices"]] == ["first", "other", "other"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, _ = events_of((await post(FakeService(folder, script), CHAT, {**body, **options})).content)
    assert {i: c["content"] for i, c in folded(chunks).items()} == {0: "first", 1: "other", 2: "other"}
    assert chunks[-1]["usage"] == whole["usage"]
    roles = [c["choices"][0]["index"] for c in chunks[:-1] if "role" in c["choices"][0]["delta"]]
    assert sorted(roles) == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_choice_that_fails_fails_all_and_leaves_nothing(folder, text, stream):
    async def script(request):
        if request.sampling.choice == 1:
            raise Overloaded("no room", retry_after_s=7)
        await asyncio.Event().wait()
        yield

    service = FakeService(folder, script)
    answer = await post(service, CHAT, {"messages": [USER], "n": 3, "stream": stream})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "7"
    assert answer.json()["error"]["code"] == "overloaded" and service.num_running == 0


ERRORS = [
    (Overloaded("full"), 503, "overloaded", "true"),
    (RankLost("rank 3 has ended"), 500, "rank_lost", "true"),
    (TransferFailed("lanes"), 502, "transfer_failed", "true"),
    (EngineFault("Traceback /secret/path"), 500, "engine_fault", "false"),
    (ZeroDivisionError("/secret/path"), 500, "engine_fault", "false"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error,status,code,retry", ERRORS)
async def test_before_the_first_byte_an_error_is_a_status(folder, stream, error, status, code, retry):
    async def script(request):
        raise error
        yield

    service = FakeService(folder, script)
    answer = await post(service, CHAT, {"messages": [USER], "stream": stream}, {"X-Request-Id": "r-9"})
    assert answer.status_code == status and answer.headers["content-type"] == "application/json"
    assert answer.headers["x-should-retry"] == retry and answer.headers["x-request-id"] == "r-9"
    assert "x-longcat-cause" not in answer.headers
    record = answer.json()["error"]
    assert set(record) == {"message", "type", "param", "code"}
    assert (record["type"], record["code"], record["param"]) == ("server_error", code, None)
    assert "r-9" in record["message"] and "secret" not in record["message"]


@pytest.mark.parametrize("error,status,code,retry", ERRORS)
async def test_in_a_stream_an_error_is_the_last_event(folder, text, error, status, code, retry):
    async def script(request):
        async for delta in plays(text.encode("some text"))(request):
            yield delta
            break
        raise error

    service = FakeService(folder, script)
    answer = await post(service, CHAT, {"messages": [USER], "stream": True})
    assert answer.status_code == 200
    *chunks, last = events_of(answer.content)
    assert len(chunks) >= 2 and last["error"]["code"] == code and "[DONE]" not in chunks
    assert (await post(FakeService(folder, script), CHAT, {"messages": [USER]})).status_code == status


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline(folder, stream):
    async def script(request):
        await asyncio.Event().wait()
        yield

    service = FakeService(folder, script)
    answer = await post(service, CHAT, {"messages": [USER], "stream": stream}, {"X-Request-Timeout": "0.05"})
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "deadline_exceeded"
    assert answer.headers["x-should-retry"] == "false" and service.num_running == 0


async def test_silence_can_be_filled_with_comments(folder, text):
    async def script(request):
        await asyncio.sleep(0.5)
        async for delta in plays(ids_of(text, "x"))(request):
            yield delta

    service = FakeService(folder, script)
    answer = await post(service, CHAT, {"messages": [USER], "stream": True}, keepalive_comment_s=0.02)
    assert answer.content.startswith(b": keep-alive\n\n")
    assert events_of(answer.content.replace(b": keep-alive\n\n", b""))[-1] == "[DONE]"

    async def broken(request):
        await asyncio.sleep(0.5)
        raise RankLost("rank 0")
        yield

    answer = await post(FakeService(folder, broken), CHAT, {"messages": [USER], "stream": True}, keepalive_comment_s=0.02)
    assert answer.status_code == 200 and answer.content.endswith(b"}}\n\n") and b"rank_lost" in answer.content


async def test_the_first_byte_leaves_with_the_first_token(folder, text):
    go = asyncio.Event()

    async def script(request):
        await go.wait()
        async for delta in plays(ids_of(text, "龘"))(request):
            yield delta

    sent = []

    async def send(message):
        sent.append(message)

    messages = [{"type": "http.request", "body": json.dumps({"prompt": "x", "stream": True}).encode()}]

    async def receive():
        if messages:
            return messages.pop()
        return await asyncio.Event().wait()

    scope = {
        "type": "http",
        "method": "POST",
        "path": COMPLETIONS,
        "headers": [],
        "query_string": b"",
        "http_version": "1.1",
    }
    task = asyncio.create_task(make_app(FakeService(folder, script))(scope, receive, send))
    await asyncio.sleep(0.03)
    assert sent == []
    go.set()
    await task
    first = json.loads(sent[1]["body"][6:])
    assert first["choices"][0]["text"] == "" and first["choices"][0]["finish_reason"] is None


async def test_the_openai_client_reads_it(folder, text):
    def sdk(generated):
        transport = httpx.ASGITransport(make_app(FakeService(folder, plays(ids_of(text, generated)))))
        http = httpx.AsyncClient(transport=transport, base_url="http://face")
        return openai.AsyncOpenAI(api_key="none", base_url="http://face/v1", http_client=http, max_retries=0)

    async with sdk(THINK + "Hi " + XML) as client:
        extra = {"enable_thinking": True}
        answer = await client.chat.completions.create(
            model="tiny", messages=[USER], tools=[TOOL], logprobs=True, top_logprobs=1, extra_body=extra
        )
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls[0].function.name == "f"
        assert choice.message.content == "Hi " and len(choice.logprobs.content) == answer.usage.completion_tokens
        stream = await client.chat.completions.create(
            model="tiny", messages=[USER], stream=True, stream_options={"include_usage": True}, extra_body=extra
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hi " + XML
        assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt", messages=[USER])
        completion = await client.completions.create(model="tiny", prompt="x", logprobs=2, max_tokens=4)
        assert completion.choices[0].finish_reason == "length" and len(completion.choices[0].logprobs.tokens) == 4
        models = [m.id async for m in client.models.list()]
        assert models == ["tiny"] and (await client.models.retrieve("tiny")).id == "tiny"


VALID = [
    (CHAT, {"model": "tiny", "messages": [USER, {"role": "assistant", "content": "x", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]}, {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "y"}]}], "tools": [TOOL], "tool_choice": "auto", "temperature": 0.5, "stop": ["a"], "n": 1, "logprobs": True, "top_logprobs": 2, "chat_template_kwargs": {"enable_thinking": True}, "stream_options": {"include_usage": True}, "max_tokens": 5, "seed": 3, "response_format": {"type": "text"}}),
    (COMPLETIONS, {"model": "", "prompt": [5, 6, 7], "max_tokens": 5, "top_k": 3, "top_p": 0.9, "stop_token_ids": [9], "logprobs": 1, "return_token_ids": True, "ignore_eos": False, "stop": "x", "stream": False}),
]  # fmt: skip
ODD = [
    None,
    True,
    False,
    0,
    -1,
    1.5,
    2**70,
    -(2**70),
    1e300,
    "",
    "x",
    "\u0000",
    "😀",
    [],
    [[]],
    [None],
    {},
    {"a": {}},
    {"type": "x"},
]


def places(value, path=()):
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def changed(value, path, draw):
    if not path:
        return draw.choice(ODD)
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], draw)
    if draw.random() < 0.1:
        if isinstance(copy, dict):
            copy.pop(draw.choice(list(copy)))
        else:
            copy.append(draw.choice(ODD))
    return copy


async def test_random_changes_never_end_in_422_or_5xx(folder):
    draw = random.Random(11)
    async with client_of(FakeService(folder, plays([300, EOS]))) as client:
        statuses = set()
        for _ in range(800):
            route, body = draw.choice(VALID)
            for _ in range(draw.randint(1, 3)):
                body = changed(body, draw.choice(list(places(body))), draw) if isinstance(body, dict) else body
            answer = await client.post(route, json=body)
            statuses.add(answer.status_code)
            assert answer.status_code in (200, 400, 404), (body, answer.text)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"} and error["code"]
        assert statuses == {200, 400, 404}
        raw = json.dumps(VALID[0][1]).encode()
        for _ in range(300):
            data = bytearray(raw)
            for _ in range(draw.randint(1, 4)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            answer = await client.post(CHAT, content=bytes(data))
            assert answer.status_code in (200, 400, 404), (bytes(data), answer.text)
