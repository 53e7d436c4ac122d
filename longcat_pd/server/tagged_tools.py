"""From a tool's parameters to the arguments of a call in tags, where strings stand as raw text.

Owns which arguments are written raw and what of their schemas is kept there; it follows how ``xml_call.py`` reads a value
back. Does not know the text of a grammar.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longcat_pd.engine.grammar_text import Argument, RawText, Schema, TaggedTool
from longcat_pd.server.fields import shown
from longcat_pd.server.schema import Allowance, SchemaReader
from longcat_pd.server.schema_formats import FORMATS
from longcat_pd.server.schema_keywords import malformed, unenforced
from longcat_pd.server.schema_pattern import literal, whole_text
from longcat_pd.server.xml_call import named_kinds

FORBIDDEN = "</longcat_"  # how every closing tag begins: no string and no name may hold it
_NOT_IN_TAGS = ("allOf", "anyOf", "oneOf", "enum", "const", "patternProperties")
_LONGEST = 10_000
_MANY = 10  # references one after the other

Options = list[tuple[str, ...]]


def read_tagged(name: str, parameters: Mapping[str, Any] | None, path: str, *, allowance: Allowance) -> TaggedTool:
    """The arguments of a function, in the order of its properties. Raises InvalidRequest for what cannot be kept."""
    document = parameters or {}
    schema = _followed(document, path)

    def json_value(value: Any, place: str) -> Schema:
        return SchemaReader(document, path, forbidden=FORBIDDEN, allowance=allowance).read(value, place)

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
        if isinstance(value, dict) and named_kinds(value) == {"string"}:
            arguments.append(Argument(key, _raw(value, place), key in required))
        else:
            arguments.append(Argument(key, json_value(value, place) if key in properties else other, key in required))
    is_free = schema.get("properties") is None and others is not False
    _check_number(schema, path, most=len(arguments) if not is_free else None, least=len(required))
    return TaggedTool(name, tuple(arguments), other if is_free else None)


def _followed(document: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """The schema that a chain of bare references leads to."""
    schema: Any = document
    for _ in range(_MANY):
        if not isinstance(schema, dict) or schema.get("$ref") is None:
            break
        beside = schema.keys() & {*_NOT_IN_TAGS, "properties", "required", "additionalProperties"}
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


def _raw(schema: Mapping[str, Any], path: str) -> RawText:
    options = _options(schema, path)
    return RawText(() if () in options else tuple(options))


def _options(schema: Mapping[str, Any], path: str) -> Options:
    """Expressions that raw text has to match, all of one of the options."""
    for keyword in ("$ref", "allOf"):
        if schema.get(keyword) is not None:
            raise unenforced(path, keyword, "cannot be enforced in an argument of type string written in tags")
    expressions = []
    for keyword, values in (("enum", schema.get("enum")), ("const", [schema["const"]] if "const" in schema else None)):
        if values is not None:
            expressions.append(_one_of(values, path, keyword))
    if schema.get("pattern") is not None:
        expressions.append(whole_text(schema["pattern"]))
    if schema.get("format") is not None:
        expressions.append(FORMATS[schema["format"]])
    low, high = int(schema.get("minLength") or 0), schema.get("maxLength")
    for keyword, bound in (("minLength", low), ("maxLength", high or 0)):
        if bound > _LONGEST:
            raise unenforced(path, keyword, f"= {bound} cannot be enforced in tags; at most {_LONGEST} can")
    if low or high is not None:
        expressions.append(f"(?s:.{{{low},{'' if high is None else int(high)}}})")
    several = [keyword for keyword in ("anyOf", "oneOf") if schema.get(keyword) is not None]
    if not several:
        return [tuple(expressions)]
    if len(several) > 1:
        raise unenforced(path, "oneOf", "beside anyOf cannot be enforced in an argument written in tags")
    return [(*expressions, *option) for option in _of_several(schema, several[0], path)]


def _of_several(schema: Mapping[str, Any], keyword: str, path: str) -> Options:
    """Those of several schemas that ask for strings; the value is read as one whatever it looks like."""
    options: Options = []
    kinds = [named_kinds(option) for option in schema[keyword]]
    if keyword == "oneOf" and ([] in map(list, kinds) or kinds.count({"string"}) > 1):
        raise unenforced(path, keyword, "of several strings cannot be enforced in an argument written in tags")
    for i, option in enumerate(schema[keyword]):
        if kinds[i] == {"string"}:
            options += _options(option, f"{path}.{keyword}[{i}]")
    return options


def _one_of(values: list[Any], path: str, keyword: str) -> str:
    texts = [value for value in values if isinstance(value, str)]
    for text in texts:
        if text != text.strip():
            raise unenforced(path, keyword, f"holds {shown(text)}, whose white space would be lost in tags")
    if not texts:
        raise malformed(f"{path}.{keyword}", "cannot be satisfied: no value of it is a string")
    return "|".join(map(literal, texts))
