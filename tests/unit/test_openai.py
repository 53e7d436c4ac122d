"""Bodies: every field with its type, range and default, and what is refused."""

# ruff: noqa: E501, SIM905 - tables

import json
import time

import pytest

from longcat_pd.errors import LongcatError
from longcat_pd.server.openai import CHAT_ROUTE, COMPLETIONS_ROUTE, decode_body, read_body

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat(**fields):
    return read_body(CHAT_ROUTE, {"messages": [USER], **fields}, "tiny")


def completion(**fields):
    return read_body(COMPLETIONS_ROUTE, {"prompt": "hi", **fields}, "tiny")


def refusal(read, **fields):
    with pytest.raises(LongcatError) as caught:
        read(**fields)
    error = caught.value
    return error.status, error.code, error.param, error.message


@pytest.mark.parametrize(
    "raw,why",
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"a": 1} x', "not JSON"),
        (b'\xff{"a": 1}', "not UTF-8"),
        (b'{"a": "\xe4\xbd"}', "not UTF-8"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": [-Infinity]}', "Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", ""),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udc00": 1}', "surrogate"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "nested deeper than 64"),
        (b'{"a": ' + b"[" * 100000 + b"]" * 100000 + b"}", "nested deeper than 64"),
        (b"[1]", "object"),
        (b'"x"', "object"),
        (b"null", "object"),
    ],
)
def test_what_is_not_json(raw, why):
    status, code, param, message = refusal(lambda raw: decode_body(raw), raw=raw)
    assert (status, code, param) == (400, "invalid_json", None)
    assert why in message


def test_what_is_json():
    assert decode_body(b'{"a": "\\ud83d\\ude00", "b": "\\u4f60"}') == {"a": "\U0001f600", "b": "你"}
    assert decode_body(b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}")
    assert decode_body(b'{"a": 1, "a": 2}') == {"a": 2}
    assert decode_body(json.dumps({"a": "[" * 500}).encode()) == {"a": "[" * 500}


MANY = b'{"messages": [{"role": "user", "content": "hi"}], "x": [%s]}'


@pytest.mark.parametrize(
    "raw,what",
    [
        (MANY % (b"[]," * (10 << 20) + b"[]"), "10485765 arrays and objects, at most 131072"),
        (MANY % (b"{}," * 140_000 + b"{}"), "arrays and objects, at most 131072"),
        (MANY % (b"[{" + b",".join(b'"k%d":1' % i for i in range(270_000)) + b"}]"), "270004 keys, at most 262144"),
        (MANY % (b'"\\\\",' * (3 << 20) + b"1"), "strings, at most"),
        (MANY % (b"1," * (3 << 20) + b"1"), "values, at most 2097152"),
        (MANY % (b'"\\"[",' + b'"\\\\",[],' * 140_000 + b"1"), "140004 arrays and objects"),
    ],
    ids=["arrays", "objects", "keys", "strings", "values", "between-strings"],
)
def test_what_would_take_long_to_read_is_refused_before(monkeypatch, raw, what):
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was read"))
    begun = time.process_time()
    status, code, param, message = refusal(lambda: decode_body(raw))
    assert (status, code, param) == (400, "invalid_json", None) and what in message
    assert time.process_time() - begun < 2  # 0.16 s of the 6 that reading the first took


def test_what_is_read_of_all_calls_together_is_limited():
    text = json.dumps({"a": [[]] * 30_000})
    calls = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}] * 6
    assert len(chat(messages=[USER, *calls[:5]]).messages) == 6
    refused = refusal(chat, messages=[USER, *calls])
    assert refused[:3] == (400, "invalid_value", "messages[6].tool_calls[0].function.arguments")
    assert "150010 arrays and objects, at most 131072" in refused[3]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": list(range(1_000_000))},
        {"prompt": 'if (a[i], {b: [1, 2]}) \\ " \\" :' * 300_000},
        {"prompt": '\\"[[[{{{:::,,,' * 300_000 + "\\"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "[], {}: ,"}] * 3}] * 20_000},
    ],
    ids=["ids", "source", "troubled", "messages"],
)
def test_what_is_long_and_not_much_is_read(body):
    assert decode_body(json.dumps(body, ensure_ascii=False).encode()) == body


