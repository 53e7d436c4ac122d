"""Random answers of a model that likes trouble, for hypothesis: bytes with markers whole and in pieces, calls good and bad.

Owns what is generated. Knows neither how it is read nor how it is cut into tokens.
"""

# ruff: noqa: E501 - tables

from __future__ import annotations

import json

from hypothesis import strategies as st

MARKERS = tuple(
    f"<{slash}longcat_{name}>" for name in ("think", "tool_call", "arg_key", "arg_value") for slash in ("", "/")
)
TOOL_CALL, END_OF_CALL = "<longcat_tool_call>", "</longcat_tool_call>"
THINK_CLOSE = "</longcat_think>"

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "x": {"type": "integer"},
                    "s": {"type": "string"},
                    "o": {"type": ["string", "null"]},
                    "a": {"anyOf": [{"type": "string"}, {"type": "array"}]},
                    "e": {"enum": ["1", "2"]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "bare"}},
    {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}},
]
_KINDS = {"x": {"integer"}, "s": {"string"}, "o": {"string", "null"}, "a": {"string", "array"}, "e": {"string"}}


def kinds(function: str, key: str) -> set[str]:
    """What ``TOOLS`` says of an argument."""
    return _KINDS.get(key, set()) if function == "f" else set()


WORDS = [
    "Hello", " ", "\n", "\n\n", " \n ", "a<b", "</", "<", ">", "\x00", "é", "e\u0301", "你好", "龘", "👩\u200d👩\u200d👧", "😀",
    "\ufffd", "\u2028", "\x85", "{", "}", '"', "END", "EN", "aab", "ab", "null", "\ud7ff", "\ue000", "\U0010ffff",
]  # fmt: skip
BROKEN = [
    b"\x80", b"\xbf\xbf", b"\xe4", b"\xe4\xbd", b"\xf0\x9f", b"\xf0\x9f\x98", b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf5",
]  # fmt: skip

words = st.sampled_from(WORDS)


@st.composite
def part_of_a_marker(draw: st.DrawFn) -> str:
    marker = draw(st.sampled_from(MARKERS))
    place = draw(st.integers(1, len(marker) - 1))
    return marker[:place] if draw(st.booleans()) else marker[place:]


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """The text with something gone, something put in, its end cut off, or its closing tag not closed."""
    kind = draw(st.sampled_from(["gone", "in", "cut", "tag", "tag"]))
    if kind == "tag":
        return text.removesuffix(END_OF_CALL) + END_OF_CALL[: draw(st.sampled_from([0, 0, 1, 5, 18]))]
    place = draw(st.integers(0, max(len(text) - 1, 0)))
    if kind == "gone":
        return text[:place] + text[place + draw(st.integers(1, 3)) :]
    if kind == "in":
        return text[:place] + draw(st.one_of(words, part_of_a_marker(), st.sampled_from(MARKERS))) + text[place:]
    return text[:place]


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 10**6), st.sampled_from([0.5, -1e30]), words, st.sampled_from(MARKERS)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2), max_leaves=4
)
names = st.sampled_from(["f", "f", "g", "bare", "unknown", "", "two words", "名", 'q"', "f\n", "\ud800"])
RAW_JSON = [
    '{"s": "a\nb\t"}',
    '{"s": "\\u4f60\\ud83d"}',
    '{"x":1,}',
    '{"x": 01}',
    "[]",
    "null",
    '"text"',
    "7",
    "{}",
    "{ }",
    "nul",
]


@st.composite
def json_call(draw: st.DrawFn) -> str:
    name = json.dumps(draw(names))
    arguments = draw(
        st.one_of(
            st.dictionaries(st.sampled_from(["x", "s", "o", "名"]), values, max_size=2).map(
                lambda value: json.dumps(value, ensure_ascii=False)
            ),
            st.sampled_from(RAW_JSON),
        )
    )
    spelling = draw(st.sampled_from(["arguments", "arguments", "parameters", "arg\\u0075ments"]))
    members = [f'"name": {name}', f'"{spelling}": {arguments}']
    members += draw(
        st.sampled_from([[], [], [], ['"id": 7'], ['"name": "h"'], ['"arguments": {"y": 2}'], ['"more": {"a": [1, "]"]}']])
    )
    members = draw(st.permutations(members)) if draw(st.booleans()) else members
    members = members[:1] if draw(st.integers(0, 5)) == 0 else members
    border = draw(st.sampled_from(["\n", "", " \r\n"]))
    return f"{TOOL_CALL}{border}{{{', '.join(members)}}}{border}{END_OF_CALL}"


