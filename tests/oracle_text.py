"""What the message of an answer is, by definition: read off the whole text at once, slowly.

An independent twin of the incremental readers of ``longcat_pd/server``: it shares no code with them, sees the text only
when it is complete, searches, splits and descends where they hold back and step. It need be neither fast nor early.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

THINK_OPEN, THINK_CLOSE = "<longcat_think>", "</longcat_think>"
CALL_OPEN, CALL_CLOSE = "<longcat_tool_call>", "</longcat_tool_call>"
KEY_OPEN, KEY_CLOSE = "<longcat_arg_key>", "</longcat_arg_key>"
VALUE_OPEN, VALUE_CLOSE = "<longcat_arg_value>", "</longcat_arg_value>"

Kinds = Callable[[str, str], set[str]]  # the JSON types that a function's argument may have; empty: nothing is said


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How one answer is read."""

    stops: tuple[str, ...] = ()
    num_exempt: int = 0  # tokens at the beginning in which no stop string is looked for
    keeps_stop: bool = False  # what matched, a token too, is part of the text
    prompt_end: str | None = None  # None: reasoning is not looked for
    keeps_markup: bool = False
    style: str | None = None  # None: calls are not looked for
    kinds: Kinds = lambda function, key: set()
    only_one: bool = False


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str


