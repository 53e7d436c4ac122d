"""From bodies to grammars: which ask for one, what is refused and named, and that what is accepted is kept."""

# ruff: noqa: E501 - tables

from __future__ import annotations

import asyncio
import collections
import json
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, seed, settings

from longcat_pd.config.schema import ModelSection
from longcat_pd.errors import InvalidRequest
from longcat_pd.server.constraint import Constraints
from longcat_pd.server.face import Face
from longcat_pd.server.named_kinds import named_kinds
from longcat_pd.server.openai import CHAT_ROUTE, COMPLETIONS_ROUTE, read_body
from longcat_pd.server.schema_formats import FORMATS
from longcat_pd.server.schema_keywords import REFUSED
from longcat_pd.server.schema_pattern import PatternError, whole_text
from longcat_pd.server.text import TextProcessor
from longcat_pd.server.tool_calls import CallArguments, CallBegan, Text, ToolCallParser
from tests.schemas import TEXT, accepts, check, draw, parameters, validator
from tests.unit.fake_service import EOS, FakeService, plays, write_folder

ANSWER = "response_format.json_schema.schema"
PARAMETERS = "tools[0].function.parameters"
USER = {"role": "user", "content": "hi"}
OPEN = TEXT.encode("<longcat_assistant><longcat_think>\n")
CLOSED = TEXT.encode("<longcat_assistant><longcat_think>\n\n</longcat_think>\n")
PLAIN = TEXT.encode(" ASSISTANT:")


def constraints(style="longcat", reasoning="longcat", text=TEXT, check_grammar=check):
    model = ModelSection(path="x", tool_parser=style, reasoning_parser=reasoning)
    return Constraints(model, text, check_grammar)


def answer_body(schema, route=COMPLETIONS_ROUTE, **fields):
    prompt = {"prompt": "x"} if route == COMPLETIONS_ROUTE else {"messages": [USER]}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    return read_body(route, {**prompt, "response_format": wanted, **fields}, "tiny")


def tool(schema, name="f"):
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def forced(*tools, choice="required", **fields):
    return read_body(CHAT_ROUTE, {"messages": [USER], "tools": list(tools), "tool_choice": choice, **fields}, "tiny")


def answer_grammar(schema):
    return constraints().grammar(answer_body(schema), PLAIN)


def refusal(make):
    begun = time.process_time()
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert time.process_time() - begun < 3  # the longest takes 0.4
    return caught.value


def test_most_bodies_ask_for_none():
    chat = {"messages": [USER]}
    for route, fields in [
        (COMPLETIONS_ROUTE, {"prompt": "x"}),
        (CHAT_ROUTE, chat),
        (CHAT_ROUTE, {**chat, "response_format": {"type": "text"}}),
        (CHAT_ROUTE, {**chat, "tools": [tool({})]}),
        (CHAT_ROUTE, {**chat, "tools": [tool({"not": 1})], "tool_choice": "none"}),
    ]:
        assert constraints().grammar(read_body(route, fields, "tiny"), PLAIN) == ""


@pytest.mark.parametrize("route", [CHAT_ROUTE, COMPLETIONS_ROUTE])
def test_any_object(route):
    fields = {"prompt": "x"} if route == COMPLETIONS_ROUTE else {"messages": [USER]}
    body = read_body(route, {**fields, "response_format": {"type": "json_object"}}, "tiny")
    grammar = constraints(reasoning="none").grammar(body, PLAIN)
    assert accepts(grammar, '{"a": [1, null, {"b": "x"}]}') and not accepts(grammar, "[1]") and not accepts(grammar, '"x"')


@pytest.mark.parametrize(
    "prompt,fields,reasoning,texts",
    [
        (OPEN, {}, "longcat", {"x</longcat_think>\n1": True, "1": False, "<longcat_think>x</longcat_think>1": False}),
        (CLOSED, {}, "longcat", {"x</longcat_think>\n1": False, "1": True, "<longcat_think>x</longcat_think>1": False}),
        (PLAIN, {}, "longcat", {"x</longcat_think>\n1": False, "1": True, "<longcat_think>x</longcat_think>1": True}),
        (PLAIN, {"enable_thinking": False}, "longcat", {"1": True, "<longcat_think>x</longcat_think>1": False}),
        (OPEN, {}, "none", {"x</longcat_think>\n1": False, "1": True}),
    ],
)
def test_reasoning_comes_first_where_it_is_read(prompt, fields, reasoning, texts):
    body = answer_body({"type": "integer"}, CHAT_ROUTE, **fields)
    grammar = constraints(reasoning=reasoning).grammar(body, prompt)
    assert {text: accepts(grammar, text) for text in texts} == texts


