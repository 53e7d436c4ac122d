"""The lines of the score card and their floors: which cases count for a line, how they are graded, what is enough.

Pure: replies in, lines out. Knows no model and no engine, and nothing of how the card is written down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tools.tiny.asking import Drafted, Reply, Told
from tools.tiny.card_grades import (
    Grade,
    calls_in_form,
    calls_nothing,
    calls_right,
    ends_by_itself,
    ends_in_the_sentence,
    introduces,
    is_chinese,
    reasons_then_answers,
    same_answer,
    says_the_same,
)
from tools.tiny.examples import Example

NUM_DRAFTS = 3
DRAFTS_FLOOR = 2.2
TOPKS, CHUNKS = 4, 3  # how long the context of a recall case is at least: so many times index_topk, so many prefill chunks
CONTROL = "recall, keys picked at random (control)"

Bound = Literal["at least", "at most"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One question of the fixed test set.

    ``is_taught``: a question of facts that is in the training data word for word. ``is_introduction``: it asks who answers.
    ``is_kept``: a request beside tools with nothing but values that were kept from the training.
    """

    example: Example
    is_taught: bool = False
    is_introduction: bool = False
    is_kept: bool = False


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What makes a context long: the indexer's budget, and tokens of a prefill chunk."""

    index_topk: int
    chunk: int

    @property
    def long(self) -> int:
        """The least prompt tokens of a recall case that counts."""
        return max(TOPKS * self.index_topk, (CHUNKS - 1) * self.chunk + 1)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line before it is asked. ``floor`` in per cent; None: told, not judged. ``at_least``: cases that make a score."""

    title: str
    skill: str
    belongs: Callable[[Case], bool]
    grade: Grade
    floor: int | None = None
    bound: Bound = "at least"
    at_least: int = 1


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of one run. ``value``: per cent of a score, tokens of a rate, answers of a comparison."""

    title: str
    floor: str
    shown: str
    value: float
    passes: bool
    wrong: tuple[int, ...] = ()  # places of the cases


def _of(skill: str, *, when: Callable[[Case], bool] = lambda case: True) -> Callable[[Case], bool]:
    def belongs(case: Case) -> bool:
        return case.example.skill == skill and when(case)

    return belongs


def _introduces_in_chinese(case: Case) -> bool:
    return case.is_introduction and is_chinese(case.example.answer.content)


def _introduces_in_english(case: Case) -> bool:
    return case.is_introduction and not is_chinese(case.example.answer.content)


def _is_after_a_tool(case: Case) -> bool:
    return bool(case.example.messages[-1]["role"] == "tool")


def _has_calls(case: Case) -> bool:
    return bool(case.example.answer.calls)


def _has_kept_calls(case: Case) -> bool:
    return _has_calls(case) and case.is_kept


RECALL = Row(
    title=f"recall, contexts of {TOPKS} × index_topk and {CHUNKS} chunks or more",
    skill="recall",
    belongs=_of("recall"),
    grade=ends_in_the_sentence,
    floor=90,
    at_least=40,
)

ROWS = (
    Row(
        title="introduces itself in English",
        skill="smalltalk",
        belongs=_of("smalltalk", when=_introduces_in_english),
        grade=introduces,
        floor=100,
    ),
    Row(
        title="introduces itself in Chinese",
        skill="smalltalk",
        belongs=_of("smalltalk", when=_introduces_in_chinese),
        grade=introduces,
        floor=100,
    ),
    Row(
        title="small talk else",
        skill="smalltalk",
        belongs=_of("smalltalk", when=lambda case: not case.is_introduction),
        grade=says_the_same,
    ),
    Row(title="facts", skill="facts", belongs=_of("facts"), grade=says_the_same, floor=80, at_least=120),
    Row(
        title="facts, asked as taught",
        skill="facts",
        belongs=_of("facts", when=lambda case: case.is_taught),
        grade=says_the_same,
    ),
    Row(
        title="facts, asked as never taught",
        skill="facts",
        belongs=_of("facts", when=lambda case: not case.is_taught),
        grade=says_the_same,
    ),
    Row(
        title="adds and subtracts",
        skill="arithmetic",
        belongs=_of("arithmetic"),
        grade=ends_in_the_sentence,
        floor=90,
        at_least=40,
    ),
    RECALL,
    Row(
        title="calls the tool that fits",
        skill="calling",
        belongs=_of("calling", when=lambda case: _has_calls(case) and not case.is_kept),
        grade=calls_right,
        floor=90,
        at_least=20,
    ),
    Row(
        title="calls the tool that fits in whole markup, values never taught",
        skill="calling",
        belongs=_of("calling", when=_has_kept_calls),
        grade=calls_in_form,
        floor=90,
        at_least=20,
    ),
    Row(
        title="and the values right",
        skill="calling",
        belongs=_of("calling", when=_has_kept_calls),
        grade=calls_right,
    ),
    Row(
        title="calls none where none fits",
        skill="calling",
        belongs=_of("calling", when=lambda case: not _has_calls(case) and not _is_after_a_tool(case)),
        grade=calls_nothing,
        floor=90,
        at_least=10,
    ),
    Row(
        title="answers from a tool's result, values never taught",
        skill="calling",
        belongs=_of("calling", when=_is_after_a_tool),
        grade=says_the_same,
    ),
    Row(
        title="thinks, then answers",
        skill="thinking",
        belongs=lambda case: case.example.thinking,
        grade=reasons_then_answers,
        floor=90,
        at_least=20,
    ),
    Row(
        title="answers right after thinking",
        skill="thinking",
        belongs=lambda case: case.example.thinking and not _has_calls(case),
        grade=says_the_same,
    ),
)
ENDS = Row(title="ends by itself, all cases", skill="", belongs=lambda case: True, grade=ends_by_itself, floor=98)


