"""Reading a client's JSON schema into one that the grammar library enforces to the letter.

Owns which keywords are enforced, which are notes and which are refused, what is malformed, and how large a schema may be.
What comes out holds nothing but enforced keywords: notes are gone, references lead into its own ``$defs``, patterns and
formats have become expressions of whole texts. Draft 2020-12; the array form of ``items`` of older drafts is read as well.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import Any

from longcat_pd.server.fields import shown
from longcat_pd.server.named_kinds import led_to
from longcat_pd.server.schema_keywords import (
    EXACT,
    LOWER,
    UPPER,
    Schema,
    SchemaObject,
    add_pattern,
    kinds_of,
    malformed,
    unenforced,
)
from longcat_pd.server.schema_pattern import without
from longcat_pd.server.schema_values import MULTIPLE_DIGITS, can_end, most_multiples, most_patterns, nesting

MAX_SIZE = 128 * 1024
MAX_PLACES = 2500
MAX_PLACES_TOGETHER = 10_000
MAX_TOGETHER = 12
MAX_NESTING = 250  # on the way into a value; the library needs a few KiB of stack for each
_ANY = "any"


class Allowance:
    """What the schemas of one body may come to, whatever documents they are in.

    Args:
        path: of what holds them all.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._left = MAX_PLACES_TOGETHER

    def take(self) -> None:
        """One schema more. Raises InvalidRequest."""
        self._left -= 1
        if self._left < 0:
            raise malformed(self._path, f"hold more than {MAX_PLACES_TOGETHER} schemas, references followed")