def test_completions_have_no_reasoning():
    grammar = constraints().grammar(answer_body({"type": "integer"}), OPEN)
    assert accepts(grammar, "1") and not accepts(grammar, "x</longcat_think>1")


@pytest.mark.parametrize("keyword", sorted(REFUSED))
@pytest.mark.parametrize("place", ["top", "inside", "reference"])
def test_what_is_not_enforced_is_named(keyword, place):
    schema = {
        keyword: {"type": "integer"} if keyword in ("if", "then", "else", "not", "contains", "propertyNames") else ["a"]
    }
    whole, path = {
        "top": (schema, ANSWER),
        "inside": ({"properties": {"a": {"items": schema}}}, f"{ANSWER}.properties.a.items"),
        "reference": ({"$ref": "#/x/y", "x": {"y": schema}}, f"{ANSWER}.x.y"),
    }[place]
    error = refusal(lambda: answer_grammar(whole))
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", f"{path}.{keyword}")
    assert repr(keyword) in error.message


def test_a_keyword_that_asks_for_nothing_is_accepted():
    inert = {keyword: values[0] for keyword, values in REFUSED.items() if values}
    grammar = answer_grammar({"type": "object", **inert, "x-guidance": {"lenient": True, "whitespace_flexible": True}})
    assert accepts(grammar, "{}") and not accepts(grammar, '{ "a": 1}')


NOTES = {
    "title": "t", "description": "d", "default": 1, "examples": [1], "$comment": "c", "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": "https://example.org/s", "deprecated": True, "readOnly": True, "x-more": {"not": {}}, "nullable": True, "$anchor": "a",
    "$defs": {"unused": {"not": {}}}, "x-guidance": {"coerce_one_of": True},
}  # fmt: skip


def test_notes_change_nothing():
    assert answer_grammar({"type": "integer", **NOTES}) == answer_grammar({"type": "integer"})


@pytest.mark.parametrize(
    "schema,code,path",
    [
        ({"type": "text"}, "invalid_value", ".type"),
        ({"type": []}, "invalid_value", ".type"),
        ({"type": 5}, "invalid_value", ".type"),
        ({"type": [["a"]]}, "invalid_value", ".type"),
        ({"type": 5, "format": "date"}, "invalid_value", ".type"),
        ({"enum": []}, "invalid_value", ".enum"),
        ({"enum": "a"}, "invalid_value", ".enum"),
        ({"minLength": -1}, "invalid_value", ".minLength"),
        ({"minLength": "1"}, "invalid_value", ".minLength"),
        ({"minItems": 1.5}, "invalid_value", ".minItems"),
        ({"minItems": True}, "invalid_value", ".minItems"),
        ({"minItems": 10**30}, "invalid_value", ".minItems"),
        ({"minimum": "1"}, "invalid_value", ".minimum"),
        ({"exclusiveMinimum": True}, "invalid_value", ".exclusiveMinimum"),
        ({"multipleOf": 0}, "invalid_value", ".multipleOf"),
        ({"required": "a"}, "invalid_value", ".required"),
        ({"required": [1]}, "invalid_value", ".required"),
        ({"properties": []}, "invalid_value", ".properties"),
        ({"properties": {"a": 1}}, "invalid_value", ".properties.a"),
        ({"items": 3}, "invalid_value", ".items"),
        ({"prefixItems": []}, "invalid_value", ".prefixItems"),
        ({"anyOf": []}, "invalid_value", ".anyOf"),
        ({"anyOf": {}}, "invalid_value", ".anyOf"),
        ({"$ref": "#/nowhere"}, "invalid_value", ".$ref"),
        ({"anyOf": [{"type": "null"}], "$ref": "#/anyOf/\u00b2"}, "invalid_value", ".$ref"),
        ({"allOf": [{"type": "string", "pattern": f"^(?:.*{c}.{{{n}}})"} for n, c in enumerate("abcdefgh", 100)]}, "unsupported_parameter", ""),
        ({"$ref": 1}, "invalid_value", ".$ref"),
        ({"$ref": "https://example.org/s"}, "unsupported_parameter", ".$ref"),
        ({"$ref": "#anchor"}, "unsupported_parameter", ".$ref"),
        ({"properties": {"a": {"$id": "x"}}}, "unsupported_parameter", ".properties.a.$id"),
        ({"format": "regex"}, "unsupported_parameter", ".format"),
        ({"format": "unknown"}, "unsupported_parameter", ".format"),
        ({"format": 1}, "invalid_value", ".format"),
        ({"pattern": "(?=a)"}, "unsupported_parameter", ".pattern"),
        ({"pattern": "("}, "unsupported_parameter", ".pattern"),
        ({"pattern": 1}, "invalid_value", ".pattern"),
        ({"minimum": 2**60}, "unsupported_parameter", ".minimum"),
        ({"enum": [1, 2**60]}, "unsupported_parameter", ".enum"),
        ({"const": {"a": [1e300]}}, "unsupported_parameter", ".const"),
        ({"multipleOf": 12345.6}, "unsupported_parameter", ".multipleOf"),
        ({"type": "object", "minProperties": 2}, "unsupported_parameter", ".minProperties"),
        ({"properties": {"a\n": {}}}, "unsupported_parameter", ".properties"),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}, "unsupported_parameter", ""),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "unsupported_parameter", ""),
        ({"patternProperties": {"^a": {}, "b$": {}}}, "unsupported_parameter", ""),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "invalid_value", ""),
        ({"type": "integer", "enum": ["a"]}, "invalid_value", ""),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "invalid_value", ""),
        ({"$ref": "#"}, "invalid_value", ""),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "invalid_value", ""),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "invalid_value", ""),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a"}}}}, "invalid_value", ""),
    ],
)  # fmt: skip
def test_bad_schemas(schema, code, path):
    error = refusal(lambda: answer_grammar(schema))
    assert (error.status, error.code, error.param) == (400, code, ANSWER + path), error.message
    assert len(error.message) < 600


