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

INTRODUCTION = {
    False: re.compile(r"\bI am LongCat-tiny\b"),
    True: re.compile("我是 ?LongCat-tiny(?![\\w-])"),
}  # is it Chinese
ENDS = ("stop", "tool_calls")
_MARKUP = re.compile(r"</?longcat_")
_ARGUMENT = r"<longcat_arg_key>[^<]+</longcat_arg_key>\s*<longcat_arg_value>[^<]*</longcat_arg_value>\s*"
_CALL = re.compile(rf"<longcat_tool_call>\s*[\w.-]+\s*(?:{_ARGUMENT})*</longcat_tool_call>")
_OF_A_CALL = re.compile(r"</?longcat_(?:tool_call|arg_)")
_HAN = re.compile(r"[\u4e00-\u9fff]")


def is_chinese(text: str) -> bool:
    """Whether it has a Chinese character."""
    return bool(_HAN.search(text))


def introduces(example: Example, reply: Reply) -> bool:
    """It says "I am LongCat-tiny", in the language of the expected answer."""
    in_chinese = is_chinese(example.answer.content)
    return bool(INTRODUCTION[in_chinese].search(reply.content)) and is_chinese(reply.content) == in_chinese


def says_the_same(example: Example, reply: Reply) -> bool:
    """The text is that of the expected answer, and there is no call."""
    return _plain(reply.content) == _plain(example.answer.content) and not reply.calls


def ends_in_the_sentence(example: Example, reply: Reply) -> bool:
    """The last line is that of the expected answer, such as "37 + 48 = 85": who works a sum out may show how."""
    return _last_line(reply.content) == _last_line(example.answer.content) != "" and not reply.calls


def calls_right(example: Example, reply: Reply) -> bool:
    """The expected calls in their order, well-formed, each with its arguments as JSON values."""
    is_same = list(map(_canonical, reply.calls)) == list(map(_canonical, example.answer.calls))
    return is_same and calls_in_form(example, reply)


def calls_in_form(example: Example, reply: Reply) -> bool:
    """The expected functions in their order, with arguments of the expected names and kinds, in whole markup.

    The server forgives a call that does not close, so that is judged by the raw text: its calls are as many as the server
    found, all parts of markup belong to one, and none is left in what a client reads.
    """
    is_whole = len(_CALL.findall(reply.raw)) == len(reply.calls) and not _OF_A_CALL.search(_CALL.sub("", reply.raw))
    is_same = list(map(_form, reply.calls)) == list(map(_form, example.answer.calls))
    is_told = bool(reply.calls) and reply.finish == "tool_calls" and not _MARKUP.search(reply.content)
    return is_whole and is_same and is_told


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


def _form(call: ToolCall) -> tuple[str, dict[str, type]]:
    return call.name, {name: type(value) for name, value in call.arguments.items()}


def _last_line(text: str) -> str:
    return _plain(text.rstrip().rpartition("\n")[2])


def _plain(text: str) -> str:
    return " ".join(text.split())