def lines(cases: Sequence[Case], told: Told, *, sizes: Sizes) -> list[Line]:
    """Every line that a run has, of the skills that were asked."""
    asked = {case.example.skill for case in cases}
    rows = [row for row in ROWS if row.skill in asked and (row.floor is not None or any(map(row.belongs, cases)))]
    found = [scored(row, cases, told.replies, sizes=sizes) for row in rows]
    found.append(scored(ENDS, cases, told.replies, sizes=sizes))
    return found + (draft_lines(told.drafted, told.replies) if told.drafted is not None else [])


def scored(row: Row, cases: Sequence[Case], replies: Sequence[Reply], *, sizes: Sizes) -> Line:
    """One row over all its cases."""
    places = [place for place, case in enumerate(cases) if row.belongs(case) and _counts(row, replies[place], sizes)]
    wrong = tuple(place for place in places if not row.grade(cases[place].example, replies[place]))
    num_right, num = len(places) - len(wrong), len(places)
    share = 100.0 * num_right / num if num else 0.0
    enough = share >= (row.floor or 0) if row.bound == "at least" else share <= (row.floor or 0)
    too_few = row.floor is not None and num < row.at_least
    shown = f"{share:.1f} % ({num_right} of {num})" + (f": too few, at least {row.at_least}" if too_few else "")
    return Line(
        title=row.title,
        floor="" if row.floor is None else f"{'≥' if row.bound == 'at least' else '≤'} {row.floor} %",
        shown=shown,
        value=share,
        passes=row.floor is None or (enough and not too_few),
        wrong=wrong,
    )


def control_line(cases: Sequence[Case], told: Told, *, sizes: Sizes) -> Line:
    """The recall cases of a run whose indexer picks keys at random: they must fail, or the keys are found without it."""
    row = Row(
        title=CONTROL,
        skill=RECALL.skill,
        belongs=RECALL.belongs,
        grade=RECALL.grade,
        floor=50,
        bound="at most",
        at_least=RECALL.at_least,
    )
    return scored(row, cases, told.replies, sizes=sizes)


def draft_lines(drafted: Drafted, replies: Sequence[Reply]) -> list[Line]:
    """How well drafts did over all answers."""
    rate, kept = drafted.tokens_per_step, drafted.kept_per_step(replies)
    return [
        Line(
            title=f"tokens per step, {NUM_DRAFTS} drafts",
            floor=f"≥ {DRAFTS_FLOOR}",
            shown=f"{kept:.2f}",
            value=kept,
            passes=kept >= DRAFTS_FLOOR,
        ),
        Line(title="the same with what lies behind ends", floor="", shown=f"{rate:.2f}", value=rate, passes=True),
    ]


def same_line(replies: Sequence[Reply], others: Sequence[Reply]) -> Line:
    """Whether two runs of the same checkpoint gave the same answers, to the token."""
    wrong = tuple(
        place for place, pair in enumerate(zip(replies, others, strict=True)) if not same_answer(pair[0], pair[1])
    )
    num_same = len(replies) - len(wrong)
    return Line(
        title="same answers as one engine without drafts",
        floor="all",
        shown=f"{num_same} of {len(replies)}",
        value=num_same,
        passes=not wrong and bool(replies),
        wrong=wrong,
    )


def missed(found: Iterable[Line]) -> list[Line]:
    """The lines that are not good enough."""
    return [line for line in found if not line.passes]


def chosen(cases: Iterable[Case], skills: Collection[str], *, at_most: int | None = None) -> tuple[Case, ...]:
    """The cases of some skills, of all if none is named; of each the first ``at_most``."""
    found, counts = list[Case](), Counter[str]()
    for case in cases:
        skill = case.example.skill
        counts[skill] += 1
        if (not skills or skill in skills) and (at_most is None or counts[skill] <= at_most):
            found.append(case)
    return tuple(found)


def _counts(row: Row, reply: Reply, sizes: Sizes) -> bool:
    """A recall case counts if its context is long; one that got no answer counts, for nobody knows."""
    return row.skill != RECALL.skill or reply.num_prompt_tokens >= sizes.long or reply.finish.startswith("error")