COSTLY = [
    {"enum": [f"value{i}" for i in range(30000)]},
    {"enum": [{f"v{i}": [i, {"x": "y"}]} for i in range(3000)]},
    {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}},
    {"type": "array", "prefixItems": [{"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(400)}}] * 8},
    {"type": "object", "patternProperties": {f"^x{i}_": {"type": "integer"} for i in range(300)}},
    {"oneOf": [{"properties": {"k": {"const": f"x{i}"}}, "required": ["k"]} for i in range(2000)]},
    {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(30)]},
    {"$ref": "#/$defs/0", "$defs": {str(i): {"pattern": f"a.{{{i}}}b", "allOf": [{"$ref": f"#/$defs/{i + 1}"}]} for i in range(30)} | {"30": {}}},
    {"type": "string", "pattern": "(a{1000}){1000}"},
    {"type": "string", "pattern": "(" * 500 + "a" + ")" * 500},
    {"type": "string", "pattern": "^((a?){50}){50}a{2500}$"},
    {"type": "integer", "multipleOf": 99999},
    {"const": "x" * 200000},
    {"enum": ["x", ["x" * 5000]]},
    {"type": "object", "properties": {"x" * 5000: {}}},
    {"type": "object", "required": ["x" * 5000]},
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(COSTLY)))
def test_costly_schemas_are_refused_at_once(number):
    assert refusal(lambda: answer_grammar(COSTLY[number])).param.startswith(ANSWER)