@dataclass(kw_only=True)
class Message:
    """``num_tokens`` of those that were generated are counted; ``offsets``: characters of raw text before each."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    num_complete: int = 0
    finish_reason: str = ""
    matched_stop: str | int | None = None
    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    offsets: list[int] = field(default_factory=list)


def answer(tokens: Sequence[tuple[int, bytes]], finish: str, stop_token: int | None, rules: Rules) -> Message:
    """The message of tokens (id, and what each adds to the raw bytes) that the engine ended as it says."""
    parts = [data for _, data in tokens]
    if stop_token is not None and not rules.keeps_stop:
        parts[-1] = b""
    texts = [b"".join(parts[:num]).decode("utf-8", "ignore") for num in range(len(parts) + 1)]
    ends = [len(text) for text in texts]

    def token_at(place: int) -> int:
        return next(num for num in range(1, len(texts)) if ends[num] >= place)

    start = ends[min(rules.num_exempt, len(parts))]
    end, stop = _earliest(texts[-2] if stop_token is not None else texts[-1], start, rules.stops)
    text = texts[-1] if stop is None else texts[-1][: end - (0 if rules.keeps_stop else len(stop))]
    message = Message(finish_reason=finish, matched_stop=stop_token, num_tokens=len(tokens))
    if stop is not None:
        message.finish_reason, message.matched_stop, message.num_tokens = "stop", stop, token_at(end)
    message.reasoning, message.content, closed = _split(text, rules)
    if rules.style is not None:
        offset = len(text) - len(message.content)
        was_cut = message.finish_reason == "length"
        reading = _Calls(message.content, rules, was_cut=was_cut)
        message.content, message.calls, message.num_complete = reading.content(), reading.calls, reading.num_complete
        if reading.done_at is not None:
            message.finish_reason, message.matched_stop = "tool_calls", None
            seen = (num for num in range(1, len(texts)) if _released(texts[num], start, rules) >= offset + reading.done_at)
            message.num_tokens = min(message.num_tokens, next(seen, len(tokens)))
        elif reading.num_complete and message.finish_reason == "stop" and message.matched_stop is None:
            message.finish_reason = "tool_calls"
    if closed is not None:
        message.num_reasoning_tokens = token_at(closed) if closed else 0
    message.num_reasoning_tokens = message.num_tokens if closed == -1 else message.num_reasoning_tokens
    message.offsets = ends[: message.num_tokens]
    return message


def _earliest(text: str, start: int, stops: Sequence[str]) -> tuple[int, str | None]:
    """Where the first stop string is complete, and which: the longest of several."""
    for end in range(start + 1, len(text) + 1):
        complete = [stop for stop in stops if text[start:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return len(text), None


def _released(text: str, start: int, rules: Rules) -> int:
    """Characters of a text that is not over which no stop string can take back."""
    stops = rules.stops
    end, stop = _earliest(text, start, stops)
    if rules.keeps_stop:
        return end
    if stop is not None or len(text) <= start:
        return end - len(stop or "")
    return next(
        cut for cut in range(start, len(text) + 1) if cut == len(text) or any(s.startswith(text[cut:]) for s in stops)
    )


def _split(text: str, rules: Rules) -> tuple[str, str, int | None]:
    """Reasoning, the rest, and where the block closes: -1 if it never does, None if there is none."""
    if rules.prompt_end is None:
        return "", text, None
    bare = rules.prompt_end.rstrip()
    opens, begin = bare.endswith(THINK_OPEN), 0
    has_border = "\n" in rules.prompt_end[len(bare) :]
    if text.startswith(THINK_OPEN):
        opens, begin, has_border = True, len(THINK_OPEN), False
    if not opens:
        return "", text, None
    end = text.find(THINK_CLOSE, begin)
    inner = text[begin:] if end < 0 else text[begin:end]
    if not has_border:
        inner = inner.removeprefix("\n")
    if end < 0:
        return (text if rules.keeps_markup else inner), "", -1
    behind = end + len(THINK_CLOSE)
    rest = text[behind:].removeprefix("\n")
    before = text[: len(text) - len(rest)]
    return (before if rules.keeps_markup else inner.removesuffix("\n")), rest, behind


class _Calls:
    """All calls of a text. The text before the first, between two and behind the last is in ``segments``."""

    def __init__(self, text: str, rules: Rules, *, was_cut: bool) -> None:
        self.segments = [""]
        self.calls: list[Call] = []
        self.num_complete = 0
        self.done_at: int | None = None  # where the only call that is wanted is over
        place = 0
        while place < len(text) and self.done_at is None:
            begin = text.find(CALL_OPEN, place)
            if begin < 0:
                begin = len(text)
            self.segments[-1] += text[place:begin]
            if begin < len(text):
                block = text[begin + len(CALL_OPEN) :]
                read = self._json(block) if rules.style == "longcat" else self._xml(block, rules.kinds, was_cut=was_cut)
                length, is_closed = read
                begin += len(CALL_OPEN) + length
                self.done_at = begin if is_closed and rules.only_one else None
            place = begin

    def content(self) -> str:
        """What is not in calls; white space alone behind a call is nothing."""
        first, *others = self.segments
        return first + "".join(segment for segment in others if segment.strip())

    def _add(self, name: str, arguments: str, *, is_complete: bool = True) -> None:
        self.calls.append(Call(name, arguments))
        self.num_complete += is_complete
        self.segments.append("")

    def _json(self, text: str) -> tuple[int, bool]:
        block = _JsonBlock(text)
        is_good = block.state in ("closed", "whole")
        if is_good or block.is_sent:
            self._add(block.name or "", block.arguments(), is_complete=is_good)
        else:
            self.segments[-1] += CALL_OPEN + text[: block.end]
        return block.end, block.state == "closed"

    def _xml(self, text: str, kinds: Kinds, *, was_cut: bool) -> tuple[int, bool]:
        end = text.find(CALL_CLOSE)
        if end >= 0:
            call = _xml_block(text[:end], kinds)
            end += len(CALL_CLOSE)
        else:
            tail = next(n for n in range(len(CALL_CLOSE) - 1, -1, -1) if text.endswith(CALL_CLOSE[:n]))
            end = len(text) - tail
            call = None if was_cut else _xml_block(text[:end], kinds)
            if call is not None:
                self._add(*call)
                return end, False
        if call is None:
            self.segments[-1] += CALL_OPEN + text[:end]
        else:
            self._add(*call)
        return end, call is not None


class _Stuck(Exception):
    """A character cannot stand where it stands."""


class _Over(Exception):
    """The text has ended."""


_SPACE = " \t\n\r"
_LITERAL = re.compile(r"[-+.0-9a-zE]+")
_GOOD_LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')


class _JsonBlock:
    """One block in JSON style by recursive descent.

    ``state``: closed (with its tag), whole (only the tag is missing, the text is over), open (the text is over), bad.
    ``end``: where the block ends; what stands there is ordinary text again. Nothing behind the object's brace is lost.
    """

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.name: str | None = None
        self.begin: int | None = None
        self.stop: int | None = None
        try:
            self._object()
        except _Over:
            self.state, self.end = "open", len(text)
        except _Stuck:
            self.state, self.end = "bad", self.at
        else:
            rest = text[self.at :].lstrip(_SPACE)
            self.state, self.end = "bad", self.at
            if rest.startswith(CALL_CLOSE):
                self.state, self.end = "closed", len(text) - len(rest) + len(CALL_CLOSE)
            elif CALL_CLOSE.startswith(rest):
                self.state = "whole"

    @property
    def is_sent(self) -> bool:
        return self.name is not None and self.begin is not None

    def arguments(self) -> str:
        """As they are sent: bare control characters in strings are escaped."""
        if self.begin is None:
            return "{}"
        sent = self.text[self.begin : self.stop or self.end]
        return re.sub(r'"(?:[^"\\]|\\.)*"?', _escape_controls, sent, flags=re.DOTALL)

    def _peek(self) -> str:
        if self.at >= len(self.text):
            raise _Over
        return self.text[self.at]

    def _space(self) -> None:
        while self._peek() in _SPACE:
            self.at += 1

    def _expect(self, wanted: str) -> None:
        self._space()
        if self._peek() != wanted:
            raise _Stuck
        self.at += 1

    def _object(self) -> None:
        self._expect("{")
        self._items("}", self._member)
        if self.name is None:
            self.at -= 1
            raise _Stuck

    def _items(self, close: str, item: Callable[[], None]) -> None:
        self._space()
        if self._peek() == close:
            self.at += 1
            return
        while True:
            self._space()
            item()
            self._space()
            if self._peek() == close:
                self.at += 1
                return
            self._expect(",")

    def _member(self) -> None:
        key = self._string()
        self._expect(":")
        self._space()
        if key in ("arguments", "parameters") and self.begin is None:
            if self._peek() == "{":
                self.begin = self.at
                self._value()
                self.stop = self.at
            elif _LITERAL.match(self._peek()):
                if self._literal() != "null":
                    raise _Stuck
            else:
                raise _Stuck
        elif key == "name" and self.name is None and self._peek() == '"':
            name = self._string()
            if not name or any("\ud800" <= c <= "\udfff" for c in name):
                self.at -= 1
                raise _Stuck
            self.name = name
        else:
            self._value()

    def _value(self) -> None:
        first = self._peek()
        if first == '"':
            self._string()
        elif first == "{":
            self.at += 1
            self._items("}", self._pair)
        elif first == "[":
            self.at += 1
            self._items("]", self._value)
        elif _LITERAL.match(first):
            self._literal()
        else:
            raise _Stuck

    def _pair(self) -> None:
        self._string()
        self._expect(":")
        self._space()
        self._value()

    def _literal(self) -> str:
        found = _LITERAL.match(self.text, self.at)
        assert found is not None
        self.at = found.end()
        self._peek()  # it may go on
        if not _GOOD_LITERAL.fullmatch(found[0]):
            raise _Stuck
        return found[0]

    def _string(self) -> str:
        begin = self.at
        if self._peek() != '"':
            raise _Stuck
        self.at += 1
        while self._peek() != '"':
            if self._peek() == "\\":
                self._escape()
            else:
                self.at += 1
        self.at += 1
        text: str = json.loads(self.text[begin : self.at], strict=False)
        return text

    def _escape(self) -> None:
        found = _ESCAPE.match(self.text, self.at)
        if found:
            self.at = found.end()
            return
        self.at += 1
        if self._peek() != "u":
            raise _Stuck
        self.at += 1
        while self._peek() in "0123456789abcdefABCDEF":
            self.at += 1
        raise _Stuck


def _escape_controls(found: re.Match[str]) -> str:
    return re.sub(r"[\x00-\x1f]", lambda control: json.dumps(control[0])[1:-1], found[0])


def _xml_block(text: str, kinds: Kinds) -> tuple[str, str] | None:
    text = text.strip()
    if text.startswith("{"):
        return _json_in_xml(text)
    head = text.split("\n")[0].split(KEY_OPEN)[0]
    name, rest = head.strip(), text[len(head) :].strip()
    if not name or re.search(r"[\s<>{}]", name):
        return None
    arguments: dict[str, object] = {}
    while rest:
        if not rest.startswith(KEY_OPEN) or KEY_CLOSE not in rest:
            return None
        key, rest = rest.removeprefix(KEY_OPEN).split(KEY_CLOSE, 1)
        rest = rest.lstrip()
        if not rest.startswith(VALUE_OPEN) or VALUE_CLOSE not in rest:
            return None
        value, rest = rest.removeprefix(VALUE_OPEN).split(VALUE_CLOSE, 1)
        arguments[key.strip()] = _typed(value.strip(), kinds(name, key.strip()))
        rest = rest.lstrip()
    return name, json.dumps(arguments, ensure_ascii=False)


def _json_in_xml(text: str) -> tuple[str, str] | None:
    call = _read(text, json.loads)
    if not isinstance(call, dict):
        return None
    name, arguments = call.get("name"), call.get("arguments")
    if arguments is None:
        arguments = call.get("parameters")
    if not isinstance(name, str) or not name or not isinstance(arguments, dict | None):
        return None
    return name, json.dumps(arguments or {}, ensure_ascii=False)


class _Unreadable:
    pass


def _read(text: str, read: Callable[[str], object]) -> object:
    """What JSON can say of it, or an ``_Unreadable``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes
            value: object = json.loads(json.dumps(read(text), allow_nan=False))
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _Unreadable()
    return value


def _typed(text: str, kinds: set[str]) -> object:
    value: object = text if kinds == {"string"} else _read(text, json.loads)
    if isinstance(value, _Unreadable):
        value = _read(text, ast.literal_eval)
    if isinstance(value, _Unreadable):
        return text
    names = {dict: {"object"}, list: {"array"}, str: {"string"}, bool: {"boolean"}, int: {"integer", "number"}}
    kind = names.get(type(value), {"number"} if isinstance(value, float) else {"null"})
    return text if "string" in kinds and not kind & kinds else value