def test_a_message_shows_the_beginning_of_a_long_value():
    begun = time.process_time()
    assert refusal(chat, echo=[[1.5]] * 1_000_000)[3].startswith("echo = [[1.5], [1.5], ")
    assert time.process_time() - begun < 0.5


NUMBERS = [
    # field, good values, values outside the range
    ("max_tokens", [1, 16.0], [0, -1]),
    ("max_completion_tokens", [1, 7], [0]),
    ("temperature", [0, 0.7, 2], [-0.1, 2.1]),
    ("top_p", [0.01, 1, 1.0], [0, 1.5]),
    ("top_k", [-1, 0, 5], [-2]),
    ("min_p", [0, 0.0, 0.5, 1], [-1, 1.1]),
    ("seed", [0, -(2**63), 2**63 - 1], [2**63, -(2**63) - 1]),
    ("n", [1, 8], [0, 9]),
    ("min_tokens", [0, 3, 16.0], [-1]),
    ("frequency_penalty", [0, -2, 1.5, 2], [-2.1, 3]),
    ("presence_penalty", [0.0, -2, 1.5, 2], [-2.1, 3]),
    ("repetition_penalty", [1, 1.0, 0.1, 2], [0, 2.1]),
    ("priority", [0, -100, 7.0, 100], [-101, 101]),
]


@pytest.mark.parametrize("read", [chat, completion])
@pytest.mark.parametrize("name,good,bad", NUMBERS)
def test_numbers(read, name, good, bad):
    for value in [*good, None]:
        read(**{name: value})
    for value in bad:
        status, code, param, message = refusal(read, **{name: value})
        assert (status, code, param) == (400, "invalid_value", name)
        assert str(value) in message and any(c in message for c in ("...", ">=", "<="))
    for value in ("7", True, False, [1], {"a": 1}):
        assert refusal(read, **{name: value})[:3] == (400, "invalid_type", name)
    if name in ("max_tokens", "max_completion_tokens", "top_k", "seed", "n", "min_tokens", "priority"):
        assert refusal(read, **{name: 1.5})[:3] == (400, "invalid_type", name)


@pytest.mark.parametrize("name", ["stream", "ignore_eos", "return_token_ids", "include_stop_str_in_output"])
def test_flags(name):
    for read in (chat, completion):
        for value in (False, True, None):
            read(**{name: value})
        for value in (0, 1, "true", []):
            assert refusal(read, **{name: value})[:3] == (400, "invalid_type", name)


def test_defaults_and_meanings():
    body = completion(temperature=None, stop=None, seed=None)
    assert (body.model, body.max_tokens, body.n, body.stop, body.num_logprobs) == ("tiny", 16, 1, (), None)
    assert (body.temperature, body.top_p, body.top_k, body.seed) == (None, None, None, None)
    assert chat().max_tokens is None
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert completion(max_tokens=5, max_completion_tokens=7.0).max_tokens == 7
    assert chat(top_k=-1).top_k == 0
    assert chat(top_k=10**40).top_k == chat(top_k=2**63).top_k == 2**31 - 1
    assert chat(stop="a").stop == ("a",)
    assert chat(stop=["a", "b"], stop_token_ids=[3, 4.0]).stop_token_ids == (3, 4)
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).num_logprobs == 3
    assert completion(logprobs=0).num_logprobs == 0
    assert completion(logprobs=20).num_logprobs == 20
    options = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert options.include_usage and options.continuous_usage
    assert not chat(stream_options={}).include_usage
    for read in (chat, completion):
        body = read(min_p=0.5, min_tokens=7, presence_penalty=1, frequency_penalty=-1, repetition_penalty=0.5)
        assert (body.min_p, body.min_tokens) == (0.5, 7)
        assert (body.presence_penalty, body.frequency_penalty, body.repetition_penalty) == (1.0, -1.0, 0.5)
        body = read(logit_bias={"7": 1, "007": -100, "3": 0, "9": 0.5, "4": None})
        assert body.logit_bias == ((7, -100.0), (9, 0.5))
        assert read(repetition_penalty=1, presence_penalty=0, logit_bias={}, min_p=0) == read()
        assert (read(priority=-3).priority, read(include_stop_str_in_output=True).include_stop) == (-3, True)
        assert read(priority=0, include_stop_str_in_output=False) == read()
        assert (read(n=3).num_prompts, read(n=3).num_choices) == (1, 3)
    assert refusal(completion, min_tokens=17)[:3] == (400, "invalid_value", "min_tokens")  # of 16 by default
    assert chat(min_tokens=17).min_tokens == 17
    assert chat(parallel_tool_calls=False).parallel_tool_calls is False
    assert chat(separate_reasoning=False).separate_reasoning is False


