"""The keywords of one JSON schema object: each is read into what the grammar library enforces, or refused.

Owns which keywords are enforced, which are notes and which are refused, and what is malformed. What is around the object,
references and definitions, is its reader's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Protocol

from longcat_pd.errors import InvalidRequest
from longcat_pd.server.fields import shown
from longcat_pd.server.schema_formats import FORMATS
from longcat_pd.server.schema_pattern import PatternError, whole_text

Schema = dict[str, Any] | bool

MAX_NAMES = 500
MAX_PATTERNS = 16  # the library compares each with each
MAX_OPTIONS = 500
MAX_MEMBERS = 1000  # of objects and arrays among the values of one enum or const
MAX_PARTS = 8
MAX_TEXT = 4096  # of one literal text; the library's work for a mask grows with what is left of it
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
REFUSED: dict[str, tuple[Any, ...]] = {  # keyword -> the values that ask for nothing
    "$dynamicRef": (),
    "$recursiveRef": (),
    "contains": (),
    "contentEncoding": (),
    "contentMediaType": (),
    "contentSchema": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "disallow": (),
    "divisibleBy": (),
    "else": (),
    "extends": (),
    "if": (),
    "maxContains": (),
    "minContains": (),
    "not": (False,),
    "propertyNames": (True, {}),
    "then": (),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
EXACT = 2**53  # the library computes with doubles
_FARTHEST = 2**63 - 1024  # the largest of them that is a 64-bit integer
_WIDTHS = {"int32": {"minimum": -(2**31), "maximum": 2**31 - 1}, "int64": {"minimum": -_FARTHEST, "maximum": _FARTHEST}}
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def unenforced(path: str, keyword: str, why: str = "cannot be enforced") -> InvalidRequest:
    """The error for a keyword that would not be kept."""
    where = f"{path}.{keyword}"
    return InvalidRequest(f"{where}: the keyword {keyword!r} {why}", code="unsupported_parameter", param=where)


def malformed(path: str, why: str) -> InvalidRequest:
    """The error for what is no schema."""
    return InvalidRequest(f"{path} {why}", code="invalid_value", param=path)


class Reader(Protocol):
    """What stands around a schema object."""

    path: str

    def read_part(self, schema: Any, path: str) -> Schema:
        """A schema inside it."""
        ...

    def name_of(self, reference: str, path: str) -> str:
        """The name of the definition that a reference has become."""
        ...

    def check_text(self, text: str, path: str, keyword: str) -> None:
        """Refuse a literal that the answer's own markup would not survive."""
        ...

    def spend(self, text: str) -> None:
        """Count a text of the grammar; refuse one too many."""
        ...


