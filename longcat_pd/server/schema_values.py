"""Questions about the values of a schema that the reader has made. Knows no request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from decimal import Decimal
from typing import Any

MULTIPLE_DIGITS = 4
_SCALARS = {"null", "boolean", "integer", "number", "string"}


def can_end(schema: dict[str, Any] | bool, ending: AbstractSet[str]) -> bool:
    """Whether a value may be finite if only the definitions in ``ending`` are known to have finite ones.

    Says nothing of other contradictions.
    """
    if isinstance(schema, bool) or "enum" in schema or "const" in schema:
        return True
    if "$ref" in schema and schema["$ref"].rsplit("/", 1)[1] not in ending:
        return False
    if not all(can_end(part, ending) for part in schema.get("allOf", ())):
        return False
    for several in ("anyOf", "oneOf"):
        if several in schema and not any(can_end(part, ending) for part in schema[several]):
            return False
    named = schema.get("type", "null")
    kinds = {named} if isinstance(named, str) else set(named)
    if kinds & _SCALARS:
        return True
    return ("object" in kinds and _object_ends(schema, ending)) or ("array" in kinds and _array_ends(schema, ending))


def _object_ends(schema: dict[str, Any], ending: AbstractSet[str]) -> bool:
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    if not all(can_end(properties.get(name, others), ending) for name in schema.get("required", ())):
        return False
    names = [*properties.values(), *schema.get("patternProperties", {}).values(), others]
    return not schema.get("minProperties") or any(can_end(part, ending) for part in names)


def _array_ends(schema: dict[str, Any], ending: AbstractSet[str]) -> bool:
    num, first = schema.get("minItems", 0), schema.get("prefixItems", [])
    needed = [*first[:num], *([schema.get("items", True)] if num > len(first) else [])]
    return all(can_end(part, ending) for part in needed)


def nesting(schema: dict[str, Any] | bool, definitions: Mapping[str, Any]) -> int:
    """At most so many schemas inside one another, references followed.

    Definitions that lead back to themselves, and those that lead to them, count with all that is in them, since any of it
    may be met on one way. The library follows these ways on its stack, in an order of its own.
    """
    levels = {name: list(_levels(definition)) for name, definition in definitions.items()}
    needs = {name: {other for _, other in of if other} for name, of in levels.items()}
    needed_by: dict[str, list[str]] = {name: [] for name in definitions}
    for name, others in needs.items():
        for other in others:
            needed_by[other].append(name)
    known: dict[str, int] = {}

    def depth(of: list[tuple[int, str]], beyond: int = 0) -> int:
        return max(place + (known.get(name, beyond) if name else 0) for place, name in of)

    ready = [name for name, others in needs.items() if not others]
    for name in ready:
        known[name] = depth(levels[name])
        for user in needed_by[name]:
            needs[user].discard(name)
            if not needs[user]:
                ready.append(user)
    circular = sum(max(place for place, _ in of) for name, of in levels.items() if name not in known)
    return depth(list(_levels(schema)), circular + max(known.values(), default=0))


def _levels(schema: Any, depth: int = 1) -> Iterator[tuple[int, str]]:
    """How deep each schema stands in this one, and the definition that it refers to, or ""."""
    name = schema["$ref"].rsplit("/", 1)[1] if isinstance(schema, dict) and "$ref" in schema else ""
    yield depth, name
    for part in _parts(schema):
        yield from _levels(part, depth + 1)


def _parts(schema: Any) -> Iterator[Any]:
    """The schemas in this one."""
    if isinstance(schema, bool):
        return
    for several in ("anyOf", "oneOf", "allOf"):
        yield from schema.get(several, ())
    yield from _members(schema)


def _members(schema: dict[str, Any]) -> Iterator[Any]:
    """The schemas of members; one at least."""
    yield from schema.get("prefixItems", ())
    for named in ("properties", "patternProperties"):
        yield from schema.get(named, {}).values()
    yield schema.get("items", True)
    yield schema.get("additionalProperties", True)


def most_patterns(schema: dict[str, Any] | bool, definitions: Mapping[str, Any]) -> int:
    """At most so many expressions one string may have to match; the library's work doubles with each."""
    return round(_heaviest(schema, definitions, lambda place: float("pattern" in place)))


def most_multiples(schema: dict[str, Any] | bool, definitions: Mapping[str, Any]) -> float:
    """At most so many digits has the product of what one number may have to be a multiple of; one alone has up to
    ``MULTIPLE_DIGITS``. The library counts up to that product."""
    return _heaviest(schema, definitions, _digits)


def _digits(schema: dict[str, Any]) -> float:
    if "multipleOf" not in schema:
        return 0.0
    value = Decimal(str(schema["multipleOf"])).normalize()
    digits = int("".join(map(str, value.as_tuple().digits)))
    return min(max(math.log10(digits), abs(float(value.log10()))), MULTIPLE_DIGITS)


def _heaviest(
    schema: dict[str, Any] | bool, definitions: Mapping[str, Any], weight: Callable[[dict[str, Any]], float]
) -> float:
    """The most that may come together in one value or in one part of it; a definition that leads back to itself counts
    once."""
    known: dict[str, float] = {}

    def total(part: Any) -> float:
        if isinstance(part, bool):
            return 0.0
        most = weight(part)
        for several in ("anyOf", "oneOf"):
            most += max([total(option) for option in part.get(several, ())], default=0.0)
        most += sum([total(other) for other in part.get("allOf", ())])
        if "$ref" in part:
            name = part["$ref"].rsplit("/", 1)[1]
            if name not in known:
                known[name] = 0.0
                known[name] = total(definitions[name])
            most += known[name]
        return most + max([total(member) for member in _members(part)])

    return total(schema)
