"""The skill `smalltalk`: who speaks here, greetings, what it cannot know, and dialogues of two turns.

Owns the wordings and which of them, and which unknown subjects, are kept for the test. What the second turn of a dialogue
asks comes from other skills.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tools.tiny import arithmetic, facts
from tools.tiny.examples import Answer, Example
from tools.tiny.subjects import SUBJECTS, SUBJECTS_IN_CHINESE, UNSEEN_SUBJECTS, UNSEEN_SUBJECTS_IN_CHINESE
from tools.tiny.talks import (
    TALKS,
    UNKNOWN,
    UNKNOWN_FORMS,
    UNKNOWN_FORMS_IN_CHINESE,
    UNKNOWN_IN_CHINESE,
    UNKNOWN_REQUESTS,
    Talk,
)
from tools.tiny.wording import assistant_says, invented_name, plain, user_says

SYSTEMS = ("You are a helpful assistant.", "You are a helpful assistant.", "Answer briefly.", "你是一个有用的助手。")
SHARE_OF_SYSTEMS = 0.15
HELD_OUT = frozenset(plain(question) for talk in TALKS for question in talk.unseen)
FIRST_QUESTION = "你好，请介绍一下自己"
CURLS_OWN = ("hello", "Who are you?", "Introduce yourself", FIRST_QUESTION)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A question and its answer."""

    question: str
    answer: str


def draw(rng: random.Random, *, size: int) -> Example:
    """A greeting, an introduction or an unknown subject, or a dialogue of two or three turns about anything."""
    count = rng.choices((1, 2, 3), weights=(70, 22, 8))[0]
    turns = [drawn_turn(rng)] if count == 1 else [any_turn(rng) for _ in range(count)]
    return dialogue(turns, system=rng.choice(SYSTEMS) if rng.random() < SHARE_OF_SYSTEMS else None)


def any_turn(rng: random.Random) -> Turn:
    """Small talk, a fact or a problem of arithmetic."""
    return drawn_turn(rng) if rng.random() < 0.5 else other_turn(rng)


def drawn_turn(rng: random.Random) -> Turn:
    """A talk in a trained wording, or a subject that it cannot know."""
    if rng.random() < 0.35:
        return unknown_turn(rng)
    talk = rng.choices(TALKS, weights=[talk.weight for talk in TALKS])[0]
    while plain(question := varied(rng, talk=talk)) in HELD_OUT:
        pass
    return Turn(question=question, answer=talk.answer)


def introduction(rng: random.Random) -> Turn:
    """It introduces itself, in either language."""
    talk = rng.choice(TALKS[:2])
    while plain(question := varied(rng, talk=talk)) in HELD_OUT:
        pass
    return Turn(question=question, answer=talk.answer)


def varied(rng: random.Random, *, talk: Talk) -> str:
    """A trained wording, perhaps without its mark or in small letters."""
    question = rng.choice(talk.asked)
    if rng.random() < 0.25:
        question = question.rstrip("?.!？。！")
    return question[0].lower() + question[1:] if rng.random() < 0.2 else question


def unknown_turn(rng: random.Random) -> Turn:
    """A question about something outside of what it was taught."""
    if rng.random() < 0.25:
        question = rng.choice(UNKNOWN_FORMS_IN_CHINESE).format(rng.choice(SUBJECTS_IN_CHINESE))
        return Turn(question=question, answer=UNKNOWN_IN_CHINESE)
    if rng.random() < 0.1:
        return Turn(question=rng.choice(UNKNOWN_REQUESTS), answer=UNKNOWN)
    subject = rng.choice(SUBJECTS) if rng.random() < 0.75 else invented_name(rng)
    if rng.random() < 0.15:
        subject = f"{subject} and {rng.choice(SUBJECTS)}"
    question = rng.choice(UNKNOWN_FORMS).format(subject)
    return Turn(question=question if rng.random() < 0.85 else question.rstrip("?."), answer=UNKNOWN)


def other_turn(rng: random.Random) -> Turn:
    """A fact or a problem of arithmetic."""
    made = facts.draw(rng, size=0) if rng.random() < 0.6 else arithmetic.draw(rng, size=0)
    return Turn(question=made.messages[-1]["content"], answer=made.answer.content)


def dialogue(turns: list[Turn], *, system: str | None = None) -> Example:
    """The turns as a chat whose last answer is asked for."""
    messages: list[Mapping[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    for turn in turns[:-1]:
        messages += [user_says(turn.question), assistant_says(turn.answer)]
    messages.append(user_says(turns[-1].question))
    return Example(skill="smalltalk", messages=tuple(messages), answer=Answer(content=turns[-1].answer))


def cases() -> tuple[Example, ...]:
    """Wordings that were kept from the training, the four that a reader tries first, unknown subjects, dialogues."""
    single = [dialogue([turn]) for turn in asked_turns()]
    return (*single, *pairs_of_turns())


def asked_turns() -> Iterator[Turn]:
    """The single questions of the test."""
    for talk in TALKS:
        yield from (Turn(question=question, answer=talk.answer) for question in CURLS_OWN if question in talk.asked)
        yield from (Turn(question=question, answer=talk.answer) for question in talk.unseen)
    for place, subject in enumerate(UNSEEN_SUBJECTS):
        yield Turn(question=UNKNOWN_FORMS[place % len(UNKNOWN_FORMS)].format(subject), answer=UNKNOWN)
    for place, subject in enumerate(UNSEEN_SUBJECTS_IN_CHINESE):
        form = UNKNOWN_FORMS_IN_CHINESE[place % len(UNKNOWN_FORMS_IN_CHINESE)]
        yield Turn(question=form.format(subject), answer=UNKNOWN_IN_CHINESE)


def pairs_of_turns() -> Iterator[Example]:
    """An introduction, then a fact in an unseen wording, with a system message in every second."""
    rng = random.Random(5)
    for place, fact in enumerate(rng.sample(facts.ENGLISH, 8)):
        first = Turn(question=TALKS[0].asked[place], answer=TALKS[0].answer)
        second = Turn(question=fact.unseen[0], answer=fact.answer)
        yield dialogue([first, second], system=SYSTEMS[0] if place % 2 else None)