def test_the_model():
    for read in (chat, completion):
        for name in ("tiny", "", None):
            assert read(model=name).model == "tiny"
        assert refusal(read, model="gpt")[:3] == (404, "model_not_found", "model")
        assert refusal(read, model=3)[:3] == (400, "invalid_type", "model")


ROWS = [
    # fields, code, param
    ({"stop": ""}, "invalid_value", "stop"),
    ({"stop": ["a", ""]}, "invalid_value", "stop[1]"),
    ({"stop": ["a" * 1025]}, "invalid_value", "stop[0]"),
    ({"stop": ["a"] * 17}, "invalid_value", "stop"),
    ({"stop": 3}, "invalid_type", "stop"),
    ({"stop": [3]}, "invalid_type", "stop[0]"),
    ({"stop_token_ids": [-1]}, "invalid_value", "stop_token_ids[0]"),
    ({"stop_token_ids": ["3"]}, "invalid_type", "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 65}, "invalid_value", "stop_token_ids"),
    ({"stop_token_ids": 1}, "invalid_type", "stop_token_ids"),
    ({"max_tokens": 5, "min_tokens": 6}, "invalid_value", "min_tokens"),
    ({"logit_bias": {"9" * 21: 1}}, "invalid_value", "logit_bias." + "9" * 21),
    ({"logit_bias": {"-1": 1}}, "invalid_value", "logit_bias.-1"),
    ({"logit_bias": {"5": True}}, "invalid_type", "logit_bias.5"),
    ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias.5"),
    ({"logit_bias": {"x": 1}}, "invalid_value", "logit_bias.x"),
    ({"logit_bias": {"5": "1"}}, "invalid_type", "logit_bias.5"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "invalid_value", "logit_bias"),
    ({"logit_bias": [1]}, "invalid_type", "logit_bias"),
    ({"response_format": {"type": "json_schema"}}, "missing_field", "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "missing_field",
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": []}}, "invalid_type", "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
        "invalid_type",
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": 1, "schema": {}}}},
        "invalid_type",
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"strict": 1, "schema": {}}}},
        "invalid_type",
        "response_format.json_schema.strict",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"description": 1, "schema": {}}}},
        "invalid_type",
        "response_format.json_schema.description",
    ),
    ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
    ({"response_format": {"type": 1}}, "invalid_type", "response_format.type"),
    ({"response_format": {}}, "missing_field", "response_format.type"),
    ({"response_format": "text"}, "invalid_type", "response_format"),
    ({"stream_options": 5}, "invalid_type", "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "invalid_type", "stream_options.include_usage"),
    ({"stream_options": {"continuous_usage_stats": "x"}}, "invalid_type", "stream_options.continuous_usage_stats"),
    ({"best_of": 2}, "unsupported_parameter", "best_of"),
    ({"best_of": "2"}, "invalid_type", "best_of"),
    ({"add_generation_prompt": False}, "unsupported_parameter", "add_generation_prompt"),
    ({"modalities": ["audio"]}, "unsupported_parameter", "modalities"),
    ({"function_call": "auto"}, "unsupported_parameter", "function_call"),
    ({"length_penalty": 0.5}, "unsupported_parameter", "length_penalty"),
    ({"guided_json": {"type": "object"}}, "unsupported_parameter", "guided_json"),
    ({"guided_anything": "x"}, "unsupported_parameter", "guided_anything"),
    *(
        ({name: value}, "unsupported_parameter", name)
        for name in (
            "echo suffix prompt_logprobs functions audio prediction web_search_options chat_template "
            "continue_final_message stop_regex no_stop_trim regex ebnf structured_outputs structural_tag use_beam_search "
            "lora_path session_params custom_logit_processor return_hidden_states"
        ).split()
        for value in (True, 1, "x", ["x"], {"a": 1})
    ),
]


