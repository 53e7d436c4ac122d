"""One taught or asked turn: the messages of a chat and the answer that should follow.

The skills' modules build them and the training and the score card read them. This module knows no skill, no template and
no token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call of an offered function, with its arguments as JSON values."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the assistant should say: text, tool calls, and a reasoning block where thinking is on (else None)."""

    content: str = ""
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Example:
    """A chat up to and with the last user or tool message, in OpenAI's form, and the answer to it.

    `skill` is the name of the module that made it; `tools` are OpenAI function tools; `thinking` says whether the chat
    template is rendered with `enable_thinking`. `teaches_every_turn`: what the assistant said before is to be learnt too.
    """

    skill: str
    messages: tuple[Mapping[str, Any], ...]
    answer: Answer
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool = False
    teaches_every_turn: bool = False
