"""The texts from which the tokenizer of the tiny model learns its vocabulary: what all skills say, without markup."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from tools.tiny import arithmetic, calling, facts, recall, smalltalk, thinking
from tools.tiny.examples import Example

# How many examples of each skill; stories have 3 to 12 pairs here, as names and codes would outweigh all else.
SHARES = ((facts, 1500), (smalltalk, 700), (arithmetic, 200), (recall, 300), (calling, 700), (thinking, 500))


def corpus(seed: int) -> Iterator[str]:
    """Every text of some thousand drawn examples: messages, reasoning, answers, tools and arguments as JSON."""
    rng = random.Random(seed)
    for skill, count in SHARES:
        for _ in range(count):
            yield from texts(skill.draw(rng, size=rng.randint(3, 12)))


def texts(example: Example) -> Iterator[str]:
    """The texts of one example."""
    for tool in example.tools:
        yield json.dumps(tool["function"], ensure_ascii=False, sort_keys=True)
    for message in example.messages:
        if message["content"] is not None:
            yield message["content"]
    for call in example.answer.calls:
        yield call.name
        yield from (f"{name}\n{value}" for name, value in call.arguments.items())
    if example.answer.reasoning is not None:
        yield example.answer.reasoning
    if example.answer.content:
        yield example.answer.content