@pytest.mark.parametrize("read", [chat, completion])
@pytest.mark.parametrize("fields,code,param", ROWS)
def test_rows_of_both_routes(read, fields, code, param):
    assert refusal(read, **fields)[:3] == (400, code, param)


INERT = [
    {"echo": False, "suffix": None, "functions": [], "prompt_logprobs": 0, "regex": None, "guided_json": None},
    {"best_of": 1, "modalities": ["text"], "add_generation_prompt": True, "length_penalty": 1.0, "use_beam_search": False},
    {"best_of": 3, "n": 3},
    {"logit_bias": {}, "response_format": {"type": "text"}, "min_tokens": 0, "stop": [], "stop_token_ids": []},
    {"user": "x", "metadata": {"a": 1}, "store": True, "service_tier": "flex", "verbosity": "low"},
    {"safety_identifier": 1, "prompt_cache_key": "k", "prompt_cache_options": {}, "prompt_cache_retention": "24h"},
    {"bootstrap_host": "10.0.0.1", "data_parallel_rank": 3, "resume": {"token_ids": [[1]]}, "unknown": {"deep": [1]}},
    {"stream_options": {"include_usage": None, "other": 1}},
]


@pytest.mark.parametrize("fields", INERT)
def test_what_changes_nothing_is_accepted(fields):
    plain = {"n": fields.get("n")}
    assert chat(**fields) == chat(**plain)
    assert completion(**fields) == completion(**plain)


MESSAGES = [
    # messages, code, param
    (None, "missing_field", "messages"),
    ("hi", "invalid_type", "messages"),
    ([], "invalid_value", "messages"),
    (["hi"], "invalid_type", "messages[0]"),
    ([{"content": "x"}], "missing_field", "messages[0].role"),
    ([{"role": "robot", "content": "x"}], "invalid_value", "messages[0].role"),
    ([{"role": 1, "content": "x"}], "invalid_type", "messages[0].role"),
    ([USER, {"role": "user"}], "missing_field", "messages[1].content"),
    ([{"role": "user", "content": None}], "missing_field", "messages[0].content"),
    ([{"role": "user", "content": 5}], "invalid_type", "messages[0].content"),
    ([{"role": "user", "content": ["x"]}], "invalid_type", "messages[0].content[0]"),
    ([{"role": "user", "content": [{"text": "x"}]}], "missing_field", "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "missing_field", "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "invalid_type", "messages[0].content[0].text"),
    ([USER, USER, {"role": "user", "content": [{"type": "image_url"}]}], "unsupported_content_part", "messages[2].content[0].type"),
    ([{"role": "user", "content": "x", "name": 1}], "invalid_type", "messages[0].name"),
    ([{"role": "assistant", "content": None}], "missing_field", "messages[0].content"),
    ([{"role": "assistant", "content": None, "tool_calls": []}], "missing_field", "messages[0].content"),
    ([{"role": "assistant", "content": "x", "reasoning_content": 1}], "invalid_type", "messages[0].reasoning_content"),
    ([{"role": "assistant", "tool_calls": [1]}], "invalid_type", "messages[0].tool_calls[0]"),
    ([{"role": "assistant", "tool_calls": [{"id": "c"}]}], "missing_field", "messages[0].tool_calls[0].function"),
    ([{"role": "assistant", "tool_calls": [{**CALL, "type": "x"}]}], "invalid_value", "messages[0].tool_calls[0].type"),
    *(
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}], code,
         "messages[0].tool_calls[0].function.arguments")
        for arguments, code in (
            (None, "missing_field"), ({}, "invalid_type"), ("", "invalid_value"), ("[1]", "invalid_value"),
            ('{"a": NaN}', "invalid_value"), ("{", "invalid_value"),
        )
    ),
    ([{"role": "tool", "content": "x"}], "missing_field", "messages[0].tool_call_id"),
]  # fmt: skip


