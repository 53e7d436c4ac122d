"""One choice: every row of the tables of reasoning, tool calls and stop strings, cut at every place."""

# ruff: noqa: E501 - tables

from dataclasses import replace

import pytest

from longcat_pd.engine.request import FinishReason, TokenOutput
from longcat_pd.server.answers import AnswerForm
from longcat_pd.server.choice import MAX_HELD, CountedToken
from longcat_pd.server.errors import to_json
from longcat_pd.server.openai import CHAT_ROUTE, read_body
from tests.oracle_text import Rules, answer
from tests.troubled_text import kinds
from tests.unit.choice_rig import Example, joined, pieces_of

OPEN, CLOSE = "<longcat_tool_call>", "</longcat_tool_call>"
THINK, END_THINK = "<longcat_think>", "</longcat_think>"
THINKS = {"prompt_end": f"x{THINK}\n"}
JSON, XML, ONE = {"style": "longcat"}, {"style": "longcat_xml"}, {"only_one": True}
EOS, LENGTH, STOP_TOKEN = "eos", "length", "stop token"


def j(name="f", arguments='{"x": 1}'):
    return f'{OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSE}'


def pair(key, value):
    return f"<longcat_arg_key>{key}</longcat_arg_key>\n<longcat_arg_value>{value}</longcat_arg_value>\n"


X = pair("x", 1)


def x(name="f", pairs=X):
    return f"{OPEN}{name}\n{pairs}{CLOSE}"


F = ("f", '{"x": 1}')
BEFORE_CLOSE = j().removesuffix(CLOSE)

