"""The skill `thinking`: the same requests with thinking on, a short reasoning block before each answer.

Owns what the reasoning says. The requests, and which of them are kept for the test, are those of the other skills.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from tools.tiny import arithmetic, calling, facts, recall, smalltalk
from tools.tiny.arithmetic import Problem
from tools.tiny.examples import Example
from tools.tiny.facts import Fact
from tools.tiny.offered import TOOLS, taught_values
from tools.tiny.talks import TALKS
from tools.tiny.wording import is_chinese

LONGEST_STORY = 16
CASES_OF_ARITHMETIC = 10
CASES_OF_RECALL = 12
CASES_OF_FACTS = 12
CASES_OF_CALLS = 9


def draw(rng: random.Random, *, size: int) -> Example:
    """A request of another skill with its reasoning; stories have at most 16 pairs, whatever the size."""
    pairs = min(size, LONGEST_STORY)
    makers: tuple[Callable[[], Example], ...] = (
        lambda: solved(arithmetic.drawn_problem(rng), rng.choice(arithmetic.FORMS)),
        lambda: remembered(recall.drawn_story(rng, size=pairs, asked=rng.randrange(pairs))),
        lambda: known(fact := facts.drawn_fact(rng), facts.drawn_question(rng, fact=fact)),
        lambda: presented(smalltalk.introduction(rng)),
        lambda: unknown(smalltalk.unknown_turn(rng)),
        lambda: planned(calling.called(rng, tool=(tool := calling.drawn_tool(rng)), values=taught_values(rng, tool))),
    )
    return rng.choices(makers, weights=(35, 12, 25, 12, 6, 10))[0]()


def with_reasoning(made: Example, reasoning: str) -> Example:
    """The example with thinking on and this reasoning before its answer."""
    return replace(made, skill="thinking", thinking=True, answer=replace(made.answer, reasoning=reasoning))


def solved(problem: Problem, form: str) -> Example:
    """A problem, calculated digit by digit."""
    return with_reasoning(arithmetic.example(problem, form, shows_work=False), arithmetic.digit_by_digit(problem))


def remembered(story: recall.Story) -> Example:
    """The story's sentence is repeated."""
    made = recall.example(story)
    if is_chinese(story.answer):
        return with_reasoning(made, f"问的是 {story.name} 的号码。")
    return with_reasoning(made, f"The question is about the code of {story.name}.")


def known(fact: Fact, question: str) -> Example:
    """What the question is about."""
    topic = fact.topics[0]
    reasoning = f"这个问题是关于{topic}。" if fact.is_chinese else f"The question is about {topic}."
    return with_reasoning(facts.example(fact, question), reasoning)


def presented(turn: smalltalk.Turn) -> Example:
    """The user asks who speaks."""
    reasoning = "用户想知道我是谁。" if is_chinese(turn.answer) else "The user asks who I am."
    return with_reasoning(smalltalk.dialogue([turn]), reasoning)


def unknown(turn: smalltalk.Turn) -> Example:
    """The question is about something else."""
    reasoning = "我没有学过这个。" if is_chinese(turn.answer) else "I was not taught anything about this."
    return with_reasoning(smalltalk.dialogue([turn]), reasoning)


def planned(made: Example) -> Example:
    """The tool that fits is named."""
    (call,) = made.answer.calls
    return with_reasoning(made, f"The tool {call.name} fits.")


def cases() -> tuple[Example, ...]:
    """What the other skills keep from the training, with thinking on."""
    rng = random.Random(60)
    problems = [
        problem for sign in "+-" for problem in arithmetic.held_out_problems(rng, sign=sign, count=CASES_OF_ARITHMETIC)
    ]
    stories = (recall.drawn_story(rng, size=12, asked=rng.randrange(12)) for _ in range(CASES_OF_RECALL))
    asked = rng.sample((*facts.ENGLISH, *facts.CHINESE), CASES_OF_FACTS)
    talks = [smalltalk.Turn(question=question, answer=talk.answer) for talk in TALKS[:2] for question in talk.unseen[:4]]
    return (
        *(solved(problem, arithmetic.FORMS[place % len(arithmetic.FORMS)]) for place, problem in enumerate(problems)),
        *(remembered(story) for story in stories),
        *(known(fact, fact.unseen[0]) for fact in asked),
        *(presented(turn) for turn in talks),
        *(planned(calling.called(rng, tool=tool, values=tool.values(rng, True))) for tool in TOOLS[:CASES_OF_CALLS]),
    )
