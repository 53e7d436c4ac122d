"""The skill `calling`: a call where an offered tool fits, no call where none does, and words for a tool's result.

Owns which tools are offered together and what follows a call. The tools and their values are another module's.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from tools.tiny import arithmetic, facts, smalltalk
from tools.tiny.examples import Answer, Example, ToolCall
from tools.tiny.offered import TOOLS, Tool, Values, taught_values
from tools.tiny.talks import UNKNOWN, UNKNOWN_IN_CHINESE
from tools.tiny.wording import is_chinese, user_says

CASES_OF_A_TOOL = 11
CASES_WITHOUT_CALL = 24
RESULTS_OF_A_TOOL = 4
SHARE_UNFITTING, SHARE_TOLD, SHARE_OTHER = 0.06, 0.14, 0.15


def draw(rng: random.Random, *, size: int) -> Example:
    """A call (two of three), a result in words, another request beside tools, or one that no offered tool fits."""
    kind, tool = rng.random(), drawn_tool(rng)
    if kind < SHARE_UNFITTING:
        return without_the_tool(rng, tool=tool)
    if kind < SHARE_UNFITTING + SHARE_TOLD:
        return result_told(rng, tool=tool)
    if kind < SHARE_UNFITTING + SHARE_TOLD + SHARE_OTHER:
        return beside_tools(rng, made=other_request(rng))
    return called(rng, tool=tool, values=taught_values(rng, tool))


def drawn_tool(rng: random.Random) -> Tool:
    """One of all tools."""
    return rng.choices(TOOLS, weights=[tool.weight for tool in TOOLS])[0]


def called(rng: random.Random, *, tool: Tool, values: Values) -> Example:
    """The tool is offered among others, and asked for with these values."""
    return Example(
        skill="calling",
        messages=(user_says(rng.choice(tool.asked).format_map(values)),),
        answer=Answer(calls=(ToolCall(name=tool.name, arguments=values),)),
        tools=offer(rng, tool=tool),
    )


def offer(rng: random.Random, *, tool: Tool | None, without: Tool | None = None) -> tuple[Mapping[str, Any], ...]:
    """One to three tools in any order, `tool` among them and `without` not."""
    others = [other for other in TOOLS if other not in (tool, without)]
    chosen = rng.sample(others, rng.randint(0 if tool else 1, 2)) + ([tool] if tool else [])
    rng.shuffle(chosen)
    return tuple(one.function for one in chosen)


def result_told(rng: random.Random, *, tool: Tool, unseen: bool = False) -> Example:
    """The tool was called, with kept values if `unseen`, and has answered."""
    values, result = tool.values(rng, unseen), tool.result(rng)
    call = {"name": tool.name, "arguments": json.dumps(values, ensure_ascii=False)}
    messages: Sequence[Mapping[str, Any]] = (
        user_says(rng.choice(tool.asked).format_map(values)),
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call_0", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call_0", "content": json.dumps(result)},
    )
    told = tool.told.format_map({**values, **result})
    return Example(skill="calling", messages=tuple(messages), answer=Answer(content=told), tools=offer(rng, tool=tool))


def without_the_tool(rng: random.Random, *, tool: Tool) -> Example:
    """What the tool could do is asked for, and it is not offered; sometimes none is."""
    question = rng.choice(tool.asked).format_map(tool.values(rng, False))
    return Example(
        skill="calling",
        messages=(user_says(question),),
        answer=Answer(content=UNKNOWN_IN_CHINESE if is_chinese(question) else UNKNOWN),
        tools=offer(rng, tool=None, without=tool) if rng.random() < 0.7 else (),
    )


def other_request(rng: random.Random) -> Example:
    """What needs no tool."""
    draw_other = rng.choice((facts.draw, smalltalk.draw, arithmetic.draw))
    return draw_other(rng, size=0)


def beside_tools(rng: random.Random, *, made: Example) -> Example:
    """A request that needs no tool, with tools offered."""
    return Example(skill="calling", messages=made.messages, answer=made.answer, tools=offer(rng, tool=None))


def cases() -> tuple[Example, ...]:
    """Each tool asked for with trained and (one in three) kept values, then requests beside tools that need none."""
    rng = random.Random(77)
    fitting = [
        called(rng, tool=tool, values=tool.values(rng, place % 3 == 2))
        for tool in TOOLS
        for place in range(CASES_OF_A_TOOL)
    ]
    skills = (facts, smalltalk, arithmetic)
    others = [beside_tools(rng, made=rng.choice(skills[place % 3].cases())) for place in range(CASES_WITHOUT_CALL)]
    return (*fitting, *others)


def kept_cases() -> tuple[Example, ...]:
    """Each tool asked for, and its result told, with kept values alone: no such request is ever trained."""
    rng = random.Random(78)
    fitting = [called(rng, tool=tool, values=tool.values(rng, True)) for tool in TOOLS for _ in range(CASES_OF_A_TOOL)]
    told = [result_told(rng, tool=tool, unseen=True) for tool in TOOLS for _ in range(RESULTS_OF_A_TOOL)]
    return (*fitting, *told)
