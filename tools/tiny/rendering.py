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
    """One document from position 0, which ends with an answer.

    ``answers``: of each answer to learn, its first position and its number of tokens with the EOS, in order.
    """

    skill: str
    ids: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]

    @property
    def prompt(self) -> tuple[int, ...]:
        """All before the last answer."""
        return self.ids[: self.answers[-1][0]]

    @property
    def answer(self) -> tuple[int, ...]:
        """The last answer."""
        return self.ids[self.answers[-1][0] :]


class Renderer:
    """Renders for one tokenizer and template."""

    def __init__(self, text: TextProcessor) -> None:
        assert text.template is not None
        self._text, self._template = text, text.template

    def __call__(self, example: Example) -> Rendered:
        """The ids of an example; prompt and answer are tokenized apart, as when it is served."""
        messages = [*map(dict, example.messages), as_message(example.answer)]
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        done, ids, answers = "", list[int](), list[tuple[int, int]]()
        for turn in turns if example.teaches_every_turn else turns[-1:]:
            prompt, whole = self._render(messages[:turn], example), self._render(messages[: turn + 1], example)
            assert prompt.startswith(done) and whole.startswith(prompt), "the template continues what it said before"
            ids += self._encode(prompt[len(done) :])
            done = whole[: whole.rindex(END)] + END
            answer = self._encode(done[len(prompt) :])
            answers.append((len(ids), len(answer)))
            ids += answer
        return Rendered(skill=example.skill, ids=tuple(ids), answers=tuple(answers))

    def _render(self, messages: list[dict[str, Any]], example: Example) -> str:
        tools = [dict(tool) for tool in example.tools]
        return self._template.render(_read(messages), tools, {"enable_thinking": example.thinking})

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
