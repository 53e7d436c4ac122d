"""One tool call in JSON style, read character by character: ``{"name": "f", "arguments": {...}}`` and the closing tag.

Owns the grammar of that block and when its parts can be passed on. Does not know what stands around the block.
"""

from __future__ import annotations

import json
import re
from enum import Enum

from longcat_pd.server.markup import CALL_CLOSE

_LITERAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_LITERAL_CHARACTERS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
_SPACE = frozenset(" \t\n\r")
_HEX = frozenset("0123456789abcdefABCDEF")
_MAX_DEPTH = 64


class _Next(Enum):
    """What may come next where no string and no literal is open."""

    OBJECT = 0
    KEY_OR_END = 1
    KEY = 2
    COLON = 3
    VALUE = 4
    VALUE_OR_END = 5
    COMMA_OR_END = 6
    CLOSING_TAG = 7


class JsonCall:
    """Reads the block behind its opening tag. ``arguments`` may stand before ``name``; both spellings of it are read.

    Whatever has been read is in ``raw``; a character that cannot belong to the block is refused and not in it.
    """

    def __init__(self) -> None:
        self._raw: list[str] = []
        self._end = 0  # of the object in it
        self.name: str | None = None
        self.is_complete = False
        self._next = _Next.OBJECT
        self._stack: list[str] = []
        self._token: list[str] = []  # the string (from its quote on), the literal or the closing tag that is open
        self._escape = 0  # characters that an escape in a string still needs; -1: the one behind the backslash
        self._key = ""
        self._arguments: list[str] = []
        self._in_arguments = False
        self.has_arguments = False

    @property
    def raw(self) -> str:
        """All that was read."""
        return "".join(self._raw)

    @property
    def is_whole(self) -> bool:
        """Whether only the closing tag may be missing."""
        return self._next is _Next.CLOSING_TAG

    @property
    def behind(self) -> str:
        """What was read behind the object's last brace: white space and the part of the closing tag that has come."""
        return "".join(self._raw[self._end :]) if self.is_whole else ""

    def take_arguments(self) -> str:
        """The arguments' text since the last call."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def push(self, character: str) -> bool:
        """Read one character. False: it cannot stand here."""
        was_argument = self._in_arguments
        accepted = self._accept(character)
        if accepted:
            self._raw.append(character)
            if was_argument or self._in_arguments:
                # models write bare line breaks into strings, which JSON does not allow
                bare = self._in_string() and character < " "
                self._arguments.append(json.dumps(character)[1:-1] if bare else character)
        return accepted

    def _in_string(self) -> bool:
        return self._token[:1] == ['"']

    def _accept(self, character: str) -> bool:
        if self._next is _Next.CLOSING_TAG:
            return self._closing_tag(character)
        if self._in_string():
            return self._string(character)
        if self._token:
            if character in _LITERAL_CHARACTERS:
                self._token.append(character)
                return True
            return self._end_literal() and self._structure(character)
        return self._structure(character)

    def _closing_tag(self, character: str) -> bool:
        if not self._token and character in _SPACE:
            return True
        tag = "".join(self._token) + character
        if not CALL_CLOSE.startswith(tag):
            return False
        self._token.append(character)
        self.is_complete = tag == CALL_CLOSE
        return True

    def _string(self, character: str) -> bool:
        if self._escape == -1:
            if character not in '"\\/bfnrtu':
                return False
            self._escape = 4 if character == "u" else 0
        elif self._escape:
            if character not in _HEX:
                return False
            self._escape -= 1
        elif character == "\\":
            self._escape = -1
        elif character == '"':
            return self._end_string()
        self._token.append(character)
        return True

    def _end_string(self) -> bool:
        token = "".join(self._token) + '"'
        self._token.clear()
        if len(self._stack) > 1:
            return True
        text: str = json.loads(token, strict=False)
        if self._next is _Next.COLON:
            self._key = text
        elif self._key == "name" and self.name is None:
            if not text or any("\ud800" <= character <= "\udfff" for character in text):
                return False
            self.name = text
        return True

    def _end_literal(self) -> bool:
        literal = "".join(self._token)
        self._token.clear()
        if len(self._stack) == 1 and self._expects_arguments() and literal != "null":
            return False
        return _LITERAL.fullmatch(literal) is not None

    def _expects_arguments(self) -> bool:
        return self._key in ("arguments", "parameters") and not self.has_arguments

    def _structure(self, character: str) -> bool:
        if character in _SPACE:
            return True
        if character in "}]":
            return self._close(character)
        if self._next is _Next.COMMA_OR_END:
            self._next = _Next.KEY if self._stack[-1] == "{" else _Next.VALUE
            return character == ","
        if self._next is _Next.COLON:
            self._next = _Next.VALUE
            return character == ":"
        if self._next in (_Next.KEY, _Next.KEY_OR_END):
            self._token, self._next = [character], _Next.COLON
            return character == '"'
        if self._next is _Next.OBJECT and character != "{":
            return False
        return self._value(character)

    def _value(self, character: str) -> bool:
        if character in "{[":
            return self._open(character)
        self._next, self._token = _Next.COMMA_OR_END, [character]
        if character == '"':
            return not (len(self._stack) == 1 and self._expects_arguments())
        return character in _LITERAL_CHARACTERS

    def _open(self, character: str) -> bool:
        if len(self._stack) == 1 and self._expects_arguments():
            if character != "{":
                return False
            self.has_arguments = self._in_arguments = True
        self._stack.append(character)
        self._next = _Next.KEY_OR_END if character == "{" else _Next.VALUE_OR_END
        return len(self._stack) <= _MAX_DEPTH

    def _close(self, character: str) -> bool:
        empty = {"}": _Next.KEY_OR_END, "]": _Next.VALUE_OR_END}[character]
        if self._next not in (_Next.COMMA_OR_END, empty) or self._stack.pop() != {"}": "{", "]": "["}[character]:
            return False
        self._next = _Next.COMMA_OR_END
        if len(self._stack) == 1:
            self._in_arguments = False
        if self._stack:
            return True
        if self.name is not None:
            self._next, self._end = _Next.CLOSING_TAG, len(self._raw) + 1
        return self.is_whole
