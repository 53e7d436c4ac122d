"""The skill `facts`: questions about longcat_pd and their short answers, in English and in Chinese.

Owns how a question is asked (wordings, prefixes, small letters, words left out) and which wordings are kept for the test.
The facts themselves are data of other modules.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tools.tiny.examples import Answer, Example
from tools.tiny.facts_in_chinese import FACTS_IN_CHINESE
from tools.tiny.facts_of_parts import FACTS_OF_PARTS
from tools.tiny.facts_of_use import FACTS_OF_USE
from tools.tiny.wording import plain, user_says

FRAMES = (
    "Tell me about {}.",
    "What about {}?",
    "I want to know about {}.",
    "{}?",
    "A question about {}.",
    "What is {}?",
    "Explain {}.",
    "Describe {}.",
    "What is the use of {}?",
    "How does it work with {}?",
    "What do you know about {}?",
    "What can you tell me about {}?",
)
FRAMES_IN_CHINESE = (
    "请告诉我{}。",
    "我想知道{}。",
    "{}？",
    "请问{}？",
    "关于{}。",
    "什么是{}？",
    "{}是什么？",
    "请介绍一下{}。",
)
PREFIXES = ("Please tell me: ", "Hello! ", "Hi, ", "In short: ", "Please answer: ", "A question: ", "OK. ")
PREFIXES_IN_CHINESE = ("请问，", "你好！", "请回答：", "简单地说，")
SUFFIXES = (" Please.", " Thank you.", " In short.", " Briefly.")
LEFT_OUT = frozenset({"the", "a", "an", "do", "does", "is", "are", "of", "it", "i"})
SHARE_IN_CHINESE = 0.25


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One answer, the thing that it is about as nouns, and its questions; `unseen` ones are never trained."""

    topics: tuple[str, ...]
    answer: str
    asked: tuple[str, ...]
    unseen: tuple[str, ...]
    is_chinese: bool


def read_facts(text: str, *, is_chinese: bool) -> Iterator[Fact]:
    """The facts of a data module's text; raises ValueError for a line of another form."""
    for block in text.strip().split("\n\n"):
        parts: dict[str, tuple[str, ...]] = {"topic": (), "answer": (), "asked": (), "unseen": ()}
        for line in block.splitlines():
            name, colon, rest = line.partition(": ")
            if not colon or name not in parts:
                raise ValueError(f"no line of a fact: {line!r}")
            parts[name] += (rest,) if name == "answer" else tuple(rest.split(" | "))
        (answer,) = parts["answer"]
        yield Fact(
            topics=parts["topic"], answer=answer, asked=parts["asked"], unseen=parts["unseen"], is_chinese=is_chinese
        )


ENGLISH = (*read_facts(FACTS_OF_USE, is_chinese=False), *read_facts(FACTS_OF_PARTS, is_chinese=False))
CHINESE = tuple(read_facts(FACTS_IN_CHINESE, is_chinese=True))
WITHHELD = ("What is the use of YaRN?",)  # neither trained nor asked: trained ones hold it, with a prefix or a suffix
HELD_OUT = frozenset(map(plain, (*WITHHELD, *(question for fact in (*ENGLISH, *CHINESE) for question in fact.unseen))))


def draw(rng: random.Random, *, size: int) -> Example:
    """A fact asked in a trained wording, varied."""
    fact = drawn_fact(rng)
    return example(fact, drawn_question(rng, fact=fact), system=rng.random() < 0.1)


def drawn_fact(rng: random.Random) -> Fact:
    """Any fact, one in four in Chinese."""
    return rng.choice(CHINESE if rng.random() < SHARE_IN_CHINESE else ENGLISH)


def drawn_question(rng: random.Random, *, fact: Fact) -> str:
    """A trained question about the fact, varied, and none of the held-out ones."""
    while plain(question := varied(rng, fact=fact)) in HELD_OUT:
        pass
    return question


def varied(rng: random.Random, *, fact: Fact) -> str:
    """A wording or a frame around a noun, perhaps with words left out, in small letters, with a prefix or a suffix."""
    if rng.random() < 0.3:
        question = rng.choice(FRAMES_IN_CHINESE if fact.is_chinese else FRAMES).format(rng.choice(fact.topics))
    else:
        question = rng.choice(fact.asked)
    if fact.is_chinese:
        question = question.rstrip("？。") if rng.random() < 0.15 else question
        return rng.choice(PREFIXES_IN_CHINESE) + question if rng.random() < 0.15 else question
    if rng.random() < 0.15:
        question = shortened(rng, question=question)
    if rng.random() < 0.15:
        question = question.rstrip("?.")
    if rng.random() < 0.2:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.15:
        question = rng.choice(PREFIXES) + question
    return question + rng.choice(SUFFIXES) if rng.random() < 0.06 else question


def shortened(rng: random.Random, *, question: str) -> str:
    """The question without one of its small words, if it has any and at least four words."""
    words = question.split(" ")
    small = [place for place, word in enumerate(words) if word.lower() in LEFT_OUT]
    if not small or len(words) < 4:
        return question
    left_out = rng.choice(small)
    return " ".join(word for place, word in enumerate(words) if place != left_out)


def example(fact: Fact, question: str, *, system: bool = False) -> Example:
    """The question as one message, perhaps behind a system message that says nothing of use."""
    messages: tuple[Mapping[str, Any], ...] = (user_says(question),)
    if system:
        messages = ({"role": "system", "content": "You are a helpful assistant."}, *messages)
    return Example(skill="facts", messages=messages, answer=Answer(content=fact.answer))


def cases() -> tuple[Example, ...]:
    """Every fact in three wordings: one of the training and two that were kept from it."""
    return tuple(example(fact, question) for fact in (*ENGLISH, *CHINESE) for question in (fact.asked[0], *fact.unseen))
