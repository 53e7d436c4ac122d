"""Random JSON schemas of the keywords that are enforced, and answers drawn under a grammar's masks.

The schemas are of hypothesis; ``texts`` plays a model without opinion. The library is asked directly: what is tested is
what the texts of grammars mean, not who computes masks from them.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import random
import re
import uuid
from typing import Any

import llguidance
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker

from longcat_pd.engine.grammar import Vocabulary
from longcat_pd.server.text import TextProcessor
from longcat_pd.tiny.tokenizer import train

VOCAB_SIZE = 600
EOS = 2
TOKENIZER = train(VOCAB_SIZE)
TEXT = TextProcessor(VOCAB_SIZE, TOKENIZER, tokenizer_config={"eos_token": "</longcat_s>"})
VOCABULARY = Vocabulary(TOKENIZER.to_str(), VOCAB_SIZE, [EOS])
LIBRARY = llguidance.LLTokenizer(TOKENIZER.to_str(), n_vocab=VOCAB_SIZE, eos_token=EOS)

FORMATS = FormatChecker(formats=())
NAMES = ("a", "b", "c", "id", "na me", 'q"', "é", "$x")
WORDS = ("", "x", "yes", "no", "é", 'a"b', "new\nline", "</b>", " ")
_WORD = {"title": "looks like something else", "type": "string", "enum": ["1.10", "true", "5", "null", "yes"]}
PATTERNS = ("^[a-z]{1,3}$", "b", r"^\d{2}-\d$", r"^\S+$", "^(x|yy)*$", r"^[^\s<]{0,4}$", "^$|^z", r"\w.\W")


def _is(read, error=ValueError):
    def check(value: object) -> bool:
        if isinstance(value, str):
            read(value)
        return True

    return check, error


def _matches(pattern):
    return lambda value: not isinstance(value, str) or re.fullmatch(pattern, value) is not None


for _name, (_check, _error) in {
    "date": _is(datetime.date.fromisoformat),
    "ipv4": _is(ipaddress.IPv4Address),
    "ipv6": _is(ipaddress.IPv6Address),
    "uuid": _is(uuid.UUID),
    "date-time": _is(datetime.datetime.fromisoformat),
    "time": _is(datetime.time.fromisoformat),
}.items():
    FORMATS.checks(_name, _error)(_check)
for _name, _pattern in {
    "email": r"[^@\s]{1,64}@[A-Za-z0-9.-]{1,253}",
    "hostname": r"(?=.{1,253}$)([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?",
    "duration": r"P(?!$)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?!$)(\d+H)?(\d+M)?(\d+S)?)?)",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[^\s<>\"{}|\\^`]+",
}.items():
    FORMATS.checks(_name)(_matches(_pattern))


def validator(schema: Any) -> Draft202012Validator:
    """Judges values by a schema, formats included."""
    return Draft202012Validator(schema, format_checker=FORMATS)


def check(grammar: str) -> str:
    """As the engine does: why the library does not keep a grammar, or empty."""
    return VOCABULARY.refusal(grammar)


def accepts(grammar: str, text: str) -> bool:
    """Whether a text, markers as special tokens, is a whole answer."""
    matcher = llguidance.LLMatcher(LIBRARY, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = LIBRARY.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def draw(grammar: str, seed: int, *, limit: int = 200, hurry: int = 40) -> str | None:
    """A text of random tokens that the masks allow, or None if it is not over after ``limit`` of them.

    Tokens that end something are preferred after ``hurry`` of them, or hardly any text would end.
    """
    matcher = llguidance.LLMatcher(LIBRARY, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    source, ids = random.Random(seed), []
    for step in range(limit):
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()
        allowed = [i for i in range(VOCAB_SIZE) if mask[i // 8] >> (i % 8) & 1]
        assert allowed, (grammar, TEXT.raw(ids))
        if EOS in allowed and (len(allowed) == 1 or source.random() < 0.3):
            return TEXT.raw(ids)
        allowed = [i for i in allowed if i != EOS]
        enders = [i for i in allowed if i in _ENDERS] if step >= hurry else []
        token = source.choice(enders or allowed)
        assert matcher.consume_token(token), matcher.get_error()
        ids.append(token)
    return None


_ENDERS = {LIBRARY.tokenize_str(text)[0] for text in '"]}0'} | {TEXT.marker_ids[m] for m in TEXT.marker_ids if "/" in m}


def _numbers(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    bound = st.integers(-50, 50) if kind == "integer" else st.integers(-50, 50) | st.sampled_from([0.5, -2.25, 10.125])
    fields = {"minimum": bound, "exclusiveMinimum": bound}
    return st.one_of(
        st.just({}),
        st.fixed_dictionaries({}, optional=fields),
        bound.map(lambda low: {"minimum": low, "maximum": low + 7}),
        bound.map(lambda low: {"exclusiveMinimum": low, "exclusiveMaximum": low + 3}),
        st.sampled_from([1, 2, 7, 0.5, 0.25]).map(lambda n: {"multipleOf": n}),
    ).map(lambda keywords: {"type": kind, **keywords})


def _strings() -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.just({}),
        st.integers(0, 3).map(lambda n: {"minLength": n, "maxLength": n + 3}),
        st.sampled_from(PATTERNS).map(lambda p: {"pattern": p}),
        st.sampled_from(sorted(FORMATS.checkers)).map(lambda f: {"format": f}),
        st.lists(st.sampled_from(WORDS), min_size=1, max_size=3, unique=True).map(lambda w: {"enum": w}),
    ).map(lambda keywords: {"type": "string", **keywords})


def _leaves() -> st.SearchStrategy[Any]:
    values = st.sampled_from([None, True, False, 0, -3, 1.5, "x", 'q"', [], [1, "a"], {"k": [None]}])
    word = {"$ref": "#/$defs/word"}
    return st.one_of(
        st.sampled_from(
            [True, {}, {"type": "null"}, {"type": "boolean"}, {"type": ["string", "null"]}, {"$ref": "#/$defs/leaf"}]
        ),
        st.just({"$ref": "#/$defs/tree"}),
        st.sampled_from([word, {"anyOf": [word, {"type": "null"}]}, {"allOf": [word, {"minLength": 4}]}]),
        _numbers("integer"),
        _numbers("number"),
        _strings(),
        values.map(lambda value: {"const": value}),
        st.lists(values, min_size=1, max_size=3, unique_by=json.dumps).map(lambda v: {"enum": v}),
        st.sampled_from([{"minimum": 3}, {"maxLength": 2}, {"required": ["a"]}, {"items": {"type": "null"}}]),
    )


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    @st.composite
    def build(draw_from: st.DrawFn) -> dict[str, Any]:
        names = draw_from(st.lists(st.sampled_from(NAMES), max_size=4, unique=True))
        schema: dict[str, Any] = {"type": "object", "properties": {name: draw_from(inner) for name in names}}
        if names:
            schema["required"] = draw_from(st.lists(st.sampled_from(names), unique=True))
        more = draw_from(st.sampled_from(["absent", False, "schema", "pattern"]))
        if more is False:
            schema["additionalProperties"] = False
        elif more == "schema":
            schema["additionalProperties"] = draw_from(inner)
        elif more == "pattern":
            schema["patternProperties"] = {"^[xyz]": draw_from(inner)}
            schema["additionalProperties"] = False
        if not names:
            schema |= draw_from(st.sampled_from([{}, {"minProperties": 1}, {"maxProperties": 2}]))
        return schema

    return build()


def _arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.fixed_dictionaries({"items": inner}, optional={"minItems": st.integers(0, 2), "maxItems": st.integers(2, 4)}),
        st.fixed_dictionaries({"prefixItems": st.lists(inner, min_size=1, max_size=3)}, optional={"items": inner}),
        st.lists(inner, min_size=1, max_size=2).map(lambda p: {"prefixItems": p, "items": False, "minItems": len(p)}),
        st.lists(inner, min_size=1, max_size=2).map(lambda p: {"items": False, "prefixItems": p, "maxItems": 1}),
    ).map(lambda keywords: {"type": "array", **keywords})


def _several(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
        st.tuples(_strings(), _numbers("integer"), _objects(inner)).map(lambda options: {"oneOf": list(options)}),
        st.tuples(_objects(inner), _objects(inner)).map(lambda parts: {"allOf": list(parts)}),
        st.tuples(inner, _objects(inner)).map(lambda parts: {**parts[1], "anyOf": [parts[0], {"type": "object"}]}),
        st.tuples(_numbers("number"), _numbers("integer")).map(lambda parts: {"allOf": list(parts)}),
    )


def _trees() -> st.SearchStrategy[Any]:
    return st.recursive(_leaves(), lambda inner: st.one_of(_objects(inner), _arrays(inner), _several(inner)), max_leaves=8)


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of all sorts, some of which nothing satisfies; with definitions, one of them recursive."""
    definitions = {
        "leaf": {"type": ["integer", "null"], "minimum": -9, "maximum": 99},
        "tree": {
            "type": "object",
            "properties": {"v": {"$ref": "#/$defs/leaf"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}},
            "required": ["v"],
            "additionalProperties": False,
        },
        "word": _WORD,
    }
    trees = _trees().filter(lambda schema: isinstance(schema, dict))
    return trees.map(lambda schema: {"title": "random", **schema, "$defs": definitions})


def parameters() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of a function's arguments."""
    return _objects(_trees()).map(lambda schema: schemas_of(schema))


def schemas_of(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema with the definitions that random ones refer to."""
    tree = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}, "additionalProperties": False}
    return {**schema, "$defs": {"leaf": {"type": "integer", "minimum": 0, "maximum": 9}, "tree": tree, "word": _WORD}}