@pytest.mark.parametrize("messages,code,param", MESSAGES)
def test_messages_that_are_refused(messages, code, param):
    assert refusal(chat, messages=messages)[:3] == (400, code, param)


def test_messages_as_the_template_gets_them():
    body = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "why", "audio": None},
            {"role": "tool", "tool_call_id": "c", "content": "42"},
            {"role": "user", "content": "x", "name": "Ann", "extra": 1},
        ]
    )
    assert body.messages == (
        {"role": "system", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "why",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c"},
        {"role": "user", "content": "x"},
    )


CHAT_ROWS = [
    ({"logprobs": 3}, "invalid_type", "logprobs"),
    ({"top_logprobs": 3}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    ({"tools": {}}, "invalid_type", "tools"),
    ({"tools": [TOOL] * 129}, "invalid_value", "tools"),
    ({"tools": [TOOL, TOOL]}, "invalid_value", "tools[1].function.name"),
    ({"tools": [{"function": {"name": "f"}}]}, "missing_field", "tools[0].type"),
    ({"tools": [{"type": "web", "function": {"name": "f"}}]}, "invalid_value", "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "missing_field", "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "missing_field", "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "invalid_value", "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a" * 65}}]}, "invalid_value", "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}, "invalid_type", "tools[0].function.parameters"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"tool_choice": "sometimes"}, "invalid_value", "tool_choice"),
    ({"tool_choice": 1}, "invalid_type", "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "invalid_value", "tool_choice.function.name"),
    ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "unsupported_combination", "response_format"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "invalid_value", "tool_choice.function.name"),
    ({"tools": [TOOL], "tool_choice": {"function": {"name": "f"}}}, "missing_field", "tool_choice.type"),
    ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "unsupported_combination", "response_format"),
    ({"tools": [TOOL], "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "unsupported_combination", "response_format"),
    ({"parallel_tool_calls": 1}, "invalid_type", "parallel_tool_calls"),
    ({"separate_reasoning": "x"}, "invalid_type", "separate_reasoning"),
    ({"enable_thinking": 1}, "invalid_type", "enable_thinking"),
    ({"reasoning_effort": "extreme"}, "invalid_value", "reasoning_effort"),
    ({"reasoning_effort": 1}, "invalid_type", "reasoning_effort"),
    ({"chat_template_kwargs": []}, "invalid_type", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"enable_thinking": 1}}, "invalid_type", "chat_template_kwargs.enable_thinking"),
    ({"chat_template_kwargs": {"save_history_reasoning_content": "x"}}, "invalid_type", "chat_template_kwargs.save_history_reasoning_content"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "unsupported_parameter", "chat_template_kwargs.add_generation_prompt"),
]  # fmt: skip


@pytest.mark.parametrize("fields,code,param", CHAT_ROWS)
def test_rows_of_chat(fields, code, param):
    assert refusal(chat, **fields)[:3] == (400, code, param)


def test_tools_and_switches():
    assert chat(tools=[TOOL]).tools == (TOOL,)
    assert chat(tools=[TOOL], tool_choice="auto").tools == (TOOL,)
    assert chat(tools=[TOOL], tool_choice="none").tools == ()
    assert chat(tools=[], tool_choice="none").tools == ()


def test_calls_that_have_to_come():
    named = {"type": "function", "function": {"name": "f"}}
    for choice, is_forced, name in [
        (None, False, None),
        ("auto", False, None),
        ("required", True, None),
        (named, True, "f"),
    ]:
        use = chat(tools=[TOOL], tool_choice=choice).tool_use
        assert (use.tools, use.is_forced, use.named) == ((TOOL,), is_forced, name)
    assert not chat(tools=[TOOL], tool_choice="none").tool_use.is_forced