@pytest.mark.parametrize(
    "schema,good,bad",
    [
        ({"type": "integer", "format": "int32"}, ["2147483647", "-2147483648"], ["2147483648"]),
        ({"type": "integer", "maximum": 2**63}, ["9223372036854774784"], ["9223372036854775809"]),
        ({"type": "array", "items": [{"type": "integer"}], "additionalItems": False}, ["[1]", "[]"], ["[1,2]", '["x"]']),
        ({"oneOf": [{"const": 1}, {"const": 2, "title": "two"}]}, ["1", "2"], ["3"]),
        ({"format": "date"}, ['"2024-02-29"', "1"], ['"2023-02-29"', '"0000-01-01"', '"2023-02-30"']),
        ({"type": "string", "pattern": r"^\d+$"}, ['"12"'], ['"1x"', '"\u0663"', '""']),
        ({"type": "string", "pattern": "^[a&&b]$"}, ['"a"', '"&"'], ['"c"']),
        ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
        ({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}, ['{"a":1,"b":"x"}'], ['{"b":"x","a":"x"}', '{"b":1}']),
        ({"$ref": "#/components/t", "components": {"t": {"type": "array", "items": {"$ref": "#/components/t"}}}}, ["[[],[[]]]"], ["[1]"]),
        ({"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"type": "null"}}}, ["null"], ["1"]),
        ({"const": "a\u0001"}, ['"a\\u0001"'], ['"a"']),
    ],
)  # fmt: skip
def test_what_is_enforced(schema, good, bad):
    grammar = answer_grammar(schema)
    assert {text: accepts(grammar, text) for text in good + bad} == dict.fromkeys(good, True) | dict.fromkeys(bad, False)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats(name):
    grammar = answer_grammar({"type": "string", "format": name})
    for number in range(8):
        answer = draw(grammar, number, limit=400)
        if answer is not None:
            assert validator({"format": name}).is_valid(json.loads(answer)), answer


@pytest.mark.parametrize("pattern", ["a", "^a|b$", "^[^a]$", r"^\w\W\d\D\s\S$", ".", "^(?:x|yy)*z?$", "a{2,3}?", r"[\d\-a-f]", "^$", r"^[^\W\d]+$", r"\u00e9|\x41", "(?<n>a)"])  # fmt: skip
def test_patterns_mean_what_they_say(pattern):
    """Drawn texts match by another implementation, the ends of lines aside."""
    grammar = answer_grammar({"type": "string", "pattern": pattern})
    by_python = re.compile(re.sub(r"\(\?<", "(?P<", pattern).replace("$", r"\Z"))
    for number in range(5):
        answer = draw(grammar, number)
        if answer is not None:
            assert by_python.search(json.loads(answer)), answer


@pytest.mark.parametrize("pattern", ["(?!a)b", "(?<=a)b", r"(a)\1", r"\bfoo", "(?i)a", "a$b", "(^a)", "a**", "a++", "{", "a{,3}", "[b-a]", "[]", "[^]", "\\", "(a", "[a", r"\ud800", r"\A", r"[a-\d]", "(?x) a"])  # fmt: skip
def test_patterns_that_differ_between_dialects_are_refused(pattern):
    with pytest.raises(PatternError):
        whole_text(pattern)


def read_back(style, tools, answer):
    """Names and arguments of the calls of an answer."""
    parser = ToolCallParser(style, tools)
    events = [event for character in answer for event in parser.push(character)] + parser.finish(was_cut=False)
    assert not any(isinstance(event, Text) for event in events), (answer, events)
    names = [event.name for event in events if isinstance(event, CallBegan)]
    texts = ["" for _ in names]
    for event in events:
        if isinstance(event, CallArguments):
            texts[event.index] += event.text
    return [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]


@pytest.mark.parametrize("style", ["longcat", "longcat_xml"])
def test_every_finished_call_validates(style):
    outcomes = collections.Counter()

    @settings(max_examples=70, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @seed(3)
    @given(parameters(), parameters())
    def judge(first, second):
        tools = [tool(first, "f"), tool(second, "g.h")]
        for parallel in (True, False):
            body = forced(*tools, parallel_tool_calls=parallel)
            try:
                grammar = constraints(style, "none").grammar(body, PLAIN)
            except InvalidRequest as error:
                assert error.code in ("unsupported_parameter", "invalid_value") and error.param.startswith("tools[")
                outcomes[error.message.split(": ")[0][-40:]] += 1
                return
            answer = draw(grammar, 1)
            if answer is None:
                continue
            calls = read_back(style, tools, answer)
            assert len(calls) >= 1 if parallel else len(calls) == 1
            for name, arguments in calls:
                if "Infinity" in json.dumps(arguments):  # an exponent beyond any number
                    continue
                errors = list(validator(first if name == "f" else second).iter_errors(arguments))
                assert errors == [], (answer, first, second)
                outcomes["judged"] += 1

    judge()
    assert outcomes["judged"] > 60, outcomes


def test_a_named_function_is_called_once():
    tools = [tool({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}, name) for name in "fg"]
    body = forced(*tools, choice={"type": "function", "function": {"name": "g"}})
    grammar = constraints("longcat_xml", "none").grammar(body, PLAIN)
    answer = draw(grammar, 4)
    assert [name for name, _ in read_back("longcat_xml", tools, answer)] == ["g"]
    assert not accepts(grammar, answer + answer)
    assert not accepts(grammar, answer.replace(">g\n", ">f\n"))


@pytest.mark.parametrize("schema", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}])
@pytest.mark.parametrize("style", ["longcat", "longcat_xml"])
def test_tools_without_parameters(style, schema):
    function = {"name": "f"} if schema is None else {"name": "f", "parameters": schema}
    body = forced({"type": "function", "function": function})
    grammar = constraints(style, "none").grammar(body, PLAIN)
    empty = {"longcat": '\n{"name": "f", "arguments": {}}\n', "longcat_xml": "f\n"}[style]
    assert accepts(grammar, f"<longcat_tool_call>{empty}</longcat_tool_call>")


def in_tags(schema, value, key="a"):
    body = forced(tool({"type": "object", "properties": {key: schema}, "required": [key]}))
    grammar = constraints("longcat_xml", "none").grammar(body, PLAIN)
    pair = f"<longcat_arg_key>{key}</longcat_arg_key>\n<longcat_arg_value>{value}</longcat_arg_value>\n"
    return accepts(grammar, f"<longcat_tool_call>f\n{pair}</longcat_tool_call>")


@pytest.mark.parametrize(
    "schema,good,bad",
    [
        ({"type": "string"}, ["", "x y", " {1}\n", '"q"', "</b>"], ["</longcat_tool_call>"]),
        ({"enum": ["a", "b c"]}, ["a", "b c"], ["c", '"a"', "a "]),
        ({"type": "string", "const": "x"}, ["x"], ["y", " x"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "a b"], ["a", "abcd", "a ", " a"]),
        ({"type": "string", "pattern": "^a/b?$", "maxLength": 2}, ["a/"], ["a/b", "a"]),
        ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "x"]),
        ({"type": "string", "allOf": [{"maxLength": 3}, {"pattern": "^a"}]}, ["a", "a b"], ["abcd", "b"]),
        ({"const": "5"}, ["5"], ['"5"', "6"]),
        ({"oneOf": [{"const": "1.10", "title": "old"}, {"enum": ["2", "3"]}]}, ["1.10", "2"], ["4", '"2"']),
        ({"type": "string", "anyOf": [{"minLength": 3}, {"type": "integer"}, {"const": "a"}]}, ["a", "abc"], ["b"]),
        ({"anyOf": [{"type": "string", "maxLength": 1}, {"type": "string", "enum": ["xyz"]}]}, ["a", "xyz"], ["ab"]),
        ({"type": ["string", "null"]}, ['"a"', "null"], ["a", "1", '"</longcat_"']),
        ({"type": "integer"}, ["1"], ["x", "1.5"]),
        ({"type": "array", "items": {"type": "string"}}, ['["a", "b"]'], ["a", '["</longcat_x"]']),
        ({}, ['{"a":[1,"x"]}', "1"], ['{"</longcat_":1}', '["</longcat_"]']),
    ],
)  # fmt: skip
def test_values_in_tags(schema, good, bad):
    assert {v: in_tags(schema, v) for v in good + bad} == dict.fromkeys(good, True) | dict.fromkeys(bad, False)


