"""Whether a reply is right: one pure function for each kind of question. Knows no model, no floor and no list of cases.

Every grader takes the example and the reply. Text is compared without regard to white space; nothing else is forgiven.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tools.tiny.asking import Reply
from tools.tiny.examples import Example, ToolCall

Grade = Callable[[Example, Reply], bool]

NAME = re.compile("LongCat(?!_)")  # a name such as LongCat-tiny; LongCat_pd is none
ENDS = ("stop", "tool_calls")
_MARKUP = re.compile(r"</?longcat_")
_NUMBER = re.compile(r"-?\d+")
_HAN = re.compile(r"[\u4e00-\u9fff]")


def is_chinese(text: str) -> bool:
    """Whether it has a Chinese character."""
    return bool(_HAN.search(text))


def introduces(example: Example, reply: Reply) -> bool:
    """It names LongCat, in the language of the expected answer."""
    return bool(NAME.search(reply.content)) and is_chinese(reply.content) == is_chinese(example.answer.content)


def says_the_same(example: Example, reply: Reply) -> bool:
    """The text is that of the expected answer, and there is no call."""
    return _plain(reply.content) == _plain(example.answer.content) and not reply.calls


def ends_in_the_number(example: Example, reply: Reply) -> bool:
    """The last number of the text is that of the expected answer, sign and all."""
    found, expected = _NUMBER.findall(reply.content), _NUMBER.findall(example.answer.content)
    return bool(found and expected) and int(found[-1]) == int(expected[-1])


def calls_right(example: Example, reply: Reply) -> bool:
    """The expected calls in their order, each with its arguments as JSON values, and no markup left in the text.

    Calls are what the server made of the answer's markup; it leaves what is malformed in the text, or makes no call of it.
    """
    is_same = list(map(_canonical, reply.calls)) == list(map(_canonical, example.answer.calls))
    return is_same and bool(reply.calls) and reply.finish == "tool_calls" and not _MARKUP.search(reply.content)


def calls_nothing(example: Example, reply: Reply) -> bool:
    """No call and no markup of one; the question is answered in words."""
    return not reply.calls and reply.finish == "stop" and bool(_plain(reply.content)) and not _MARKUP.search(reply.content)


def reasons_then_answers(example: Example, reply: Reply) -> bool:
    """A closed block of reasoning, and an answer behind it: text, or calls where calls are expected."""
    answers = bool(reply.calls) if example.answer.calls else bool(_plain(reply.content))
    has_markup = _MARKUP.search(reply.content) or _MARKUP.search(reply.reasoning)
    return bool(_plain(reply.reasoning)) and answers and reply.finish in ENDS and not has_markup


def ends_by_itself(example: Example, reply: Reply) -> bool:
    """The model said the token that ends an answer."""
    return reply.finish in ENDS


def same_answer(one: Reply, other: Reply) -> bool:
    """To the token, and with the same end."""
    return (one.token_ids, one.finish) == (other.token_ids, other.finish) and bool(one.token_ids)


def _canonical(call: ToolCall) -> str:
    """Arguments in any order; 7, 7.0, "7" and true are four things."""
    arguments: Mapping[str, Any] = call.arguments
    return json.dumps([call.name, arguments], sort_keys=True, ensure_ascii=False)


def _plain(text: str) -> str:
    return " ".join(text.split())
