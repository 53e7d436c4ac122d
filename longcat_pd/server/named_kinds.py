"""Which JSON types a schema names, references into its document followed, as far as that decides how a value is written.

Owns this one question, so that whoever writes arguments in tags and whoever reads them answer it alike. Looks at schemas as
clients send them, unchecked: what is malformed names nothing. Does not know what is enforced of a schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from longcat_pd.server.fields import kind_of

MANY_REFERENCES = 10  # one after the other at the top of a document
_MOST_PLACES = 2000  # schemas that are looked at for one value; one that has more names nothing
_DEEPEST = 100

Schema = Mapping[str, Any]


class _TooMuch(Exception):
    """More schemas than are looked at."""


def led_to(document: Any, reference: str) -> Any:
    """What a reference ``#`` or ``#/…`` into a document leads to. Raises LookupError: it leads elsewhere or nowhere."""
    first, *steps = reference.split("/")
    if first != "#":
        raise LookupError(reference)
    place = document
    for step in steps:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict) and name in place:
            place = place[name]
        elif isinstance(place, list) and name.isascii() and name.isdigit() and len(name) < 9 and int(name) < len(place):
            place = place[int(name)]
        else:
            raise LookupError(reference)
    return place


def properties_of(document: Any) -> Schema:
    """The ``properties`` of an object's schema, where a chain of references at its top leads; empty if it has none."""
    schema = document
    for _ in range(MANY_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str):
            break
        schema = _led_to(document, reference)
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def named_kinds(schema: Any, document: Any) -> set[str]:
    """The JSON types that a schema names, an integer being a number; empty if it names none.

    Those that all its keywords name which name any: of ``anyOf`` and ``oneOf`` whatever one of the options names. A keyword
    that leaves none of the types before it, in the order of the code, counts for nothing.
    """
    try:
        return _Search(document).kinds(schema, ())
    except _TooMuch:
        return set()


class _Search:
    """One question, with a limit to its work."""

    def __init__(self, document: Any) -> None:
        self._document = document
        self._num_left = _MOST_PLACES

    def kinds(self, schema: Any, way: tuple[str, ...], depth: int = 0) -> set[str]:
        """As ``named_kinds``; ``way``: the references that led here, none of which is followed again."""
        if not isinstance(schema, dict):
            return set()
        self._num_left -= 1
        if self._num_left < 0 or depth > _DEEPEST:
            raise _TooMuch
        found: set[str] = set()
        for named in (_types(schema.get("type")), _of_values(schema), *self._of_parts(schema, way, depth + 1)):
            found = found & named or found or named
        return found

    def _of_parts(self, schema: Schema, way: tuple[str, ...], depth: int) -> Iterable[set[str]]:
        for several in ("anyOf", "oneOf"):
            yield set().union(*(self.kinds(option, way, depth) for option in _list(schema.get(several))))
        for part in _list(schema.get("allOf")):
            yield self.kinds(part, way, depth)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in way:
            yield self.kinds(_led_to(self._document, reference), (*way, reference), depth)


def _led_to(document: Any, reference: str) -> Any:
    try:
        return led_to(document, reference)
    except LookupError:
        return None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _types(named: Any) -> set[str]:
    names = [named] if isinstance(named, str) else _list(named)
    if not all(isinstance(name, str) for name in names):
        return set()
    return {"number" if name == "integer" else name for name in names}


def _of_values(schema: Schema) -> set[str]:
    """By ``enum`` or ``const``: of many values one of each class is looked at."""
    values = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
    return {kind_of(value) for value in {type(value): value for value in values}.values()}