@pytest.mark.parametrize(
    "schema,path",
    [
        ({"properties": {"a": {"type": "string", "enum": ["x "]}}}, ".properties.a.enum"),
        ({"properties": {"a": {"type": "string", "allOf": [{"oneOf": [{"minLength": 3}, {"maxLength": 4}]}]}}}, ".properties.a.allOf[0].oneOf"),
        ({"properties": {"a": {"$ref": "#/$defs/V"}}, "$defs": {"V": {"type": "string", "maxLength": 10**6}}}, ".$defs.V.maxLength"),
        ({"properties": {"a": {"allOf": [{"anyOf": [{"const": f"{i} {j}"} for i in range(30)]} for j in range(2)]}}}, ".properties.a.allOf"),
        ({"$ref": "#/$defs/A", "minProperties": 1, "$defs": {"A": {"type": "object"}}}, ".$ref"),
        ({"$ref": "#/$defs/A", "type": "string", "$defs": {"A": {"type": "object"}}}, ".$ref"),
        ({"$ref": "#/$defs/A", "not": {"required": ["b"]}, "$defs": {"A": {"type": "object"}}}, ".not"),
        ({"properties": {"a": {"type": "string", "not": {"const": "x"}}}}, ".properties.a.not"),
        ({"properties": {"a": {"type": "string", "maxLength": 10**6}}}, ".properties.a.maxLength"),
        ({"properties": {"a": {"const": "</longcat_arg_value>"}}}, ".properties.a.const"),
        ({"properties": {" a": {}}}, ".properties"),
        ({"properties": {"</longcat_arg_key>": {}}}, ".properties"),
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, ".anyOf"),
        ({"patternProperties": {"^a": {"type": "integer"}}}, ".patternProperties"),
        ({"type": None, "properties": {"a": {}, "b": {}}, "minProperties": 1}, ".minProperties"),
        ({"properties": {"a": {}, "b": {}}, "maxProperties": 1}, ".maxProperties"),
    ],
)  # fmt: skip
def test_what_tags_cannot_keep_is_named(schema, path):
    error = refusal(lambda: constraints("longcat_xml").grammar(forced(tool({"type": "object"}, "g"), tool(schema)), PLAIN))
    assert (error.code, error.param) == ("unsupported_parameter", f"tools[1].function.parameters{path}")