@pytest.mark.parametrize("read", [chat, completion])
def test_answers_that_have_to_be_json(read):
    schema = {"type": "array", "items": {"x-note": None}}
    described = {"name": "n", "description": None, "strict": False, "schema": schema}
    assert read(response_format={"type": "json_schema", "json_schema": described}).answer_schema == schema
    assert read(response_format={"type": "json_object"}).answer_schema == {"type": "object"}
    assert read(response_format={"type": "text"}).answer_schema is None
    assert read().answer_schema is None


def test_json_is_fine_where_no_tool_is_shown():
    assert chat(tools=[TOOL], tool_choice="none", response_format={"type": "json_object"}).answer_schema == {
        "type": "object"
    }
    assert chat(tools=[{"type": "function", "function": {"name": "f", "parameters": None}}]).tools
    assert chat(reasoning_effort="none").template_kwargs == {"enable_thinking": False}
    assert chat(reasoning_effort="high").template_kwargs == {"enable_thinking": True}
    assert chat(reasoning_effort="xhigh").template_kwargs == {"enable_thinking": True}
    assert chat(enable_thinking=True, reasoning_effort="none").template_kwargs == {"enable_thinking": True}
    both = chat(enable_thinking=True, chat_template_kwargs={"enable_thinking": False, "other": 3})
    assert both.template_kwargs == {"enable_thinking": False, "other": 3}


PROMPTS = [
    (None, "missing_field", "prompt"),
    (5, "invalid_type", "prompt"),
    ({}, "invalid_type", "prompt"),
    ([], "invalid_value", "prompt"),
    ([[]], "invalid_value", "prompt[0]"),
    ([1, "a"], "invalid_type", "prompt[1]"),
    ([1, True], "invalid_type", "prompt[1]"),
    ([1.5], "invalid_type", "prompt[0]"),
    ([3, -1], "invalid_value", "prompt[1]"),
    (["a", 5], "invalid_type", "prompt[1]"),
    (["a", None], "invalid_type", "prompt[1]"),
    (["a", [3, -1]], "invalid_value", "prompt[1][1]"),
    (["a", [3, "b"]], "invalid_type", "prompt[1][1]"),
    ([[3], "a", []], "invalid_value", "prompt[2]"),
    (["a"] * 65, "invalid_value", "prompt"),
]


@pytest.mark.parametrize("prompt,code,param", PROMPTS)
def test_prompts_that_are_refused(prompt, code, param):
    assert refusal(completion, prompt=prompt)[:3] == (400, code, param)


@pytest.mark.parametrize(
    "prompt,read",
    [
        ("a", {"prompt": "a"}),
        ("", {"prompt": ""}),
        ([1, 2.0], {"prompt": (1, 2)}),
        (["a"], {"prompt[0]": "a"}),
        ([[7]], {"prompt[0]": (7,)}),
        (["a", [7, 8.0], "", "a"], {"prompt[0]": "a", "prompt[1]": (7, 8), "prompt[2]": "", "prompt[3]": "a"}),
        (["a"] * 64, {f"prompt[{i}]": "a" for i in range(64)}),
    ],
)
def test_prompts(prompt, read):
    body = completion(prompt=prompt)
    assert {given.path: given.content for given in body.prompts} == read
    assert (body.num_prompts, body.num_choices) == (len(read), len(read))


def test_prompts_times_n():
    body = completion(prompt=[[5]] * 8, n=8)
    assert (body.num_prompts, body.num_choices) == (8, 64)
    status, code, param, message = refusal(completion, prompt=["a"] * 9, n=8)
    assert (status, code, param) == (400, "invalid_value", "prompt")
    assert "9 prompts with n = 8 make 72 choices" in message and "64" in message


@pytest.mark.parametrize("value", [21, -1])
def test_logprobs_of_completions(value):
    assert refusal(completion, logprobs=value)[:3] == (400, "invalid_value", "logprobs")
    assert refusal(completion, logprobs=True)[:3] == (400, "invalid_type", "logprobs")
