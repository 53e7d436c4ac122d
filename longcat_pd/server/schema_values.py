"""Questions about the values of a schema that the reader has made. Knows no request."""

from __future__ import annotations

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