CIRCLE = {"anyOf": [{"$ref": "#/$defs/Circle"}, {"type": "string"}]}
ENUMS = {"V": {"title": "V", "type": "string", "enum": ["1.10", "true"]}, "W": {"$ref": "#/$defs/V"}, "Circle": CIRCLE}


@pytest.mark.parametrize(
    "schema,good,bad",
    [
        ({"$ref": "#/$defs/V"}, "1.10", '"1.10"'),
        ({"$ref": "#/$defs/W", "description": "of a chain"}, "true", "false"),
        ({"allOf": [{"$ref": "#/$defs/V"}], "default": "true"}, "true", '"true"'),
        ({"type": "string", "$ref": "#/$defs/V", "minLength": 4, "pattern": r"^\d"}, "1.10", "true"),
        ({"anyOf": [{"$ref": "#/$defs/V"}, {"const": "7"}]}, "7", "8"),
        ({"const": "5"}, "5", '"5"'),
        ({"anyOf": [{"$ref": "#/$defs/V"}, {"type": "null"}]}, '"1.10"', "1.10"),
        ({"anyOf": [{"$ref": "#/$defs/V"}, {"type": "integer"}]}, '"true"', "true"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_behind_reference", [False, True])
def test_strings_are_named_through_references(schema, good, bad, is_behind_reference):
    """What may be drawn is read back as the string that the schema allows, also by who was not forced."""
    arguments = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    document = (
        {"$ref": "#/$defs/All", "$defs": {**ENUMS, "All": arguments}}
        if is_behind_reference
        else arguments | {"$defs": ENUMS}
    )
    grammar = constraints("longcat_xml", "none").grammar(forced(tool(document)), PLAIN)
    pair = "<longcat_arg_key>a</longcat_arg_key>\n<longcat_arg_value>{}</longcat_arg_value>\n"
    calls = {v: f"<longcat_tool_call>f\n{pair.format(v)}</longcat_tool_call>" for v in (good, bad)}
    assert {v: accepts(grammar, call) for v, call in calls.items()} == {good: True, bad: False}
    assert read_back("longcat_xml", [tool(document)], calls[good]) == [("f", {"a": good.strip('"')})]
    for raw in ("1.10", "true", "5"):  # as a model writes a string by itself
        (_, value), *_ = read_back(
            "longcat_xml", [tool(document)], f"<longcat_tool_call>f\n{pair.format(raw)}</longcat_tool_call>"
        )
        assert value == {"a": raw if "integer" not in str(schema) or raw == "true" else json.loads(raw)}


def test_circles_and_many_references_name_what_they_can():
    deep = {f"A{i}": {"allOf": [{"$ref": f"#/$defs/A{i + 1}"}] * 8} for i in range(40)} | {"A40": {"type": "string"}}
    chained = {f"B{i}": {"$ref": f"#/$defs/B{i + 1}"} for i in range(500)}
    document = {"$defs": {**ENUMS, **deep, **chained}}
    begun = time.process_time()
    for name, kinds in (("Circle", {"string"}), ("W", {"string"}), ("A0", set()), ("B0", set()), ("A39", {"string"})):
        assert named_kinds({"$ref": f"#/$defs/{name}"}, document) == kinds, name
    assert time.process_time() - begun < 1  # it takes 0.03
    error = refusal(
        lambda: constraints("longcat_xml").grammar(forced(tool({"properties": {"a": CIRCLE}, "$defs": ENUMS})), PLAIN)
    )
    assert (error.code, error.param) == ("unsupported_parameter", f"{PARAMETERS}.$defs.Circle.anyOf[0].$ref")


def test_the_tool_that_the_library_refuses_is_found():
    bad = {"type": "object", "properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}
    for style in ("longcat", "longcat_xml"):
        error = refusal(lambda: constraints(style).grammar(forced(tool({}, "g"), tool(bad)), PLAIN))  # noqa: B023 - called at once
        assert (error.code, error.param) == ("unsupported_parameter", "tools[1].function.parameters")
        assert "oneOf" in error.message
        assert "coerce" not in error.message  # the library's advice is none to a client


def test_nothing_can_be_forced_without_markup():
    error = refusal(lambda: constraints("none").grammar(forced(tool({})), PLAIN))
    assert (error.code, error.param) == ("unsupported_parameter", "tool_choice")


def test_a_checkpoint_without_tokenizer():
    error = refusal(lambda: constraints(text=TextProcessor(600)).grammar(answer_body({}), [1]))
    assert (error.code, error.param) == ("tokenizer_missing", "response_format")


async def test_the_grammar_reaches_every_choice(tmp_path):
    asked = []
    service = FakeService(folder := write_folder(tmp_path), plays([EOS]))
    face = Face(service, TextProcessor.load(folder), check_grammar=lambda grammar: asked.append(grammar) or "")
    body = answer_body({"type": "integer"}, CHAT_ROUTE, n=2)
    request_of = await face.encoded.open(body, face.call("r", 9))
    assert [(await request_of(choice)).sampling.grammar for choice in (0, 1)] == asked * 2
    assert "%json" in asked[0]
    plain = await face.encoded.open(read_body(CHAT_ROUTE, {"messages": [USER]}, "tiny"), face.call("r", 9))
    assert (await plain(0)).sampling.grammar == ""


async def test_the_librarys_refusal_is_the_clients_error(tmp_path):
    service = FakeService(folder := write_folder(tmp_path), plays([EOS]))
    face = Face(
        service,
        TextProcessor.load(folder),
        check_grammar=lambda grammar: "at 1(8): failed to compile JSON schema: schema too large",
    )
    with pytest.raises(InvalidRequest) as caught:
        await face.encoded.open(answer_body({}), face.call("r", 9))
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", ANSWER)
    assert "at 1(8)" not in caught.value.message


async def test_slow_grammars_leave_threads_to_those_who_encode(tmp_path):
    """A prompt that is encoded in a thread does not wait for all grammars before it."""
    service = FakeService(folder := write_folder(tmp_path), plays([EOS]))
    loop, go_on = asyncio.get_running_loop(), threading.Event()
    face = Face(service, TextProcessor.load(folder), check_grammar=lambda grammar: "" if go_on.wait(60) else "late")
    with ThreadPoolExecutor(2) as threads:
        loop.set_default_executor(threads)
        opening = [
            asyncio.ensure_future(face.encoded.open(answer_body({"minimum": i}), face.call("r", 60))) for i in range(8)
        ]
        await asyncio.sleep(0)
        assert len(await asyncio.wait_for(face.encoded.encode_text("x" * 5000), 30)) > 0
        go_on.set()
        await asyncio.gather(*opening)


def chain(length, wrap):
    """A value inside a value inside ..., by references; a0 is the outermost."""
    made = {f"a{i}": wrap({"$ref": f"#/$defs/a{i + 1}"}) for i in range(length)}
    return {**made, f"a{length}": {"type": "null"}}


def in_array(inner):
    return {"type": "array", "items": inner}


def test_references_lead_as_deep_as_the_library_can_follow():
    """Its stack would overflow, which ends the process: whichever way it takes through the definitions."""
    to_all = [{"$ref": f"#/$defs/a{i}"} for i in range(1000, 0, -50)]
    outermost = {"$ref": "#/$defs/a0"}
    for schema in (
        {"$defs": chain(1000, in_array), **outermost},
        {"$defs": chain(900, lambda inner: inner), **outermost},
        {"$defs": chain(1000, in_array), "properties": {"x": {**outermost, "allOf": [{"anyOf": to_all}]}}},
        {"$defs": chain(1000, in_array), "prefixItems": to_all, "additionalProperties": outermost},
        {"$defs": {**chain(200, in_array), "a200": in_array(outermost)}, "anyOf": [outermost, {"type": "null"}]},
    ):
        error = refusal(lambda schema=schema: answer_grammar(schema))
        assert (error.code, error.param) == ("invalid_value", ANSWER) and "nests deeper than" in error.message
    assert answer_grammar({"$defs": chain(100, in_array), **outermost})


def test_what_a_number_is_a_multiple_of_together_is_small():
    """The library counts up to the product; one number of four digits is as far as that goes."""

    def of(*multiples):
        return {"type": "integer", "allOf": [{"multipleOf": multiple} for multiple in multiples]}

    for schema in (of(9973, 9967), of(997, 991), of(9973, 1e9), of(9973, 1e-9), {**of(997), "multipleOf": 991}):
        error = refusal(lambda schema=schema: answer_grammar(schema))
        assert (error.code, error.param) == ("unsupported_parameter", f"{ANSWER}.allOf")
    for schema in (of(9999), of(97, 89), of(0.01, 25), {"items": of(9999), "prefixItems": [of(9998)]}):
        assert answer_grammar(schema)


def test_what_many_references_lead_to_counts_each_time():
    names = ["".join(f"%{ord(c):02x}" if i >> k & 1 else c for k, c in enumerate("definition")) for i in range(500)]
    values = [f"{i:05}" for i in range(10_000)]
    for definition in (
        {"enum": values},
        {"const": values[0] * 10_000},
        {"required": [value * 100 for value in values[:100]]},
    ):
        schema = {"$defs": {"definition": definition}, "prefixItems": [{"$ref": f"#/$defs/{name}"} for name in names]}
        error = refusal(lambda schema=schema: answer_grammar(schema))
        assert error.code == "invalid_value" and "characters" in error.message


@pytest.mark.parametrize("style", ["longcat", "longcat_xml"])
def test_tools_share_one_allowance(style):
    """In tags each argument is read with all that it refers to."""
    shared = {"type": "object", "properties": {f"x{i}": {"type": "null"} for i in range(200)}}
    many = {"$defs": {"d": shared}, "properties": {f"a{i}": {"$ref": "#/$defs/d"} for i in range(200)}}
    body = forced(*(tool(many, f"f{i}") for i in range(60)))
    error = refusal(lambda: constraints(style).grammar(body, PLAIN))
    assert (error.code, error.param) == ("invalid_value", "tools")


JUNK = [None, True, False, 0, -1, 1.5, 1e308, 1e-300, 2**70, 10**40, "", "a", "object", "#", "#/$defs/a", "date", "int32", "^a$", "(a|b)*", "</longcat_", " a ", [], {}, [[]], ["a"], ["object"], [1, "a", None], ["string", "null"], {"a": 1}]  # fmt: skip
WORDS = ["$ref", "type", "enum", "const", "items", "additionalItems", "required", "pattern", "format", "multipleOf", "additionalProperties", "allOf", "anyOf", "oneOf", "prefixItems", "properties", "patternProperties", "minItems", "minLength", "maxProperties", "minimum", "exclusiveMaximum", "$defs", "$id", *REFUSED]  # fmt: skip


def almost_schema(source, depth=0):
    if depth == 3 or source.random() < 0.1:
        return source.choice(JUNK)
    made = {}
    for word in source.sample(WORDS, source.randint(0 if depth else 1, 4)):
        inner = almost_schema(source, depth + 1)
        made[word] = source.choice([inner, [inner], {source.choice("abc"): inner}, source.choice(JUNK)])
    return made


@pytest.mark.parametrize("style", ["longcat", "longcat_xml"])
def test_what_is_no_schema_is_refused_as_such(style):
    source, reader = random.Random(style), constraints(style, check_grammar=lambda grammar: "")
    for _ in range(2000):
        schema = almost_schema(source)
        if isinstance(schema, dict):
            for body in (forced(tool(schema)), answer_body(schema)):
                try:
                    reader.grammar(body, PLAIN)
                except InvalidRequest as error:
                    assert error.param and len(error.message) < 2000
