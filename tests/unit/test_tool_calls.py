# ruff: noqa: E501 - tables
import json

import pytest

from longcat_pd.server.tool_calls import CallArguments, CallBegan, Text, ToolCallParser

OPEN, CLOSE = "<longcat_tool_call>", "</longcat_tool_call>"


def tool(name, properties=None, **parameters):
    if properties is not None:
        parameters |= {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, **({"parameters": parameters} if parameters else {})}}


TOOLS = [
    tool("f", {"x": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": ["string", "null"]}}),
    tool("bare"),
    tool("g", {}),
]


def run(style, pieces, *, was_cut=False, only_one=False):
    parser = ToolCallParser(style, TOOLS, only_one=only_one)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish(was_cut=was_cut)
    content, calls = "", []
    for event in events:
        if isinstance(event, Text):
            content += event.text
        elif isinstance(event, CallBegan):
            assert event.index == len(calls)
            calls.append([event.name, ""])
        else:
            assert isinstance(event, CallArguments)
            calls[event.index][1] += event.text
    return content, [tuple(call) for call in calls], parser.num_complete


def json_call(name="f", arguments='{"x": 1}'):
    return f'{OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSE}'


def xml_call(name="f", **arguments):
    pairs = "".join(
        f"<longcat_arg_key>{key}</longcat_arg_key>\n<longcat_arg_value>{value}</longcat_arg_value>\n"
        for key, value in arguments.items()
    )
    return f"{OPEN}{name}\n{pairs}{CLOSE}"


JSON_CASES = [
    # text, content, calls, complete
    (json_call(), "", [("f", '{"x": 1}')], 1),
    ("Hello \n" + json_call() + json_call("g", "{}"), "Hello \n", [("f", '{"x": 1}'), ("g", "{}")], 2),
    (json_call() + "\n \n" + json_call("g", "{}") + " \n", "", [("f", '{"x": 1}'), ("g", "{}")], 2),
    (json_call() + "\nand\n" + json_call("g", "{}") + " bye", "\nand\n bye", [("f", '{"x": 1}'), ("g", "{}")], 2),
    (f'{OPEN}{{"name":"f"}}{CLOSE}', "", [("f", "{}")], 1),
    (f'{OPEN}{{"name":"f","arguments":null}}{CLOSE}', "", [("f", "{}")], 1),
    (f'{OPEN}{{"name":"f","parameters":{{"x":2}}}}{CLOSE}', "", [("f", '{"x":2}')], 1),
    (f'{OPEN}{{"arguments":{{"x":[1,{{"y":"}}"}}]}},"name":"f"}}{CLOSE}', "", [("f", '{"x":[1,{"y":"}"}]}')], 1),
    (json_call("unknown"), "", [("unknown", '{"x": 1}')], 1),
    (
        json_call(arguments='{"s": "a \\"</longcat_tool_call> \\u4f60"}'),
        "",
        [("f", '{"s": "a \\"</longcat_tool_call> \\u4f60"}')],
        1,
    ),
    (json_call(arguments='{"s": "line\nbreak"}'), "", [("f", '{"s": "line\\nbreak"}')], 1),
    # closing tag missing at the end
    (f'{OPEN}{{"name":"f","arguments":{{"x":1}}}}', "", [("f", '{"x":1}')], 1),
    (f'{OPEN}{{"name":"f"}}\n', "", [("f", "{}")], 1),
    (f'{OPEN}{{"name":"f","arguments":{{"x":1}}}}</longcat', "</longcat", [("f", '{"x":1}')], 1),
    # malformed, nothing sent yet
    (f"{OPEN}f\n{CLOSE}", f"{OPEN}f\n{CLOSE}", [], 0),
    (f'{OPEN}{{"name": 7}}{CLOSE}', f'{OPEN}{{"name": 7}}{CLOSE}', [], 0),
    (f'{OPEN}{{"name": ""}}{CLOSE}', f'{OPEN}{{"name": ""}}{CLOSE}', [], 0),
    (f'{OPEN}{{"arguments": {{}}}}{CLOSE}', f'{OPEN}{{"arguments": {{}}}}{CLOSE}', [], 0),
    (f'{OPEN}{{"name": "f", "arguments": "x"}}{CLOSE}', f'{OPEN}{{"name": "f", "arguments": "x"}}{CLOSE}', [], 0),
    (f"{OPEN}{json_call()}", f"{OPEN}", [("f", '{"x": 1}')], 1),
    # unfinished, something sent
    (f'{OPEN}{{"name":"f","arguments":{{"x": [1', "", [("f", '{"x": [1')], 0),
    (f'{OPEN}{{"name":"f","argu', f'{OPEN}{{"name":"f","argu', [], 0),
    ("a < b <longcat_tool", "a < b <longcat_tool", [], 0),
    ("plain", "plain", [], 0),
]

XML_CASES = [
    (xml_call(x=1), "", [("f", {"x": 1})], 1),
    ("Hi\n" + xml_call(x=1, s="2") + "\n" + xml_call("bare") + "\n", "Hi\n", [("f", {"x": 1, "s": "2"}), ("bare", {})], 2),
    (xml_call("bare", a="[1, 2]", b="{'k': True}", c="text it is", d="(1, 2)"), "", [("bare", {"a": [1, 2], "b": {"k": True}, "c": "text it is", "d": [1, 2]})], 1),
    (xml_call("g", a="true", b="None", c="nan", d="1e999"), "", [("g", {"a": True, "b": None, "c": "nan", "d": "1e999"})], 1),
    (xml_call(o="null") + xml_call(o="12"), "", [("f", {"o": None}), ("f", {"o": "12"})], 2),
    (xml_call("unknown", x="07"), "", [("unknown", {"x": "07"})], 1),
    (f"{OPEN}f<longcat_arg_key> x </longcat_arg_key><longcat_arg_value>\n1\n</longcat_arg_value>{CLOSE}", "", [("f", {"x": 1})], 1),
    (f"{OPEN}f{CLOSE}", "", [("f", {})], 1),
    (f'{OPEN}{{"name": "f", "arguments": {{"x": 1}}}}{CLOSE}', "", [("f", {"x": 1})], 1),
    (f"{OPEN}f\n<longcat_arg_key>x</longcat_arg_key>\n<longcat_arg_value>1</longcat_arg_value>\n", "", [("f", {"x": 1})], 1),
    # malformed
    (f"{OPEN}two words\n{CLOSE} x", f"{OPEN}two words\n{CLOSE} x", [], 0),
    (f"{OPEN}f\n<longcat_arg_key>x</longcat_arg_key>\n{CLOSE}", f"{OPEN}f\n<longcat_arg_key>x</longcat_arg_key>\n{CLOSE}", [], 0),
    (f"{OPEN}f\nstray\n{CLOSE}{xml_call(x=1)}", f"{OPEN}f\nstray\n{CLOSE}", [("f", {"x": 1})], 1),
    (f"{OPEN}f\n<longcat_arg_key>x", f"{OPEN}f\n<longcat_arg_key>x", [], 0),
]  # fmt: skip


@pytest.mark.parametrize("text,content,calls,complete", JSON_CASES)
def test_json_style_is_the_same_for_every_cut(text, content, calls, complete):
    assert run("longcat", [text]) == (content, calls, complete)
    for cut in range(len(text) + 1):
        assert run("longcat", [text[:cut], text[cut:]]) == (content, calls, complete), cut
    assert run("longcat", list(text)) == (content, calls, complete)
    for _, arguments in calls[:complete]:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("text,content,calls,complete", XML_CASES)
def test_xml_style_is_the_same_for_every_cut(text, content, calls, complete):
    whole = run("longcat_xml", [text])
    assert (whole[0], [(n, json.loads(a)) for n, a in whole[1]], whole[2]) == (content, calls, complete)
    for cut in range(len(text) + 1):
        assert run("longcat_xml", [text[:cut], text[cut:]]) == whole, cut
    assert run("longcat_xml", list(text)) == whole


def test_what_max_tokens_cuts():
    cut_xml = f"{OPEN}f\n<longcat_arg_key>x</longcat_arg_key>\n<longcat_arg_value>1</longcat_arg_value>\n"
    assert run("longcat_xml", [cut_xml], was_cut=True) == (cut_xml, [], 0)
    cut_json = f'{OPEN}{{"name":"f","arguments":{{"x": "ab'
    assert run("longcat", [cut_json], was_cut=True) == ("", [("f", '{"x": "ab')], 0)


@pytest.mark.parametrize("style,call", [("longcat", json_call), ("longcat_xml", lambda: xml_call(x=1))])
def test_only_one_call_ends_the_reading(style, call):
    content, calls, complete = run(style, list("a" + call() + "b" + call()), only_one=True)
    assert (content, len(calls), complete) == ("a", 1, 1)


def test_json_arguments_leave_as_they_come():
    parser = ToolCallParser("longcat", TOOLS)
    assert parser.push(OPEN + '{"name": "f", ') == []
    assert parser.push('"arguments": {"s": "on') == [CallBegan(0, "f"), CallArguments(0, '{"s": "on')]
    assert parser.push("e") == [CallArguments(0, "e")]


def test_malformed_arguments_that_have_begun_lose_nothing():
    text = f'{OPEN}{{"name":"f","arguments":{{"x": 1,, }}}}{CLOSE}'
    content, calls, complete = run("longcat", list(text))
    assert calls == [("f", '{"x": 1,')] and complete == 0
    assert content == ", }}" + CLOSE
    assert run("longcat", [text]) == (content, calls, complete)


def test_absurd_values_stay_text():
    for value in ("[" * 5000, "-" * 4000 + "1", "(" * 3000, "9" * 5000):
        _, [(name, arguments)], _ = run("longcat_xml", [xml_call("bare", x=value)])
        assert name == "bare" and json.loads(arguments) == {"x": value}
