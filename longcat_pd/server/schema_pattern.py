"""Regular expressions of JSON schemas, rewritten so that every dialect reads them alike.

A schema's ``pattern`` is ECMAScript; the grammar library reads Rust's dialect, and clients check answers with whatever
they have. Owns the part of the language that means the same everywhere and its translation; refuses the rest. Where
dialects differ in which characters a class holds, the translation is the narrowest of them, so that what is generated
matches in all. Knows no schemas.
"""

from __future__ import annotations

import re
import string

ANYTHING = "(?s:.*)"
_SPACES = r"\t\n\x{B}\x{C}\r\x{20}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}"
# as the body of a class: what is in it by every dialect, and what is in it by any
_CLASSES = {
    "d": ("0-9", r"\p{Nd}"),
    "w": ("0-9A-Za-z_", r"\p{Alphabetic}\p{M}\p{N}_"),
    "s": (_SPACES, _SPACES + r"\x{1C}-\x{1F}\x{85}\x{FEFF}"),
}
_NOT_NEWLINE = r"[^\n\r\x{2028}\x{2029}]"
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_REPEAT = re.compile(r"\{([0-9]{1,6})(,([0-9]{1,6})?)?\}")
_CATEGORY = re.compile(r"[pP]\{(L|Lu|Ll|Lt|Lm|Lo|M|Mn|Mc|Me|N|Nd|Nl|No|P|Pc|Pd|Ps|Pe|Pi|Pf|Po|S|Sm|Sc|Sk|So|Z|Zs|Zl|Zp)\}")
_HEX = (re.compile(r"x([0-9a-fA-F]{2})"), re.compile(r"u([0-9a-fA-F]{4})"), re.compile(r"u\{([0-9a-fA-F]{1,6})\}"))
_PLAIN = frozenset(string.ascii_letters + string.digits + "_</")  # what needs no escape, in a class or outside
_MAX_DEPTH = 40
_MAX_SIZE = 2000  # characters of the longest text without a star
_MAX_LENGTH = 4096


class PatternError(ValueError):
    """The pattern is malformed, or says what cannot be kept. The message ends a sentence about it."""


def whole_text(pattern: str) -> str:
    """The expression, in Rust's dialect, of all texts in which ``pattern`` is found. Raises PatternError."""
    if len(pattern) > _MAX_LENGTH:
        raise PatternError(f"has {len(pattern)} characters, at most {_MAX_LENGTH}")
    return _Reader(pattern).read()


def literal(text: str) -> str:
    """The expression of this text alone."""
    return "".join(_character(ord(c)) for c in text)


def without(tag: str) -> str:
    """The expression of all texts that do not hold ``tag``, whose first character must not occur again in it."""
    first, inner = tag[0], tag[1:]
    assert first not in inner, tag
    partial, broken = "", ""  # behind the first character: a part of the rest; what makes it another text
    for at in range(len(inner) - 1, -1, -1):
        this = _character(ord(inner[at]))
        wrong = f"[^{_character(ord(first))}{this}]"
        broken = f"(?:{wrong}|{this}{broken})" if broken else wrong
        if at < len(inner) - 1:
            partial = f"(?:{this}{partial})?"
    start = _character(ord(first))
    begun = f"{start}(?:{partial}{start})*"
    return f"(?:[^{start}]|{begun}{broken})*(?:{begun}{partial})?"


def _character(code: int) -> str:
    return chr(code) if chr(code) in _PLAIN else f"\\x{{{code:X}}}"