ROWS = [
    # rules, text, end, content, reasoning, calls, finish
    (THINKS, f"why\n{END_THINK}\nanswer", EOS, "answer", "why", [], "stop"),
    ({"prompt_end": "USER:"}, f"{THINK}\nwhy\n{END_THINK}\nanswer", EOS, "answer", "why", [], "stop"),
    (THINKS, f"why\n\n{END_THINK}\n\nanswer", EOS, "\nanswer", "why\n", [], "stop"),
    (THINKS, "never closed\n", EOS, "", "never closed\n", [], "stop"),
    (THINKS, f"never {END_THINK[:-1]}", LENGTH, "", f"never {END_THINK[:-1]}", [], "length"),
    (THINKS | JSON, f"a {j()}{END_THINK}b", EOS, "b", f"a {j()}", [], "stop"),
    (THINKS | XML, f"a {x()}{END_THINK}{x()}", EOS, "", f"a {x()}", [F], "tool_calls"),
    ({"prompt_end": "USER:"}, f"a {THINK}", EOS, f"a {THINK}", "", [], "stop"),
    # text before, between and after calls
    (JSON, f"a \n{j()}\nb{j()} c", EOS, "a \n\nb c", "", [F, F], "tool_calls"),
    (XML, f"a \n{x()}\nb{x()} c", EOS, "a \n\nb c", "", [F, F], "tool_calls"),
    (JSON, f"{j()}\n \n{j()}\n", EOS, "", "", [F, F], "tool_calls"),
    (XML, f"{x()}\n \n{x()}\n", EOS, "", "", [F, F], "tool_calls"),
    # no arguments
    (JSON, f'{OPEN}{{"name": "g"}}{CLOSE}{j("g", "{}")}', EOS, "", "", [("g", "{}"), ("g", "{}")], "tool_calls"),
    (XML, f"{x('g', '')}{OPEN}g{CLOSE}", EOS, "", "", [("g", "{}"), ("g", "{}")], "tool_calls"),
    # a tool without parameters or properties; unknown functions
    (XML, x("bare", pair("a", "[1]") + pair("b", "word")), EOS, "", "", [("bare", '{"a": [1], "b": "word"}')], "tool_calls"),
    (XML, x("g", pair("a", "null") + pair("b", "{'k': True}")), EOS, "", "", [("g", '{"a": null, "b": {"k": true}}')], "tool_calls"),
    (XML, x("unknown", pair("a", "07")), EOS, "", "", [("unknown", '{"a": "07"}')], "tool_calls"),
    (JSON, j("unknown"), EOS, "", "", [("unknown", '{"x": 1}')], "tool_calls"),
    # typed values
    (XML, x("f", pair("s", "1") + pair("o", "2") + pair("x", "3")), EOS, "", "", [("f", '{"s": "1", "o": "2", "x": 3}')], "tool_calls"),
    (XML, x("f", pair("s", " [1] ")), EOS, "", "", [("f", '{"s": "[1]"}')], "tool_calls"),
    # malformed, nothing sent
    (JSON, f"{OPEN}f\n{CLOSE}!", EOS, f"{OPEN}f\n{CLOSE}!", "", [], "stop"),
    (JSON, j(arguments='"x"'), EOS, j(arguments='"x"'), "", [], "stop"),
    (JSON, f'{OPEN}{{"arguments": {{}}, "name": "\\ud800"}}{CLOSE}', EOS, f'{OPEN}{{"arguments": {{}}, "name": "\\ud800"}}{CLOSE}', "", [], "stop"),
    (XML, f"{OPEN}two words{CLOSE}!", EOS, f"{OPEN}two words{CLOSE}!", "", [], "stop"),
    (XML, x("f", "stray"), EOS, x("f", "stray"), "", [], "stop"),
    (XML, x("f", f"<longcat_arg_key>a</longcat_arg_key>{pair('b', 1)}"), EOS, x("f", f"<longcat_arg_key>a</longcat_arg_key>{pair('b', 1)}"), "", [], "stop"),
    (XML, x("bare", pair("a", "'\\ud800'")), EOS, "", "", [("bare", '{"a": "\'\\\\ud800\'"}')], "tool_calls"),
    # malformed when something has been sent: what cannot belong to the block is content
    (JSON, f"{j(arguments='{1}')} b", EOS, f"1}}}}\n{CLOSE} b", "", [("f", "{")], "stop"),
    (JSON, f"{BEFORE_CLOSE}</longcat_other>", EOS, "\n</longcat_other>", "", [F], "stop"),
    (JSON, f"{BEFORE_CLOSE}{j('g', '{}')}", EOS, "", "", [F, ("g", "{}")], "tool_calls"),
    (JSON, f'{OPEN}{{"name": "f"}}{j("g", "{}")}', EOS, f'{OPEN}{{"name": "f"}}', "", [("g", "{}")], "tool_calls"),
    # the closing tag is missing
    (JSON, BEFORE_CLOSE, EOS, "", "", [F], "tool_calls"),
    (JSON, BEFORE_CLOSE.rstrip(), EOS, "", "", [F], "tool_calls"),
    (JSON, f"{BEFORE_CLOSE}{CLOSE[:-1]}", EOS, f"\n{CLOSE[:-1]}", "", [F], "tool_calls"),
    (JSON, BEFORE_CLOSE.rstrip()[:-1], EOS, "", "", [F], "stop"),
    (JSON, f'{OPEN}{{"name": "f", "argu', EOS, f'{OPEN}{{"name": "f", "argu', "", [], "stop"),
    (XML, x().removesuffix(CLOSE), EOS, "", "", [F], "tool_calls"),
    (XML, x()[:-1], EOS, CLOSE[:-1], "", [F], "tool_calls"),
    (XML, x().removesuffix(f"e>\n{CLOSE}"), EOS, x().removesuffix(f"e>\n{CLOSE}"), "", [], "stop"),
    # cut by max_tokens
    (JSON, f'{OPEN}{{"name": "f", "arguments": {{"x": [1', LENGTH, "", "", [("f", '{"x": [1')], "length"),
    (JSON, BEFORE_CLOSE, LENGTH, "", "", [F], "length"),
    (XML, x().removesuffix(CLOSE), LENGTH, x().removesuffix(CLOSE), "", [], "length"),
    (XML, x() + x()[:-1], LENGTH, x()[:-1], "", [F], "length"),
    (JSON, f"{j()}", LENGTH, "", "", [F], "length"),
    # a stop token is not the model's own end
    (JSON, f"{j()} ", STOP_TOKEN, "", "", [F], "stop"),
    # only one call is wanted
    (JSON | ONE, f"a{j()}b{j()}", EOS, "a", "", [F], "tool_calls"),
    (XML | ONE, f"a{x()}b{x()}", LENGTH, "a", "", [F], "tool_calls"),
    (JSON | ONE, f"{j(arguments='{1}')}{j()} b", EOS, f"1}}}}\n{CLOSE}", "", [("f", "{"), F], "tool_calls"),
    (JSON | ONE, BEFORE_CLOSE, LENGTH, "", "", [F], "length"),
    (JSON | ONE, f"{BEFORE_CLOSE}.", STOP_TOKEN, "", "", [F], "stop"),
    (XML | ONE, f"{x().removesuffix(CLOSE)}.", STOP_TOKEN, "", "", [F], "stop"),
    # not parsed
    ({}, f"{THINK}a{END_THINK}{j()}{x()}", EOS, f"{THINK}a{END_THINK}{j()}{x()}", "", [], "stop"),
    (JSON, "a < b <longcat_tool", EOS, "a < b <longcat_tool", "", [], "stop"),
]  # fmt: skip


