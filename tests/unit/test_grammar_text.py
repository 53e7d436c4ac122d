"""Texts of grammars: what they accept, for markers that are special tokens and for spelt ones, and random answers."""

from __future__ import annotations

import collections
import json

import llguidance
import pytest
from hypothesis import HealthCheck, given, seed, settings

from longcat_pd.engine.grammar_text import Argument, GrammarText, JsonTool, RawText, TaggedTool
from longcat_pd.errors import InvalidRequest
from longcat_pd.server.constraint import MARKUP
from longcat_pd.server.fields import parse_json
from longcat_pd.server.markup import MARKERS
from longcat_pd.server.schema import SchemaReader
from tests.schemas import EOS, LIBRARY, TEXT, TOKENIZER, VOCAB_SIZE, check, draw, schemas, validator

CALL = '<longcat_tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</longcat_tool_call>'


def _spelt() -> llguidance.LLTokenizer:
    """The same tokens, of which the markers are no words."""
    files = json.loads(TOKENIZER.to_str())
    files["added_tokens"] = [token for token in files["added_tokens"] if token["content"] not in MARKERS]
    return llguidance.LLTokenizer(json.dumps(files), n_vocab=VOCAB_SIZE, eos_token=EOS)


SPELLINGS = {"special": (TEXT.marker_ids, LIBRARY), "spelt": ({}, _spelt())}


@pytest.fixture(params=list(SPELLINGS))
def spelling(request):
    special, library = SPELLINGS[request.param]

    def accepts(grammar, text):
        matcher = llguidance.LLMatcher(library, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = library.tokenize_str(text, parse_special=True)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return lambda: GrammarText(MARKUP, special), accepts


@pytest.mark.parametrize(
    "reasoning,texts",
    [
        ("none", {"{}": True, "x</longcat_think>{}": False, "<longcat_think>x</longcat_think>{}": False}),
        (
            "open",
            {
                "{}": False,
                "x</longcat_think>{}": True,
                "a <b> </longcat\n</longcat_think>\n{}": True,
                "x</longcat_think>\n\n{}": False,
            },
        ),
        ("optional", {"{}": True, "x</longcat_think>{}": False, "<longcat_think>\nx</longcat_think>\n{}": True}),
    ],
)
def test_reasoning_before_the_answer(spelling, reasoning, texts):
    make, accepts = spelling
    text = make()
    grammar = text.whole(text.json({"type": "object"}), reasoning)
    assert {t: accepts(grammar, t) for t in texts} == texts


def test_json_has_one_blank_behind_commas_and_colons_at_most():
    text = GrammarText(MARKUP, TEXT.marker_ids)
    grammar = text.whole(text.json({"type": "object"}), "none")
    good = ['{"a":1,"b":[1,2]}', '{"a": 1, "b": [1, 2]}', '{"a":1, "b":[1,2]}']
    bad = ['{ "a":1}', '{"a" :1}', '{"a":  1}', '{"a":1,\n"b":2}', '{"a":1 }', '{"a":\t1}', "{} ", " {}", "[]", "1"]
    for one in good:
        assert _accepts(grammar, one), one
    for one in bad:
        assert not _accepts(grammar, one), one


def _accepts(grammar, text):
    matcher = llguidance.LLMatcher(LIBRARY, grammar, log_level=0)
    ids = LIBRARY.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_calls_in_json(spelling):
    make, accepts = spelling
    tools = [
        JsonTool("f", {"type": "object", "properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": {"0": {"type": "integer"}}}),
        JsonTool("g.h", {"type": "object"}),
    ]
    other = CALL.replace('"f"', '"g.h"').replace("1", '"x"')
    text = make()
    several = text.whole(text.calls(tools, only_one=False), "none")
    for answer, wanted in [(CALL, True), (other, True), (CALL + other + CALL, True), ("", False), ("x" + CALL, False)]:
        assert accepts(several, answer) is wanted, answer
    assert not accepts(several, CALL.replace("1", "true"))
    assert not accepts(several, CALL.replace('"f"', '"h"'))
    assert not accepts(several, CALL + "\n" + CALL)
    text = make()
    one = text.whole(text.calls(tools, only_one=True), "none")
    assert accepts(one, CALL) and not accepts(one, CALL + CALL)


def tagged(name, *pairs):
    body = "".join(
        f"<longcat_arg_key>{key}</longcat_arg_key>\n<longcat_arg_value>{value}</longcat_arg_value>\n"
        for key, value in pairs
    )
    return f"<longcat_tool_call>{name}\n{body}</longcat_tool_call>"


@pytest.mark.parametrize(
    "answer,wanted",
    [
        (tagged("f", ("q", "hello <b> </longcat")), True),
        (tagged("f", ("q", ""), ('k"é\\', "7")), True),
        (tagged("f", ("q", " x\n"), ("e", "bc")), True),
        (tagged("f", ("q", "x"), ("e", "a/")), True),
        (tagged("g", ("x", '{"a":[1]}'), ("y", "true")), True),
        (tagged("n"), True),
        (tagged("f"), False),
        (tagged("f", ("q", "x"), ('k"é\\', "x")), False),
        (tagged("f", ("q", "x"), ("e", "b")), False),
        (tagged("f", ("q", "x"), ("e", "bc ")), False),
        (tagged("f", ("q", "a</longcat_tool_call>b")), False),
        (tagged("f", ("e", "bc"), ("q", "x")), False),
        (tagged("n", ("a", "1")), False),
        (tagged("n") + tagged("n"), False),
        (tagged("m"), False),
    ],
)
def test_calls_in_tags(spelling, answer, wanted):
    make, accepts = spelling
    arguments = (
        Argument("q", RawText(), True),
        Argument('k"é\\', {"type": "integer"}, False),
        Argument("e", RawText((("a/|bc",),)), False),
    )
    text = make()
    tools = [TaggedTool("f", arguments), TaggedTool("g", (), {}), TaggedTool("n", ())]
    assert accepts(text.whole(text.calls(tools, only_one=True), "none"), answer) is wanted


def test_equal_rules_are_written_once():
    text = GrammarText(MARKUP, TEXT.marker_ids)
    arguments = tuple(Argument(key, RawText(), True) for key in "abcdef")
    assert text.whole(text.calls([TaggedTool("f", arguments)], only_one=True), "open").count("TEXT_") == 2 + 1 + 6


def test_every_finished_answer_validates():
    outcomes = collections.Counter()

    @settings(max_examples=300, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @seed(5)
    @given(schemas())
    def judge(schema):
        try:
            text = GrammarText(MARKUP, TEXT.marker_ids)
            grammar = text.whole(text.json(SchemaReader(schema, "schema").read(schema, "schema")), "none")
        except InvalidRequest:
            outcomes["refused"] += 1
            return
        if check(grammar):
            outcomes["refused"] += 1
            return
        answer = draw(grammar, 0)
        if answer is None:
            outcomes["unfinished"] += 1
            return
        try:
            value = parse_json(answer)
        except ValueError as error:  # an exponent of hundreds of digits is JSON, and nobody's number
            assert "too large" in str(error)
            return
        outcomes["judged"] += 1
        assert list(validator(schema).iter_errors(value)) == [], answer

    judge()
    assert outcomes["judged"] > 150, outcomes
