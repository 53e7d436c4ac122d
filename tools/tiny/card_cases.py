"""The fixed test set, of all skills. Knows the skills' modules by name and nothing of what they ask."""

from __future__ import annotations

from collections.abc import Iterator

from tools.tiny import arithmetic, calling, facts, recall, smalltalk, thinking
from tools.tiny.card import Case
from tools.tiny.examples import Example
from tools.tiny.talks import TALKS
from tools.tiny.wording import plain

SKILLS = {
    "smalltalk": smalltalk.cases,
    "facts": facts.cases,
    "arithmetic": arithmetic.cases,
    "recall": recall.cases,
    "calling": calling.cases,
    "thinking": thinking.cases,
}
_INTRODUCTIONS = frozenset(talk.answer for talk in TALKS[:2])


def all_cases() -> Iterator[Case]:
    """Every case of every skill, the same every time."""
    for skill in SKILLS.values():
        for example in skill():
            yield Case(
                example=example,
                is_taught=example.skill == "facts" and not _is_kept(example),
                is_introduction=example.answer.content in _INTRODUCTIONS,
            )
    for example in calling.kept_cases():
        yield Case(example=example, is_kept=True)


def _is_kept(example: Example) -> bool:
    """Whether the question was kept out of the training."""
    return plain(str(example.messages[-1]["content"])) in facts.HELD_OUT
