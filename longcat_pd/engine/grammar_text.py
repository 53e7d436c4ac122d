"""Texts of grammars, in the Lark dialect of the grammar library.

Owns what surrounds a JSON value in an answer: reasoning before it, the markup of tool calls in both styles, the spelling of
markers as special tokens or as text. Expressions are in the library's dialect and stand for whole texts. Knows neither the
library nor requests; the schemas that it is given hold only keywords that the library enforces.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Schema = Mapping[str, Any]
Reasoning = Literal["none", "open", "optional"]

# No white space but one blank behind a comma or colon: enough for what models write, and no place where a model could go
# on with white space for ever. Ten times cheaper in masks than white space everywhere, and no class of tokens of its own.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_ANYTHING = "(?s:.*)"
# white space at the ends of raw text is dropped when it is read back
_SPACE = r"\t\n\x{B}\x{C}\r\x{1C}-\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}"
_TRIMMED = f"(?:[^{_SPACE}](?:{_ANYTHING}[^{_SPACE}])?)?"


@dataclass(frozen=True)
class Markup:
    """The tags of an answer, opening and closing."""

    think: tuple[str, str]
    call: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]


@dataclass(frozen=True)
class RawText:
    """An argument written as it is. ``options``: it has to match all expressions of one of them; empty: any text."""

    options: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Argument:
    """One argument of a call in tags: raw text, or JSON by a schema."""

    key: str
    value: RawText | Schema
    is_required: bool


@dataclass(frozen=True)
class TaggedTool:
    """A function whose calls are written in tags, its arguments in this order; ``others``: the schema of further ones."""

    name: str
    arguments: tuple[Argument, ...]
    others: Schema | None = None


@dataclass(frozen=True)
class JsonTool:
    """A function whose calls are written as one JSON object; ``arguments`` has to allow objects only."""

    name: str
    arguments: Schema


class GrammarText:
    """One grammar.

    Args:
        markup: the tags.
        special: those of them that are special tokens, with their ids; the others are spelt by ordinary tokens.
    """

    def __init__(self, markup: Markup, special: Mapping[str, int]) -> None:
        self._markup = markup
        self._special = special
        self._rules: dict[str, str] = {}
        self._names: dict[tuple[str, str, str], str] = {}

    def json(self, schema: Schema) -> str:
        """The grammar item of one JSON value."""
        return self._rule("json", f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS}, ensure_ascii=False)}")

    def calls(self, tools: Iterable[JsonTool | TaggedTool], *, only_one: bool) -> str:
        """The grammar item of one call, or of several back to back."""
        calls = [self._tagged_call(tool) if isinstance(tool, TaggedTool) else self._json_call(tool) for tool in tools]
        call = self._rule("call", " | ".join(calls))
        return call if only_one else f"{call}+"

    def whole(self, answer: str, reasoning: Reasoning) -> str:
        """The text of the grammar: an item, and what may stand before it."""
        if reasoning != "none":
            opening, closing = self._markup.think
            thought = f'{self._text_before(closing, [()])} "\\n"?'
            before = thought if reasoning == "open" else f"({self._tag(opening)} {thought})?"
            answer = f"{before} {answer}"
        return "".join(f"{name}: {body}\n" for name, body in [("start", answer), *self._rules.items()])

    def _rule(self, kind: str, body: str, *, attributes: str = "") -> str:
        """A rule with this body; an equal one is used again."""
        known = self._names.setdefault((kind, body, attributes), f"{kind}_{len(self._rules)}")
        self._rules[known + attributes] = body
        return known

    def _tag(self, tag: str) -> str:
        return f"<[{self._special[tag]}]>" if tag in self._special else json.dumps(tag)

    def _text_before(self, tag: str, options: Sequence[Sequence[str]], *, never: Sequence[str] = ()) -> str:
        """Raw text of one of the options up to and with the tag, which it does not hold, nor those of ``never``.

        A special token ends a text by itself. Behind a spelt tag the text is over as early as it can be, for the longest
        text that fits would swallow the beginning of the tag.
        """
        outside = [f"~{_expression(f'{_ANYTHING}{_escaped(other)}{_ANYTHING}')}" for other in dict.fromkeys((tag, *never))]
        choices = [" & ".join([_expression(e) for e in (_ANYTHING, *option)] + outside) for option in options]
        text = self._rule("TEXT", " | ".join(choices))
        if tag in self._special:
            return f"{text} {self._tag(tag)}"
        return self._rule("text", self._rule("TEXT", f"{text} {json.dumps(tag)}"), attributes="[lazy]")

    def _json_call(self, tool: JsonTool) -> str:
        opening, closing = map(self._tag, self._markup.call)
        arguments = dict(tool.arguments)
        definitions = arguments.pop("$defs", None)
        call = {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": arguments},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        value = self.json(call if definitions is None else {**call, "$defs": definitions})
        return self._rule("call", f'{opening} "\\n" {value} "\\n" {closing}')

    def _tagged_call(self, tool: TaggedTool) -> str:
        opening, closing = map(self._tag, self._markup.call)
        parts = [opening, json.dumps(f"{tool.name}\n")]
        for argument in tool.arguments:
            pair = self._pair(json.dumps(argument.key, ensure_ascii=False), argument.value)
            parts.append(pair if argument.is_required else f"{pair}?")
        if tool.others is not None:
            parts.append(f"{self._pair(_expression('[A-Za-z_][A-Za-z0-9_]{0,63}'), tool.others)}*")
        return self._rule("call", " ".join([*parts, closing]))

    def _pair(self, key: str, value: RawText | Schema) -> str:
        key_opening, key_closing = map(self._tag, self._markup.key)
        value_opening, value_closing = self._markup.value
        if isinstance(value, RawText):
            options = [(*option, _TRIMMED) for option in value.options] or [()]
            text = self._text_before(value_closing, options, never=(self._markup.call[1],))
        else:
            text = f"{self.json(value)} {self._tag(value_closing)}"
        body = f'{key_opening} {key} {key_closing} "\\n" {self._tag(value_opening)} {text} "\\n"'
        return self._rule("pair", body)


def _expression(expression: str) -> str:
    return "/" + expression.replace("/", "\\/") + "/"


def _escaped(text: str) -> str:
    return "".join(c if c.isalnum() or c in "_</>" else f"\\x{{{ord(c):X}}}" for c in text)
