"""Answers taken apart for comparison: by field, over all choices; and a stream joined to the whole answer it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

Parts = dict[str, Any]
LOGPROB_ROUNDING = 1e-4  # rows of other batches round otherwise
LISTS = ("content", "tokens", "token_logprobs", "top_logprobs", "text_offset")


def parts_of(answer: dict[str, Any]) -> Parts:
    """What a client sees. ``shape``: which keys there are."""
    choices = answer["choices"]
    messages = [choice.get("message", choice) for choice in choices]
    prompts = [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice]
    return {
        "ids": [choice.get("token_ids") for choice in choices],
        "text": [message.get("content", message.get("text")) for message in messages],
        "reasoning": [message.get("reasoning_content") for message in messages],
        "calls": [message.get("tool_calls") for message in messages],
        "logprobs": [choice["logprobs"] for choice in choices],
        "finish": [choice["finish_reason"] for choice in choices],
        "matched": [choice["matched_stop"] for choice in choices],
        "prompts": prompts or answer.get("prompt_token_ids"),
        "usage": answer["usage"],
        "shape": [sorted(answer), *(sorted(choice) for choice in choices), *(sorted(message) for message in messages)],
        "head": [answer[name] for name in ("id", "model", "system_fingerprint")],
    }


def differences(one: Parts, other: Parts) -> set[str]:
    """The parts that are not alike."""
    return {name for name in one if not alike(one[name], other[name])}


def alike(one: Any, other: Any) -> bool:
    """Equal, but for the rounding of log-probs."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return bool(one == pytest.approx(other, abs=LOGPROB_ROUNDING))
    return bool(one == other)


def joined(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The answer whose stream, with ``include_usage``, this is."""
    *chunks, last = chunks
    assert last["choices"] == [] and last["usage"] is not None
    is_chat = chunks[0]["object"] == "chat.completion.chunk"
    kind = "chat.completion" if is_chat else "text_completion"
    answer = {**last, "object": kind, "choices": []}
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        assert {name: chunk[name] for name in ("id", "model", "system_fingerprint")}.items() <= last.items()
        if "prompt_token_ids" in chunk:
            assert "prompt_token_ids" not in answer
            answer["prompt_token_ids"] = chunk["prompt_token_ids"]
        (part,) = chunk["choices"]
        assert part["index"] in found or not is_chat or part["delta"] == {"role": "assistant", "content": ""}
        _join(found.setdefault(part["index"], _beginning(part["index"], is_chat=is_chat)), part)
    for choice in found.values():
        message = choice.get("message")
        if message is not None and message["content"] is None and message["tool_calls"] is None:
            message["content"] = ""
    answer["choices"] = [found[index] for index in sorted(found)]
    return answer


def _beginning(index: int, *, is_chat: bool) -> dict[str, Any]:
    message = {"role": "assistant", "content": None, "reasoning_content": None, "tool_calls": None}
    return {"index": index, **({"message": message} if is_chat else {"text": ""}), "logprobs": None, "finish_reason": None}


def _join(choice: dict[str, Any], part: dict[str, Any]) -> None:
    assert choice["finish_reason"] is None, "something came behind the end"
    choice["finish_reason"] = part["finish_reason"]
    assert ("matched_stop" in part) == (part["finish_reason"] is not None)
    if "matched_stop" in part:
        choice["matched_stop"] = part["matched_stop"]
    if "prompt_token_ids" in part:
        assert "prompt_token_ids" not in choice
        choice["prompt_token_ids"] = part["prompt_token_ids"]
    if "token_ids" in part:
        choice["token_ids"] = choice.get("token_ids", []) + part["token_ids"]
    if part["logprobs"] is not None:
        before = choice["logprobs"] or {}
        choice["logprobs"] = {name: before.get(name, []) + values for name, values in part["logprobs"].items()}
    if "text" in part:
        choice["text"] += part["text"]
        return
    delta = {name: value for name, value in part["delta"].items() if name != "role"}
    tells_tokens = not part["delta"] and (part["logprobs"] is not None or "token_ids" in part)
    assert len(delta) == (part["finish_reason"] is None) or tells_tokens, "one field at a time"
    message = choice["message"]
    for name in ("content", "reasoning_content"):
        if name in delta and "role" not in part["delta"]:
            message[name] = (message[name] or "") + delta[name]
    for call in delta.get("tool_calls", []):
        message["tool_calls"] = calls = message["tool_calls"] or []
        if "type" in call:
            assert call["index"] == len(calls)
            calls.append({"type": call["type"], "function": dict(call["function"])})
        else:
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