def read(parts, end, rules, runs):
    tokens = [(100 + place, part) for place, part in enumerate(parts)]
    if end == EOS:
        tokens.append((2, b""))
    finish = FinishReason.LENGTH if end == LENGTH else FinishReason.STOP
    example = Example(tokens, finish, tokens[-1][0] if end == STOP_TOKEN else None, rules)
    told = answer(tokens, finish.value, example.stop_token, rules)
    *pieces, last = pieces_of(example, runs)
    content, reasoning, calls = joined([piece.delta for piece in pieces if piece.delta])
    assert (content, reasoning) == (told.content, told.reasoning), "the definition"
    assert last.num_tokens == told.num_tokens and last.num_reasoning_tokens == told.num_reasoning_tokens
    return content, reasoning, calls, last.finish_reason, last.matched_stop


def of_every_cut(text, end, rules):
    """Whole, every split in two, byte by byte; in one run and token by token."""
    data = text.encode()
    cuts = [[data], [data[i : i + 1] for i in range(len(data))]]
    cuts += [[data[:i], data[i:]] for i in range(1, len(data))]
    if end == STOP_TOKEN:
        cuts = [[data[:i], data[i:-1], data[-1:]] for i in range(1, len(data))]
    for parts in cuts:
        for runs in ([len(parts) + 1], [1]):
            yield parts, runs, read(parts, end, rules, runs)


@pytest.mark.parametrize("rules,text,end,content,reasoning,calls,finish", ROWS)
def test_every_cut_gives_what_the_table_says(rules, text, end, content, reasoning, calls, finish):
    wanted = (content, reasoning, calls, finish)
    for parts, runs, got in of_every_cut(text, end, Rules(kinds=kinds, **rules)):
        assert got[:4] == wanted, (parts, runs)
        if end != STOP_TOKEN:
            assert got[4] is None