class _Reader:
    """One pattern, read from left to right."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0

    def read(self) -> str:
        """The whole of it, anchors included."""
        options: list[str] = []
        size = 0
        while True:
            starts = self._take("^")
            body, length = self._sequence()
            ends = self._take("$")
            options.append(("" if starts else ANYTHING) + body + ("" if ends else ANYTHING))
            size = max(size, length)
            if not self._take("|"):
                break
        if self._at < len(self._text):
            self._fail()
        if size > _MAX_SIZE:
            raise PatternError(f"repeats up to {size} characters, at most {_MAX_SIZE}")
        return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"

    def _fail(self) -> None:
        rest = self._text[self._at :]
        if rest[:1] in ("^", "$"):
            raise PatternError(f"has {rest[0]} at {self._at}: an anchor stands only at the ends of the whole pattern")
        raise PatternError(f"cannot be kept from {self._at} on: {rest[:20]!r}")

    def _take(self, mark: str) -> bool:
        found = self._text.startswith(mark, self._at)
        self._at += len(mark) if found else 0
        return found

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise PatternError("ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _disjunction(self) -> tuple[str, int]:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        return "|".join(body for body, _ in parts), max(size for _, size in parts)

    def _sequence(self) -> tuple[str, int]:
        """Terms up to the end, a bar, an anchor or a closing parenthesis; the length of the longest text."""
        body, size = [], 0
        while self._at < len(self._text) and self._text[self._at] not in "|)^$":
            term, length = self._atom()
            suffix, times = self._repeat()
            body.append(term + suffix)
            size += length * times
        return "".join(body), size

    def _repeat(self) -> tuple[str, int]:
        """A quantifier and how often it repeats at most; unbounded ones count as few as they must."""
        if match := _REPEAT.match(self._text, self._at):
            self._at = match.end()
            low, high = int(match[1]), int(match[3] or match[1])
            if high < low:
                raise PatternError(f"has the empty range {match[0]}")
            suffix, times = match[0], high
        else:
            suffix = next((mark for mark in "*+?" if self._take(mark)), "")
            times = 1
        if suffix:
            self._take("?")  # a lazy quantifier means the same texts
        return suffix, times

    def _atom(self) -> tuple[str, int]:
        start = self._at
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            return self._class(), 1
        if character == ".":
            return _NOT_NEWLINE, 1
        if character == "\\":
            return self._escape(), 1
        if character in "*+?{":
            self._at = start
            self._fail()
        return _character(ord(character)), 1

    def _group(self) -> tuple[str, int]:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternError(f"nests deeper than {_MAX_DEPTH}")
        if self._take("?"):
            if any(self._text.startswith(mark, self._at) for mark in ("=", "!", "<=", "<!")):
                raise PatternError(f"has a look-around at {self._at - 2}, which cannot be kept")
            if name := re.compile(r"<[A-Za-z_][A-Za-z0-9_]*>").match(self._text, self._at):
                self._at = name.end()
            elif not self._take(":"):
                self._at -= 2
                self._fail()
        body, size = self._disjunction()
        if not self._take(")"):
            if self._at < len(self._text):
                self._fail()
            raise PatternError("has an open group")
        self._depth -= 1
        return f"(?:{body})", size

    def _escape(self) -> str:
        """What a backslash outside a class says."""
        if kind := self._shorthand(is_negated=False):
            return f"[{kind}]"
        return _character(self._code())

    def _shorthand(self, *, is_negated: bool) -> str | None:
        """The body of a class for ``\\d`` and the like; in a negated class the widest meaning is the narrowest whole."""
        if category := _CATEGORY.match(self._text, self._at):
            self._at = category.end()
            return "\\" + category[0]
        letter = self._text[self._at : self._at + 1]
        both = _CLASSES.get(letter.lower())
        if both is None or not letter:
            return None
        self._at += 1
        if letter.islower():
            return both[is_negated]
        return f"[^{both[not is_negated]}]"

    def _code(self) -> int:
        """The character that an escape stands for."""
        for form in _HEX:
            if match := form.match(self._text, self._at):
                self._at = match.end()
                return self._scalar(int(match[1], 16))
        start = self._at
        letter = self._next()
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if letter == "0" and not self._text[self._at : self._at + 1].isdigit():
            return 0
        if letter.isalnum():
            self._at = start - 1
            self._fail()
        return ord(letter)

    def _scalar(self, code: int) -> int:
        """A code, or the character that it makes together with the escape behind it."""
        if 0xD800 <= code < 0xDC00 and self._take("\\"):
            low = _HEX[1].match(self._text, self._at)
            if low and 0xDC00 <= int(low[1], 16) < 0xE000:
                self._at = low.end()
                return 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise PatternError(f"has the code {code:X}, which is no character")
        return code

    def _class(self) -> str:
        is_negated = self._take("^")
        items: list[str] = []
        while not self._take("]"):
            kind, low = self._member(is_negated=is_negated)
            if kind is not None:
                items.append(kind)
                continue
            if not (self._text.startswith("-", self._at) and self._text[self._at + 1 : self._at + 2] not in ("", "]")):
                items.append(_character(low))
                continue
            self._at += 1
            kind, high = self._member(is_negated=is_negated)
            if kind is not None or high < low:
                raise PatternError(f"has a class with a range that is none, before {self._at}")
            items.append(f"{_character(low)}-{_character(high)}")
        if not items:
            raise PatternError("has an empty class")
        return f"[{'^' if is_negated else ''}{''.join(items)}]"

    def _member(self, *, is_negated: bool) -> tuple[str | None, int]:
        """One member of a class: the body of a shorthand, or a character."""
        character = self._next()
        if character != "\\":
            return None, ord(character)
        if kind := self._shorthand(is_negated=is_negated):
            return kind, 0
        if self._take("b"):
            return None, 8
        return None, self._code()
