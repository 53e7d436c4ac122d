"""One finished tool call in XML style: the name, then pairs of argument key and value.

Owns the reading of such a block and what a value means. The text of a value is a string where the tool's schema says so;
elsewhere it is read as JSON, else as a Python literal, else it is a string after all. JSON inside the block is read too.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from longcat_pd.server.fields import kind_of, parse_json
from longcat_pd.server.markup import KEY_CLOSE, KEY_OPEN, VALUE_CLOSE, VALUE_OPEN
from longcat_pd.server.named_kinds import named_kinds, properties_of

_KEY = f"{KEY_OPEN}((?:(?!{KEY_CLOSE}).)*){KEY_CLOSE}"
_PAIR = re.compile(f"\\s*{_KEY}\\s*{VALUE_OPEN}(.*?){VALUE_CLOSE}\\s*", re.DOTALL)
_NAME = re.compile(r"[^\s<>{}]+")
_LONGEST_LITERAL = 4096  # characters; Python's own parser can be driven out of its stack by longer ones

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ArgumentSchemas:
    """What a function's ``parameters`` say of its arguments."""

    parameters: Any = None
    properties: Schema = field(default_factory=dict)

    def kinds(self, name: str) -> set[str]:
        """The JSON types that are named for an argument; empty if none is."""
        return named_kinds(self.properties.get(name), self.parameters)


def argument_schemas(tools: Iterable[Schema]) -> dict[str, ArgumentSchemas]:
    """By the name of each function."""
    schemas: dict[str, ArgumentSchemas] = {}
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters")
        schemas[function["name"]] = ArgumentSchemas(parameters, properties_of(parameters))
    return schemas


def read_block(block: str, schemas: Mapping[str, ArgumentSchemas]) -> tuple[str, str] | None:
    """Name and JSON text of the arguments of what stands between the tags; None if it is malformed."""
    text = block.strip()
    if text.startswith("{"):
        return _read_json(text)
    head = re.split(f"\n|{KEY_OPEN}", text, maxsplit=1)[0]
    name = head.strip()
    if not _NAME.fullmatch(name):
        return None
    known = schemas.get(name, ArgumentSchemas())
    arguments: dict[str, Any] = {}
    place = len(head)
    while pair := _PAIR.match(text, place):
        key, value = pair[1].strip(), pair[2].strip()
        arguments[key] = _value(value, known.kinds(key))
        place = pair.end()
    return (name, _to_text(arguments)) if not text[place:].strip() else None


def _read_json(text: str) -> tuple[str, str] | None:
    try:
        call = parse_json(text)
    except ValueError:
        return None
    name, arguments = call.get("name"), call.get("arguments")
    if arguments is None:
        arguments = call.get("parameters")
    if not isinstance(name, str) or not name or not isinstance(arguments, (dict, type(None))):
        return None
    return name, _to_text(arguments or {})


def _value(text: str, kinds: set[str]) -> Any:
    if kinds == {"string"}:
        return text
    for read in (parse_json, _python_literal):
        try:
            value = read(text)
        except ValueError:
            continue
        # a schema that allows strings among others: only what is plainly one of the others is read
        return value if "string" not in kinds or _is_among(value, kinds) else text
    return text


def _python_literal(text: str) -> Any:
    if len(text) > _LONGEST_LITERAL:
        raise ValueError("too long")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in the model's text
            value = ast.literal_eval(text)
        value = parse_json(json.dumps(value, allow_nan=False))  # only what JSON can say, in JSON's own types
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return value


def _is_among(value: Any, kinds: set[str]) -> bool:
    return kind_of(value) in kinds


def _to_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
