"""Examples as token ids, through the very template, tokenizer and reading of messages that serve them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longcat_pd.server.conversation import read_messages
from longcat_pd.server.fields import Fields
from longcat_pd.server.text import TextProcessor
from tools.tiny.examples import Answer, Example

END = "</longcat_s>"


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """One document from position 0: the prompt, then the answer with its EOS."""

    skill: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """All of it."""
        return self.prompt + self.answer


class Renderer:
    """Renders for one tokenizer and template."""

    def __init__(self, text: TextProcessor) -> None:
        assert text.template is not None
        self._text, self._template = text, text.template

    def __call__(self, example: Example) -> Rendered:
        """The ids of an example; prompt and answer are tokenized apart, as when it is served."""
        switches = {"enable_thinking": example.thinking}
        tools = [dict(tool) for tool in example.tools]
        asked = [dict(message) for message in example.messages]
        prompt = self._template.render(_read(asked), tools, switches)
        whole = self._template.render(_read([*asked, as_message(example.answer)]), tools, switches)
        assert whole.startswith(prompt), "the template continues a prompt with an answer"
        answer = whole[len(prompt) : whole.rindex(END)]
        return Rendered(skill=example.skill, prompt=tuple(self._encode(prompt)), answer=tuple(self._encode(answer + END)))

    def _encode(self, text: str) -> list[int]:
        return self._text.encode(text, adds_special=False)


def as_message(answer: Answer) -> dict[str, Any]:
    """The assistant's message in OpenAI's form."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": f"call_{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
            }
            for i, call in enumerate(answer.calls)
        ]
    return message


def _read(messages: list[dict[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    return read_messages(Fields({"messages": messages}))