RAW_VALUES = [
    "1", "07", "true", "True", "None", "null", "nan", "NaN", "1e999", "0x10", "1_000", "-0", "1e5", "1.0", "2", "9" * 30, "...",
    "text it is", "", " padded\n", "{'k': 1}", '{"k": [1, 2]}', "(1, 'a')", "{1, 2}", "b'x'", "'a' 'b'", "'\\ud800'", '"\\ud800"',
    "'\\ud83d\\ude00'", '"\\q"', "[1, 2", "[1, 2]", '"quoted"', "<b>", "{1: 2}", "1 # x", "\x00", "名", "'\\N{DASH}'", "a\u2028b",
]  # fmt: skip
KEYS = ["x", "s", "o", "a", "e", " x ", "名", ""]


@st.composite
def xml_call(draw: st.DrawFn) -> str:
    pairs = ""
    for key in draw(st.lists(st.sampled_from(KEYS), max_size=3)):
        value = draw(st.one_of(st.sampled_from(RAW_VALUES), st.sampled_from(RAW_VALUES), words, st.sampled_from(MARKERS)))
        space = draw(st.sampled_from(["\n", "", " \n "]))
        pairs += f"<longcat_arg_key>{key}</longcat_arg_key>{space}"
        if draw(st.integers(0, 11)):
            pairs += f"<longcat_arg_value>{value}</longcat_arg_value>{space}"
    head = draw(st.sampled_from(["f", "f", "f", "g", "bare", "unknown", "", "two words", " f ", "名"]))
    return f"{TOOL_CALL}{head}{draw(st.sampled_from(['', chr(10)]))}{pairs}{END_OF_CALL}"


reasoning = st.sampled_from(
    [f"why\n{THINK_CLOSE}\n", f"\n{THINK_CLOSE}", f"<longcat_think>\nwhy{THINK_CLOSE}\n\n", THINK_CLOSE]
)
calls = {None: json_call() | xml_call(), "longcat": json_call(), "longcat_xml": xml_call()}
scraps = st.one_of(words, words, words, st.text(max_size=3), part_of_a_marker(), st.sampled_from(MARKERS))


@st.composite
def raw_answers(draw: st.DrawFn, style: str | None) -> bytes:
    """The bytes that a model generates, which mostly writes its calls in this style; the last may lack its end."""
    data = draw(st.one_of(st.just(""), reasoning)).encode()
    for kind in draw(st.lists(st.sampled_from("cccdddsssob"), min_size=1, max_size=6)):
        if kind == "b":
            data += draw(st.sampled_from(BROKEN))
            continue
        piece = draw(scraps if kind == "s" else calls[None] if kind == "o" else calls[style])
        piece = draw(damaged(piece)) if kind == "d" else piece
        data += piece.encode("utf-8", "ignore")
    if draw(st.integers(0, 3)) == 0:
        call = draw(calls[style])
        data += call[: len(call) - draw(st.integers(1, len(END_OF_CALL) + 4))].encode("utf-8", "ignore")
    return data


STOPS = [
    "END", "EN", "\n\n", "\n", "aab", "ab", "b", ">", "l>", "think>", THINK_CLOSE, TOOL_CALL, END_OF_CALL, ">\n", "}", '"', "好", "\u200d", "<",
]  # fmt: skip


@st.composite
def stop_strings(draw: st.DrawFn, raw: bytes) -> tuple[str, ...]:
    """Of those that occur in texts, and of pieces of this one."""
    kind = draw(st.sampled_from(["", "", "list", "own", "both"]))
    stops = draw(st.lists(st.sampled_from(STOPS), max_size=2)) if kind in ("list", "both") else []
    text = raw.decode("utf-8", "ignore")
    for _ in range(draw(st.integers(1, 2)) if text and kind in ("own", "both") else 0):
        place = draw(st.integers(0, len(text) - 1))
        stops.insert(0, text[place : place + draw(st.integers(1, 12))])
    return tuple(stops)
