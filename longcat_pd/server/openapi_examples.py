"""Examples of the API: bodies that are accepted as they stand, and answers as they come."""

from __future__ import annotations

import json
from typing import Any

from longcat_pd.server.openai import CHAT_ROUTE, COMPLETIONS_ROUTE

_HELLO = {"role": "user", "content": "你好, who are you?"}
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Beijing"}'}}

REQUESTS: dict[str, dict[str, Any]] = {
    CHAT_ROUTE: {
        "plain": {"messages": [_HELLO], "max_tokens": 64, "temperature": 0.7},
        "stream": {
            "model": "",
            "messages": [{"role": "system", "content": "Be brief."}, _HELLO],
            "max_tokens": 64,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        "tools": {
            "messages": [{"role": "user", "content": "Is it warm in Beijing?"}],
            "tools": [_WEATHER],
            "tool_choice": "auto",
            "max_tokens": 256,
        },
        "results of tools": {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Is it warm in Beijing?"}]},
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "31 degrees"},
            ],
            "tools": [_WEATHER],
            "parallel_tool_calls": False,
            "chat_template_kwargs": {"enable_thinking": False, "save_history_reasoning_content": True},
            "max_tokens": 64,
        },
        "a forced call": {
            "messages": [{"role": "user", "content": "Is it warm in Beijing?"}],
            "tools": [_WEATHER],
            "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
            "max_tokens": 128,
        },
        "reasoning": {
            "messages": [{"role": "user", "content": "17 * 23?"}],
            "reasoning_effort": "high",
            "max_tokens": 512,
            "seed": 7,
        },
        "a schema": {
            "messages": [{"role": "user", "content": "Name a city and its country."}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "city",
                    "schema": {
                        "type": "object",
                        "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
                        "required": ["city", "country"],
                        "additionalProperties": False,
                    },
                },
            },
            "max_tokens": 128,
        },
        "log-probabilities": {
            "messages": [_HELLO],
            "max_completion_tokens": 8,
            "logprobs": True,
            "top_logprobs": 2,
            "logit_bias": {"5": -100},
        },
    },
    COMPLETIONS_ROUTE: {
        "text": {"prompt": "A long river", "max_tokens": 32, "temperature": 0, "stop": ["\n\n"]},
        "token ids": {
            "prompt": [5, 6, 7, 8],
            "max_tokens": 4,
            "return_token_ids": True,
            "logprobs": 1,
            "ignore_eos": True,
            "stop_token_ids": [9],
        },
        "stream": {
            "prompt": "A long river",
            "max_tokens": 16,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "response_format": {"type": "text"},
        },
        "a schema": {
            "prompt": "A city as JSON: ",
            "max_tokens": 64,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"type": "object", "properties": {"city": {"type": "string"}}}},
            },
        },
        "several prompts": {"prompt": ["A long river", "A high mountain"], "n": 2, "seed": 1, "max_tokens": 8},
    },
    "/tokenize": {
        "text": {"prompt": "你好 hello", "add_special_tokens": False},
        "conversation": {"messages": [_HELLO], "tools": [_WEATHER], "chat_template_kwargs": {"enable_thinking": True}},
    },
    "/detokenize": {"ids": {"tokens": [5, 60, 700]}},
    "/admin/drain": {"this server": {}},
    "/admin/undrain": {"this server": {}},
}

_HEAD = {"created": 1767225600, "model": "longcat-2.0", "system_fingerprint": "fp_3c1e09d2"}
_USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": 3,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
_ENDED = {"finish_reason": "stop", "matched_stop": None}


def stream_of(*chunks: dict[str, Any]) -> str:
    """Events as they are sent, with the last line of a complete answer."""
    data = [json.dumps(chunk, ensure_ascii=False, separators=(",", ":")) for chunk in chunks]
    return "".join(f"data: {text}\n\n" for text in [*data, "[DONE]"])


def _chat_chunk(delta: dict[str, Any], end: dict[str, Any] | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, **(end or {"finish_reason": None})}
    return {"id": "chatcmpl-9f2c", "object": "chat.completion.chunk", **_HEAD, "choices": [choice], "usage": None}


def _text_chunk(text: str, end: dict[str, Any] | None = None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, **(end or {"finish_reason": None})}
    return {"id": "cmpl-9f2c", "object": "text_completion", **_HEAD, "choices": [choice]}


def _message(content: str | None, calls: list[dict[str, Any]] | None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "reasoning_content": None, "tool_calls": calls}


ANSWERS: dict[str, dict[str, Any]] = {
    CHAT_ROUTE: {
        "text": {
            "id": "chatcmpl-9f2c",
            "object": "chat.completion",
            **_HEAD,
            "choices": [{"index": 0, "message": _message("I am LongCat.", None), "logprobs": None, **_ENDED}],
            "usage": _USAGE,
        },
        "a call": {
            "id": "chatcmpl-9f2d",
            "object": "chat.completion",
            **_HEAD,
            "choices": [
                {
                    "index": 0,
                    "message": _message(None, [_CALL]),
                    "logprobs": None,
                    "finish_reason": "tool_calls",
                    "matched_stop": None,
                }
            ],
            "usage": _USAGE,
        },
    },
    COMPLETIONS_ROUTE: {
        "text": {
            "id": "cmpl-9f2c",
            "object": "text_completion",
            **_HEAD,
            "choices": [{"index": 0, "text": " runs to the sea.", "logprobs": None, **_ENDED}],
            "usage": _USAGE,
        }
    },
    "/tokenize": {"ids": {"tokens": [5, 60, 700], "count": 3, "max_model_len": 1048576}},
    "/detokenize": {"text": {"text": "你好", "prompt": "你好"}},
}

STREAMS: dict[str, str] = {
    CHAT_ROUTE: stream_of(
        _chat_chunk({"role": "assistant", "content": ""}),
        _chat_chunk({"content": "I am LongCat."}),
        _chat_chunk({}, _ENDED),
        {"id": "chatcmpl-9f2c", "object": "chat.completion.chunk", **_HEAD, "choices": [], "usage": _USAGE},
    ),
    COMPLETIONS_ROUTE: stream_of(_text_chunk(" runs to the sea."), _text_chunk("", _ENDED)),
}