STOPS = [
    # rules, stops, tokens, content, reasoning, calls, matched
    ({}, ["END"], "a EN|D b", "a ", "", [], "END"),
    ({}, ["END"], "a E|N|D b", "a ", "", [], "END"),
    ({}, ["END"], "a END b", "a ", "", [], "END"),
    ({}, ["END"], "a ENEND", "a EN", "", [], "END"),
    ({}, ["END"], "a |EN", "a EN", "", [], None),
    ({}, ["END"], "EN|DOR", "", "", [], "END"),
    ({}, ["好。"], "你好|。a", "你", "", [], "好。"),
    ({}, ["two", "ne t"], "one two", "o", "", [], "ne t"),
    ({}, ["b", "abc"], "a|bc", "a", "", [], "b"),
    ({}, ["bc", "abc"], "a|b|c", "", "", [], "abc"),
    ({}, ["abcd", "bx"], "ab|x", "a", "", [], "bx"),
    ({}, ["aab"], "aa|ab", "a", "", [], "aab"),
    (THINKS, ["END"], f"why E|ND{END_THINK}b", "", "why ", [], "END"),
    (THINKS, [END_THINK], f"why\n{END_THINK}\nb", "", "why\n", [], END_THINK),
    (THINKS, ["y\n</long"], f"why\n{END_THINK}\nb", "", "wh", [], "y\n</long"),
    (THINKS, ["think>\nb"], f"why\n{END_THINK}\nbc", "", "why\n</longcat_", [], "think>\nb"),
    (THINKS, [f"{END_THINK}\nb"], f"why\n{END_THINK}\na", "a", "why", [], None),
    (JSON, [OPEN], f"a{j()}", "a", "", [], OPEN),
    (JSON, ['": {'], j() + "b", f'{OPEN}\n{{"name": "f", "arguments', "", [], '": {'),
    (JSON, ["1"], j() + "b", "", "", [("f", '{"x": ')], "1"),
    (JSON, [CLOSE], f"{j()}{j()}", "", "", [F], CLOSE),
    (XML, [CLOSE], f"{x()}{x()}", "", "", [F], CLOSE),
    (XML, ["call>b"], f"{x()}b", "</longcat_tool_", "", [F], "call>b"),
    (XML, ["b"], f"{x()}\nab", "\na", "", [F], "b"),
    (XML, ["</longcat_arg_key>"], x(), f"{OPEN}f\n<longcat_arg_key>x", "", [], "</longcat_arg_key>"),
    (JSON | ONE, ["call>b"], f"{j()}b", "\n</longcat_tool_", "", [F], "call>b"),
]  # fmt: skip


@pytest.mark.parametrize("rules,stops,tokens,content,reasoning,calls,matched", STOPS)
def test_stop_strings_at_every_cut(rules, stops, tokens, content, reasoning, calls, matched):
    rules = Rules(stops=tuple(stops), kinds=kinds, **rules)
    given = [part.encode() for part in tokens.split("|")]
    for runs in ([1], [2], [len(given) + 1]):
        assert read(given, EOS, rules, runs) == (content, reasoning, calls, "stop", matched)
    for parts, runs, got in of_every_cut(tokens.replace("|", ""), EOS, rules):
        assert got == (content, reasoning, calls, "stop", matched), (parts, runs)


def test_the_token_that_lets_the_last_character_of_a_call_go_is_counted():
    rules = Rules(stops=(">x",), kinds=kinds, **(JSON | ONE))
    *_, last = pieces_of(Example([(7, j().encode()), (8, b"a"), (9, b"b"), (2, b"")], FinishReason.STOP, None, rules), [4])
    assert (last.finish_reason, last.num_tokens) == ("tool_calls", 2)


def test_the_tokens_of_a_text_that_is_held_come_before_it():
    """Nothing of a call in tags leaves before its end; with 20 log-probs a token 10,500 of them made an event of 16 MiB."""
    parts = [
        f"a {OPEN}f\n<longcat_arg_key>s</longcat_arg_key>\n<longcat_arg_value>",
        *["ab"] * 3000,
        f"</longcat_arg_value>\n{CLOSE}",
    ]
    tokens = [(i, part.encode()) for i, part in enumerate(parts)] + [(len(parts), b"")]
    example = Example(tokens, FinishReason.STOP, None, Rules(kinds=kinds, **XML))
    _, *middle, last = pieces_of(example, [3])
    assert max(len(piece.tokens) for piece in (*middle, last)) < MAX_HELD + 3
    assert joined([piece.delta for piece in middle if piece.delta]) == ("a ", "", [("f", f'{{"s": "{"ab" * 3000}"}}')])
    assert [t.output.token_id for piece in (*middle, last) for t in piece.tokens] == [token_id for token_id, _ in tokens]
    form, tops = shown_with_top_logprobs(), tuple((i, -3.2345678901234 - i) for i in range(20))
    for piece in (*middle, last):
        known = tuple(CountedToken(TokenOutput(5, -1.234567890123, tops), 0) for _ in piece.tokens)
        chunk = form.chunk(replace(piece, tokens=known))
        assert len(to_json(chunk)) < 2**20
        assert "role" not in chunk["choices"][0]["delta"]


def shown_with_top_logprobs():
    body = read_body(
        CHAT_ROUTE, {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}, "m"
    )
    return AnswerForm(body, "r", computed_by=[], show=lambda token_id: (" word", b" word"))
