"""What a checkpoint is asked as by a client, and what comes back: bodies out of examples, replies out of answers.

Knows no engine, no floor and no skill.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.tiny.examples import Example, ToolCall

AT_ONCE = 16  # requests in work
MAX_TOKENS = 160  # three times what the longest taught answer takes: one that gets there does not end by itself

Body = Mapping[str, Any]
Progress = Callable[[int], None]  # told how many answers there are


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An answer as a client reads it.

    ``finish``: the finish reason, or ``error: …`` of a request that failed. ``token_ids``: all that were generated.
    ``raw``: their text, markup and all, as nobody's parser has seen it.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: str = ""
    num_prompt_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    raw: str = ""


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """How drafts did over a whole run, by the counters of the instance that decodes.

    ``num_steps`` counts each sequence of each decode step; ``num_tokens`` is what these brought: a token of the model's own
    each, and accepted drafts, those behind an answer's end too. Its quotient over the latest 4096 steps is what
    ``/server_info`` calls ``avg_spec_accept_length``.
    """

    num_steps: int
    num_tokens: int

    @property
    def tokens_per_step(self) -> float:
        """0 before the first step."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    def kept_per_step(self, replies: Sequence[Reply]) -> float:
        """The same without what lies behind ends. The first token of an answer comes from its prompt."""
        return sum(max(len(reply.token_ids) - 1, 0) for reply in replies) / self.num_steps if self.num_steps else 0.0


@dataclass(frozen=True, kw_only=True)
class Told:
    """All replies of one run, in the order of what was asked. ``drafted``: None without drafts."""

    replies: tuple[Reply, ...]
    drafted: Drafted | None = None


def body_of(example: Example) -> Body:
    """The body of a chat request, greedy."""
    body: dict[str, Any] = {
        "messages": [dict(message) for message in example.messages],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "return_token_ids": True,
        "chat_template_kwargs": {"enable_thinking": example.thinking},
    }
    return body | {"tools": [dict(tool) for tool in example.tools]} if example.tools else body


def reply_of(answer: Mapping[str, Any]) -> Reply:
    """From the record of a whole chat answer, or from an error object."""
    if "error" in answer:
        return Reply(finish=f"error: {answer['error'].get('message', answer['error'])}")
    choice = answer["choices"][0]
    message = choice["message"]
    return Reply(
        content=message.get("content") or "",
        reasoning=message.get("reasoning_content") or "",
        calls=tuple(_call(call["function"]) for call in message.get("tool_calls") or ()),
        finish=choice["finish_reason"],
        num_prompt_tokens=answer["usage"]["prompt_tokens"],
        token_ids=tuple(choice.get("token_ids") or ()),
    )


def drafted(metrics: str, num_drafts: int) -> Drafted | None:
    """From the text of ``/metrics``."""
    if not num_drafts:
        return None
    num_steps = round(_total(metrics, "longcat_pd_draft_tokens_total") / num_drafts)
    return Drafted(num_steps=num_steps, num_tokens=num_steps + round(_total(metrics, "longcat_pd_accepted_tokens_total")))


def _total(metrics: str, name: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _call(function: Mapping[str, Any]) -> ToolCall:
    """Arguments that are not a JSON object are kept as text under a name that no function has."""
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        arguments = {"": function["arguments"]}
    return ToolCall(name=function["name"], arguments=arguments)
