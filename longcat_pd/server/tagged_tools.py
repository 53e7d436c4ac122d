"""From a tool's parameters to the arguments of a call in tags, where strings stand as raw text.

Owns which arguments are written raw and what of their schemas is kept there; it follows how ``xml_call.py`` reads a value
back. Does not know the text of a grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from longcat_pd.engine.grammar_text import Argument, RawText, Schema, TaggedTool
from longcat_pd.server.fields import shown
from longcat_pd.server.named_kinds import MANY_REFERENCES, named_kinds
from longcat_pd.server.schema import Allowance, SchemaReader
from longcat_pd.server.schema_formats import FORMATS
from longcat_pd.server.schema_keywords import MAX_OPTIONS, kinds_of, malformed, unenforced
from longcat_pd.server.schema_pattern import literal, whole_text

FORBIDDEN = "</longcat_"  # how every closing tag begins: no string and no name may hold it
_NOT_IN_TAGS = ("allOf", "anyOf", "oneOf", "enum", "const", "patternProperties")
_LONGEST = 10_000
_OF_OBJECTS = (*_NOT_IN_TAGS, "properties", "required", "additionalProperties", "minProperties", "maxProperties")

Options = list[tuple[str, ...]]


def read_tagged(name: str, parameters: Mapping[str, Any] | None, path: str, *, allowance: Allowance) -> TaggedTool:
    """The arguments of a function, in the order of its properties. Raises InvalidRequest for what cannot be kept."""
    document = parameters or {}
    raw = _RawReader(SchemaReader(document, path), document)

    def json_value(value: Any, place: str) -> Schema:
        return SchemaReader(document, path, forbidden=FORBIDDEN, allowance=allowance).read(value, place)

    schema = _followed(document, path, json_value)
    json_value(schema, path)  # whatever is refused anywhere
    for keyword in _NOT_IN_TAGS:
        if schema.get(keyword) is not None:
            raise unenforced(path, keyword, "cannot be enforced where arguments are written in tags")
    kind = schema.get("type") or "object"
    if kind != "object" and "object" not in kind:
        raise malformed(f"{path}.type", f"= {shown(kind)} allows no object, which arguments are")
    properties: Mapping[str, Any] = schema.get("properties") or {}
    required = dict.fromkeys(schema.get("required") or ())
    others = schema.get("additionalProperties")
    other = json_value(True if others is None else others, f"{path}.additionalProperties")
    arguments = []
    for key in (*properties, *(key for key in required if key not in properties)):
        place = f"{path}.properties.{key}"
        if key != key.strip():
            raise unenforced(path, "properties", f"names {shown(key)}, whose white space would be lost in tags")
        value = properties.get(key)
        if isinstance(value, dict) and named_kinds(value, document) == {"string"}:
            arguments.append(Argument(key, raw.read(value, place), key in required))
        else:
            arguments.append(Argument(key, json_value(value, place) if key in properties else other, key in required))
    is_free = schema.get("properties") is None and others is not False
    _check_number(schema, path, most=len(arguments) if not is_free else None, least=len(required))
    return TaggedTool(name, tuple(arguments), other if is_free else None)


def _followed(document: Mapping[str, Any], path: str, check: Callable[[Any, str], Schema]) -> Mapping[str, Any]:
    """The schema that a chain of bare references leads to; ``check`` refuses what is refused in any schema."""
    schema: Any = document
    for _ in range(MANY_REFERENCES):
        if not isinstance(schema, dict) or schema.get("$ref") is None:
            break
        check({keyword: value for keyword, value in schema.items() if keyword != "$ref"}, path)
        beside = {keyword for keyword in _OF_OBJECTS if schema.get(keyword) is not None}
        if "type" in schema and "object" not in kinds_of(schema):
            beside.add("type")
        if beside or not isinstance(schema["$ref"], str):
            raise unenforced(path, "$ref", f"stands beside {', '.join(sorted(beside))}, which is not followed in tags")
        schema = SchemaReader(document, path).resolve(schema["$ref"], path)
    if not isinstance(schema, dict) or schema.get("$ref") is not None:
        raise malformed(f"{path}.$ref", "leads to no schema of an object")
    return schema


def _check_number(schema: Mapping[str, Any], path: str, *, most: int | None, least: int) -> None:
    """The number of arguments follows from their names alone."""
    if (schema.get("minProperties") or 0) > least:
        raise unenforced(path, "minProperties", "is enforced in tags only up to the number of required names")
    limit = schema.get("maxProperties")
    if limit is not None and (most is None or limit < most):
        raise unenforced(path, "maxProperties", "cannot be enforced where arguments are written in tags")


class _RawReader:
    """What raw text has to be by a schema that names the type string alone, references followed.

    Args:
        reader: of the document; everything has been read by it once.
        document: which the schema is part of.
    """

    def __init__(self, reader: SchemaReader, document: Mapping[str, Any]) -> None:
        self._reader = reader
        self._document = document

    def read(self, schema: Mapping[str, Any], path: str) -> RawText:
        """Raises InvalidRequest for what cannot be kept."""
        options = self._options(schema, path, ())
        return RawText(() if () in options else tuple(dict.fromkeys(options)))

    def _options(self, schema: Mapping[str, Any] | bool, path: str, way: tuple[str, ...]) -> Options:
        """Expressions that raw text has to match, all of one of the options. ``way``: the references that led here."""
        if isinstance(schema, bool):
            return [()] if schema else []
        if "string" not in kinds_of(schema):
            return []
        options: Options = [_of_text(schema, path)]
        for i, part in enumerate(schema.get("allOf") or ()):
            options = _both(options, self._options(part, f"{path}.allOf[{i}]", way), path, "allOf")
        if (reference := schema.get("$ref")) is not None:
            if reference in way:
                raise unenforced(path, "$ref", f"= {shown(reference)} leads in a circle, which is not followed in raw text")
            target = self._reader.resolve(reference, path)
            more = self._options(target, self._reader.place(reference), (*way, reference))
            options = _both(options, more, path, "$ref")
        several = [keyword for keyword in ("anyOf", "oneOf") if schema.get(keyword) is not None]
        if len(several) > 1:
            raise unenforced(path, "oneOf", "beside anyOf cannot be enforced in an argument written in tags")
        for keyword in several:
            options = _both(options, self._of_several(schema[keyword], path, keyword, way), path, keyword)
        return options

    def _of_several(self, given: list[Any], path: str, keyword: str, way: tuple[str, ...]) -> Options:
        """Those of several schemas that allow strings; the value is read as one whatever it looks like."""
        kinds = [named_kinds(option, self._document) for option in given]
        places = [i for i, named in enumerate(kinds) if not named or "string" in named]
        if keyword == "oneOf" and len(places) > 1 and not _are_apart([given[i] for i in places]):
            raise unenforced(path, keyword, "of several strings cannot be enforced in an argument written in tags")
        parts = [self._options(given[i], f"{path}.{keyword}[{i}]", way) for i in places]
        return [option for part in parts for option in part]


def _both(these: Options, those: Options, path: str, keyword: str) -> Options:
    """The options of texts that match one of these and one of those."""
    if len(these) * len(those) > MAX_OPTIONS:
        number = f"{len(these)} times {len(those)}"
        raise unenforced(path, keyword, f"makes {number} options of an argument written in tags, at most {MAX_OPTIONS}")
    both = [(*one, *other) for one in these for other in those]
    if not both:
        raise malformed(f"{path}.{keyword}", "cannot be satisfied: no value of it is a string")
    return both


def _are_apart(schemas: list[Any]) -> bool:
    """Whether all of them list their values, and no string is a value of two."""
    seen: list[str] = []
    for schema in schemas:
        values = schema if isinstance(schema, dict) else {}
        listed = [values["const"]] if "const" in values else values.get("enum")
        if listed is None:
            return False
        seen += {value for value in listed if isinstance(value, str)}
    return len(seen) == len(set(seen))


def _of_text(schema: Mapping[str, Any], path: str) -> tuple[str, ...]:
    """The expressions that a schema object names itself."""
    expressions = []
    for keyword, values in (("enum", schema.get("enum")), ("const", [schema["const"]] if "const" in schema else None)):
        if values is not None:
            expressions.append(_one_of(values, path, keyword))
    if schema.get("pattern") is not None:
        expressions.append(whole_text(schema["pattern"]))
    if schema.get("format") is not None and (schema["format"] in FORMATS or "string" in kinds_of(schema)):
        expressions.append(FORMATS[schema["format"]])
    low, high = int(schema.get("minLength") or 0), schema.get("maxLength")
    for keyword, bound in (("minLength", low), ("maxLength", high or 0)):
        if bound > _LONGEST:
            raise unenforced(path, keyword, f"= {bound} cannot be enforced in tags; at most {_LONGEST} can")
    if low or high is not None:
        expressions.append(f"(?s:.{{{low},{'' if high is None else int(high)}}})")
    return tuple(expressions)


def _one_of(values: list[Any], path: str, keyword: str) -> str:
    texts = [value for value in values if isinstance(value, str)]
    for text in texts:
        if text != text.strip():
            raise unenforced(path, keyword, f"holds {shown(text)}, whose white space would be lost in tags")
    if not texts:
        raise malformed(f"{path}.{keyword}", "cannot be satisfied: no value of it is a string")
    return "|".join(map(literal, texts))
