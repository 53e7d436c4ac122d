"""Questions about the values of a schema that the reader has made. Knows no request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

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


def most_patterns(schema: dict[str, Any] | bool, definitions: Mapping[str, Any], known: dict[str, int]) -> int:
    """At most so many expressions one string may have to match; the library's work doubles with each.

    ``known``: of definitions that have been looked at; one that leads back to itself counts once.
    """
    if isinstance(schema, bool):
        return 0

    def most(parts: Iterable[Any]) -> int:
        return max((most_patterns(part, definitions, known) for part in parts), default=0)

    num = int("pattern" in schema) + most(schema.get("anyOf", ())) + most(schema.get("oneOf", ()))
    num += sum(most_patterns(part, definitions, known) for part in schema.get("allOf", ()))
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        if name not in known:
            known[name] = 0
            known[name] = most_patterns(definitions[name], definitions, known)
        num += known[name]
    inside = [*schema.get("properties", {}).values(), *schema.get("patternProperties", {}).values()]
    inside += [*schema.get("prefixItems", ()), schema.get("items", True), schema.get("additionalProperties", True)]
    return num + most(inside)