class SchemaObject:
    """One schema object, keyword by keyword."""

    def __init__(self, reader: Reader, schema: dict[str, Any], path: str) -> None:
        self._reader = reader
        self._schema = schema
        self._path = path
        self._out: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """The enforced keywords, in the order given: the library's order of properties follows it."""
        readers = {
            "$ref": self._reference,
            "type": self._type,
            "enum": self._enum,
            "const": self._const,
            "items": self._items,
            "additionalItems": self._nothing,
            "required": self._required,
            "pattern": self._pattern,
            "format": self._format,
            "multipleOf": self._multiple,
            "additionalProperties": self._subschema,
            **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), self._list),
            **dict.fromkeys(("properties", "patternProperties"), self._map),
            **dict.fromkeys(_COUNTS, self._count),
            **dict.fromkeys((*LOWER, *UPPER), self._bound),
        }
        for keyword, value in self._schema.items():
            if value is None and keyword != "const":
                continue
            if keyword in REFUSED:
                if not any(value is inert or (value == inert and isinstance(inert, dict)) for inert in REFUSED[keyword]):
                    raise unenforced(self._path, keyword)
            elif keyword == "$id" and self._path != self._reader.path:
                raise unenforced(self._path, keyword, "moves the root of references and is not followed")
            elif keyword in readers:
                readers[keyword](keyword, value)
        self._names_wanted()
        return self._out

    def _malformed(self, keyword: str, wanted: str) -> InvalidRequest:
        return malformed(f"{self._path}.{keyword}", f"must be {wanted}, not {shown(self._schema[keyword])}")

    def _nothing(self, keyword: str, value: Any) -> None:
        """Read together with another keyword."""

    def _subschema(self, keyword: str, value: Any) -> None:
        self._out[keyword] = self._reader.read_part(value, f"{self._path}.{keyword}")

    def _reference(self, keyword: str, value: Any) -> None:
        if not isinstance(value, str):
            raise self._malformed(keyword, "a string")
        self._out[keyword] = f"#/$defs/{self._reader.name_of(value, self._path)}"

    def _type(self, keyword: str, value: Any) -> None:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not names or any(name not in TYPES for name in names):
            raise self._malformed(keyword, f"one or several of {', '.join(TYPES)}")
        self._out[keyword] = value

    def _enum(self, keyword: str, value: Any) -> None:
        if not isinstance(value, list) or not value:
            raise self._malformed(keyword, "a list of at least one value")
        self._check_value(keyword, value)
        self._out[keyword] = value

    def _const(self, keyword: str, value: Any) -> None:
        self._check_value(keyword, value)
        self._out[keyword] = value

    def _check_value(self, keyword: str, value: Any) -> None:
        self._reader.spend(json.dumps(value, ensure_ascii=False))
        todo, num_members = [value], 0
        while todo:
            item = todo.pop()
            num_members += len(item) if isinstance(item, (dict, list)) else 0
            if isinstance(item, str):
                self._check_text(keyword, item)
            elif isinstance(item, dict):
                todo.extend((*item, *item.values()))
            elif isinstance(item, list):
                todo.extend(item)
            elif isinstance(item, (int, float)) and (abs(item) > EXACT or 0 < abs(item) < 1e-15):
                raise unenforced(self._path, keyword, f"= {shown(item)} is beyond the numbers that are kept exactly")
        if num_members > MAX_MEMBERS + (len(value) if keyword == "enum" else 0):
            raise malformed(f"{self._path}.{keyword}", f"holds objects and arrays of over {MAX_MEMBERS} members")

    def _items(self, keyword: str, value: Any) -> None:
        if not isinstance(value, list):
            return self._subschema(keyword, value)
        if "prefixItems" in self._schema:
            raise self._malformed(keyword, "a schema where prefixItems is given")
        self._list("prefixItems", value)
        if (more := self._schema.get("additionalItems")) is not None:
            self._out["items"] = self._reader.read_part(more, f"{self._path}.additionalItems")
        return None

    def _list(self, keyword: str, value: Any) -> None:
        if not isinstance(value, list) or not value:
            raise malformed(f"{self._path}.{keyword}", f"must be a list of at least one schema, not {shown(value)}")
        most = MAX_PARTS if keyword == "allOf" else MAX_OPTIONS
        if len(value) > most:
            raise malformed(f"{self._path}.{keyword}", f"has {len(value)} entries, at most {most}")
        read = [self._reader.read_part(item, f"{self._path}.{keyword}[{i}]") for i, item in enumerate(value)]
        if keyword == "oneOf" and _are_different_values(read):
            keyword = "anyOf" if "anyOf" not in self._schema else keyword
        self._out[keyword] = [*self._out.get(keyword, ()), *read]

    def _map(self, keyword: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise self._malformed(keyword, "an object")
        most = MAX_PATTERNS if keyword == "patternProperties" else MAX_NAMES
        if len(value) > most:
            raise malformed(f"{self._path}.{keyword}", f"has {len(value)} entries, at most {most}")
        read = {}
        for name, schema in value.items():
            path = f"{self._path}.{keyword}.{name}"
            if keyword == "patternProperties":
                read[self._expression(keyword, name)] = self._reader.read_part(schema, path)
            else:
                self._check_name(keyword, name)
                read[name] = self._reader.read_part(schema, path)
        self._out[keyword] = read

    def _check_text(self, keyword: str, text: str) -> None:
        if len(text) > MAX_TEXT:
            raise malformed(f"{self._path}.{keyword}", f"holds a text of {len(text)} characters, at most {MAX_TEXT}")
        self._reader.check_text(text, self._path, keyword)

    def _check_name(self, keyword: str, name: str) -> None:
        self._reader.spend(name)
        self._check_text(keyword, name)
        if _CONTROL.search(name):
            raise unenforced(self._path, keyword, f"names {shown(name)}, which has a control character")

    def _required(self, keyword: str, value: Any) -> None:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._malformed(keyword, "a list of names")
        if len(value) > MAX_NAMES:
            raise malformed(f"{self._path}.{keyword}", f"has {len(value)} entries, at most {MAX_NAMES}")
        for name in value:
            self._check_name(keyword, name)
        self._out[keyword] = list(dict.fromkeys(value))

    def _names_wanted(self) -> None:
        """At least so many names: of those that are not listed two may be equal, so only one is worth something."""
        wanted = self._out.get("minProperties", 0)
        if wanted <= len(self._out.get("required", ())):
            self._out.pop("minProperties", None)
        elif wanted > 1:
            raise unenforced(self._path, "minProperties", "is enforced only up to 1 or the number of required names")

    def _count(self, keyword: str, value: Any) -> None:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._malformed(keyword, "an integer >= 0")
        self._out[keyword] = min(value, 2**31 - 1) if keyword.startswith("max") else value
        if value >= 2**31 and keyword.startswith("min"):
            raise malformed(f"{self._path}.{keyword}", f"= {shown(value)} cannot be satisfied")

    def _number(self, keyword: str, value: Any) -> int | float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._malformed(keyword, "a number")
        return value

    def _multiple(self, keyword: str, value: Any) -> None:
        if self._number(keyword, value) <= 0:
            raise self._malformed(keyword, "a number > 0")
        if len(Decimal(str(value)).normalize().as_tuple().digits) > 4:
            raise unenforced(self._path, keyword, f"= {shown(value)} has more than four digits that count")
        self._out[keyword] = value

    def _bound(self, keyword: str, value: Any) -> None:
        if value is False and keyword.startswith("exclusive"):  # draft 4
            return
        sign = -1 if keyword in LOWER else 1
        outwards = sign * self._number(keyword, value)
        if outwards < -EXACT:
            raise unenforced(self._path, keyword, f"= {shown(value)} is beyond the numbers that are kept exactly")
        if outwards > EXACT:  # never looser than asked
            near = float(min(outwards, _FARTHEST))
            value = sign * int(near if near <= outwards else math.nextafter(near, 0))
        self._out[keyword] = value

    def _expression(self, keyword: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self._malformed(keyword, "a string")
        try:
            expression = f"^(?:{whole_text(value)})$"
        except PatternError as error:
            raise unenforced(self._path, keyword, f"= {shown(value)} {error}") from None
        self._reader.spend(expression)
        return expression

    def _pattern(self, keyword: str, value: Any) -> None:
        add_pattern(self._out, self._expression(keyword, value))

    def _format(self, keyword: str, value: Any) -> None:
        """A format is about strings; those of OpenAPI's integers are bounds."""
        if not isinstance(value, str):
            raise self._malformed(keyword, "a string")
        if "string" not in kinds_of(self._schema):
            if value in _WIDTHS:
                self._out["allOf"] = [*self._out.get("allOf", ()), _WIDTHS[value]]
        elif value not in FORMATS:
            raise unenforced(self._path, keyword, f"= {shown(value)} cannot be enforced; these can: {', '.join(FORMATS)}")
        else:
            add_pattern(self._out, f"^(?:{FORMATS[value]})$")


def kinds_of(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema allows; all of them where it does not say so."""
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    return {name for name in named if isinstance(name, str)} if isinstance(named, list) else set(TYPES)


def add_pattern(schema: dict[str, Any], pattern: str) -> None:
    """One more pattern that strings of the schema have to match."""
    if "pattern" in schema:
        schema["allOf"] = [*schema.get("allOf", ()), {"pattern": pattern}]
    else:
        schema["pattern"] = pattern


def _are_different_values(options: list[Schema]) -> bool:
    """Whether the schemas are lists of values, no two of which are equal."""
    seen: list[str] = []
    for option in options:
        if (
            not isinstance(option, dict)
            or not set(option) <= {"const", "enum", "type"}
            or len(option.keys() & {"const", "enum"}) != 1
        ):
            return False
        for value in option.get("enum", [option.get("const")]):
            seen.append(
                json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value, sort_keys=True)
            )
    return len(seen) == len(set(seen))