class SchemaReader:
    """Schemas of one document.

    Args:
        document: what references lead into.
        path: of the document in the request.
        forbidden: a tag that no string and no name in the value may hold; empty: none.
        allowance: of the body, where it has several documents.
    """

    def __init__(
        self, document: Mapping[str, Any], path: str, *, forbidden: str = "", allowance: Allowance | None = None
    ) -> None:
        self._document = document
        self._allowance = allowance
        self.path = path
        self._forbidden = forbidden
        self._clean = f"^(?:{without(forbidden)})$" if forbidden else ""
        self._names: dict[str, str] = {}  # reference -> name of the definition
        self._pending: deque[str] = deque()
        self._definitions: dict[str, Schema] = {}
        self._num_places = 0
        self._size = 0

    def read(self, schema: Any, path: str) -> dict[str, Any]:
        """A schema with all definitions that it needs. Raises InvalidRequest."""
        read = self.read_part(schema, path)
        while self._pending:
            reference = self._pending.popleft()
            self._definitions[self._names[reference]] = self.read_part(self.resolve(reference, path), self.place(reference))
        if nesting(read, self._definitions) > MAX_NESTING:
            raise malformed(path, f"nests deeper than {MAX_NESTING} schemas, references followed")
        whole = read if isinstance(read, dict) else {"allOf": [read]}
        whole = {**whole, "$defs": self._definitions} if self._definitions else whole
        if len(json.dumps(whole, ensure_ascii=False)) > MAX_SIZE:
            raise malformed(path, f"takes more than {MAX_SIZE} characters as a grammar")
        if most_patterns(read, self._definitions) > MAX_TOGETHER:
            raise unenforced(path, "allOf", f"asks a string to match more than {MAX_TOGETHER} patterns")
        if most_multiples(read, self._definitions) > MULTIPLE_DIGITS:
            raise unenforced(path, "allOf", f"asks for multiples whose product has more than {MULTIPLE_DIGITS} digits")
        self._check_end(read, path)
        return whole

    def resolve(self, reference: str, path: str) -> Any:
        """What a reference into the document leads to. Raises InvalidRequest."""
        if reference != "#" and not reference.startswith("#/"):
            raise unenforced(path, "$ref", f"= {shown(reference)} leads out of the schema; only #/... is followed")
        try:
            return led_to(self._document, reference)
        except LookupError:
            raise malformed(f"{path}.$ref", f"= {shown(reference)} leads nowhere") from None

    def place(self, reference: str) -> str:
        """The path of what a reference leads to."""
        return self.path + "".join(f".{step}" for step in reference.split("/")[1:])

    def _check_end(self, read: Schema, path: str) -> None:
        """Refuse what no finite text satisfies: a definition that needs itself."""
        ending: set[str] = set()
        while more := {name for name, s in self._definitions.items() if name not in ending and can_end(s, ending)}:
            ending |= more
        for reference, name in self._names.items():
            if name not in ending:
                raise malformed(path, f"cannot be satisfied: a value of {shown(reference)} never ends")
        if not can_end(read, ending):
            raise malformed(path, "cannot be satisfied: its value never ends")

    def read_part(self, schema: Any, path: str) -> Schema:
        """A schema inside another one. Raises InvalidRequest."""
        if isinstance(schema, bool):
            return self._any() if schema and self._forbidden else schema
        if not isinstance(schema, dict):
            raise malformed(path, f"is no schema but {shown(schema)}")
        self._num_places += 1
        most = MAX_PLACES // 5 if self._forbidden else MAX_PLACES  # in tags each string costs an expression of its own
        if self._num_places > most:
            raise malformed(self.path, f"holds more than {most} schemas")
        if self._allowance is not None:
            self._allowance.take()
        place = SchemaObject(self, schema, path)
        return self._guard(place.read()) if self._forbidden else place.read()

    def name_of(self, reference: str, path: str) -> str:
        """The name of the definition that a reference has become."""
        self.resolve(reference, path)
        if reference not in self._names:
            self._names[reference] = str(len(self._names))
            self._pending.append(reference)
        return self._names[reference]

    def check_text(self, text: str, path: str, keyword: str) -> None:
        """Refuse a literal that the answer's own markup would not survive."""
        if self._forbidden and self._forbidden in text:
            raise unenforced(path, keyword, f"holds {self._forbidden!r}, which ends the argument")

    def spend(self, text: str) -> None:
        """Count a text that the grammar holds once more for each reference that leads to it."""
        self._size += len(text)
        if self._size > MAX_SIZE:
            raise malformed(self.path, f"takes more than {MAX_SIZE} characters as a grammar")

    def _any(self) -> dict[str, Any]:
        """Any value, of which no string and no name holds the tag."""
        reference = {"$ref": f"#/$defs/{_ANY}"}
        if _ANY not in self._definitions:
            self._definitions[_ANY] = {
                "anyOf": [
                    {"type": ["null", "boolean"]},
                    {"type": "number", "minimum": -EXACT, "maximum": EXACT},
                    {"type": "string", "pattern": self._clean},
                    {"type": "array", "items": reference},
                    {"type": "object", "patternProperties": {self._clean: reference}, "additionalProperties": False},
                ]
            }
        return reference

    def _guard(self, schema: dict[str, Any]) -> Schema:
        """Keep the tag out of strings, and numbers within what the parser of the markup reads."""
        if not schema:
            return self._any()
        if any(word in schema for word in ("enum", "const", "$ref", "anyOf", "oneOf", "allOf")) and "type" not in schema:
            return schema
        kinds = kinds_of(schema)
        guarded = dict(schema)
        if "string" in kinds and not ("enum" in schema or "const" in schema):
            add_pattern(guarded, self._clean)
        if kinds & {"number", "integer"} and not any(
            word in schema for word in (*LOWER, *UPPER, "multipleOf", "enum", "const")
        ):
            guarded |= {"minimum": -EXACT, "maximum": EXACT}
        if "array" in kinds and "items" not in schema:
            guarded["items"] = self._any()
        if "object" in kinds and not any(word in schema for word in ("properties", "patternProperties")):
            more = guarded.pop("additionalProperties", None)
            guarded["patternProperties"] = {self._clean: self._any() if more is None else more}
            guarded["additionalProperties"] = False
        return guarded
