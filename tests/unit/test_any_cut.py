"""However an answer is cut into tokens, accepted runs and chunks: one message, and it is what the definition says."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from longcat_pd.engine.request import Delta, FinishReason, Request, TokenOutput
from longcat_pd.server.text import TextProcessor
from tests.oracle_text import Message, Rules, answer
from tests.troubled_text import TOOLS, kinds, raw_answers, stop_strings
from tests.unit.choice_rig import Example, joined, pieces_of, reader, sliced
from tests.unit.fake_service import EOS, FakeService, deltas_of, events_of, make_app, write_folder

THINK = "<longcat_think>"
PROMPT_ENDS = [None, None, f"x{THINK}\n", f"x{THINK}", f"x{THINK}\n\n</longcat_think>\n", "ASSISTANT:"]

few_or_many = pytest.mark.parametrize("share", [1, pytest.param(20, marks=pytest.mark.slow)])


def holds(examples: st.SearchStrategy[Any], claim: Callable[[Any], None], num: int) -> None:
    """The claim holds for so many examples, the same ones each time."""

    def of_one(example: Any) -> None:
        note(f"{example}")
        claim(example)

    checks = settings(
        max_examples=num, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    checks(given(examples)(of_one))()


# ---- one choice, tokens of any bytes


sizes = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 8, 25, 400]), min_size=1, max_size=6).filter(any)


@st.composite
def examples(draw: st.DrawFn, *, plain: bool = False) -> Example:
    style = None if plain else draw(st.sampled_from(["longcat", "longcat", "longcat_xml", "longcat_xml", None]))
    raw = draw(raw_answers(style))
    parts = sliced(raw, draw(sizes))
    tokens = [(100 + place, part) for place, part in enumerate(parts)]
    ending = draw(st.sampled_from(["eos", "eos", "length", "stop token"]))
    stop_token = None
    if ending == "eos" or not tokens:
        ending = "eos"
        tokens.append((EOS, b""))
    else:
        tokens = tokens[: draw(st.integers(1, len(tokens)) | st.just(len(tokens)))]
        stop_token = tokens[-1][0] if ending == "stop token" else None
    rules = Rules(
        stops=draw(stop_strings(raw)),
        num_exempt=draw(st.sampled_from([0, 0, 0, 1, 5])),
        keeps_stop=draw(st.sampled_from([False, False, True])),
        prompt_end=None if plain else draw(st.sampled_from(PROMPT_ENDS)),
        keeps_markup=draw(st.booleans()),
        style=style,
        kinds=kinds,
        only_one=draw(st.sampled_from([False, False, True])),
    )
    finish = FinishReason.LENGTH if ending == "length" else FinishReason.STOP
    return Example(tokens, finish, stop_token, rules, draw(st.lists(st.integers(1, 6), min_size=1, max_size=5)))


def is_as_defined(example: Example) -> None:
    told = answer(example.tokens, example.finish.value, example.stop_token, example.rules)
    for runs in ([len(example.tokens)], [1], example.runs):
        opening, *middle, last = pieces_of(example, runs)
        assert opening.delta == {} == last.delta and {piece.index for piece in (opening, *middle, last)} == {3}
        assert [piece.finish_reason for piece in (opening, *middle)] == [None] * (len(middle) + 1)
        content, reasoning, calls = joined([piece.delta for piece in middle if piece.delta or not piece.tokens])
        assert (content, reasoning, calls) == (told.content, told.reasoning, [(c.name, c.arguments) for c in told.calls])
        assert (last.finish_reason, last.matched_stop) == (told.finish_reason, told.matched_stop)
        counted = [token for piece in (opening, *middle, last) for token in piece.tokens]
        assert [t.output.token_id for t in counted] == [token_id for token_id, _ in example.tokens[: told.num_tokens]]
        assert [t.text_offset for t in counted] == told.offsets
        assert (last.num_tokens, last.num_reasoning_tokens) == (told.num_tokens, told.num_reasoning_tokens)
        assert told.num_reasoning_tokens <= told.num_tokens
        running = [piece.num_tokens for piece in (opening, *middle, last)]
        assert running == sorted(running)
    is_sound(told, example)


def is_sound(told: Message, example: Example) -> None:
    everything = told.content + told.reasoning + "".join(c.name + c.arguments for c in told.calls)
    everything.encode("utf-8")
    if "\ufffd".encode() not in b"".join(data for _, data in example.tokens):
        assert "\ufffd" not in everything
    values = [json.loads(call.arguments) for call in told.calls if is_json(call.arguments)]
    assert all(isinstance(value, dict) for value in values) and len(values) >= told.num_complete


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@few_or_many
def test_a_choice_is_what_the_definition_says_however_it_is_cut(share: int) -> None:
    holds(examples(), is_as_defined, 500 * share)


@few_or_many
def test_only_what_a_stop_string_may_take_back_is_held(share: int) -> None:
    def all_else_has_left(example: Example) -> None:
        plain = replace(example, rules=replace(example.rules, num_exempt=0, keeps_stop=False, only_one=False))
        choice, sent, data = reader(plain), "", b""
        for token_id, part in plain.tokens[:-1]:
            sent += joined([p.delta for p in choice.push(Delta((TokenOutput(token_id),))) if p.delta])[0]
            data += part
            text = data.decode("utf-8", "ignore")
            if choice.is_finished:
                return
            tails = (cut for cut in range(len(text)) if any(stop.startswith(text[cut:]) for stop in plain.rules.stops))
            assert sent == text[: next(tails, len(text))]

    holds(examples(plain=True), all_else_has_left, 80 * share)


@few_or_many
def test_tokens_that_spell_single_bytes_make_whole_characters(share: int) -> None:
    spelt = {"\u2581": 256, "\u2581END": 257} | {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=spelt, merges=[], byte_fallback=True))
    text = TextProcessor(len(spelt), tokenizer)

    def is_what_the_bytes_say(ids: list[int]) -> None:
        data = b"".join({256: b" ", 257: b" END"}.get(token_id) or bytes([token_id]) for token_id in ids)
        decoder, so_far = text.decoder(), ""
        for num, token_id in enumerate(ids, 1):
            so_far += decoder.push(token_id)
            begun = b"".join(map(text.answer_bytes, ids[:num]))
            assert data.startswith(begun) and so_far == begun.decode("utf-8", "ignore")
        assert text.raw(ids) == so_far == data.decode("utf-8", "ignore")

    mixed = st.tuples(raw_answers(None).map(list), st.lists(st.integers(250, 257), max_size=4)).map(
        lambda two: two[1] + two[0]
    )
    holds(mixed, is_what_the_bytes_say, 50 * share)


# ---- through the whole face: a body in, bytes out


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BOS = 1


@dataclass(frozen=True)
class Setting:
    variant: str
    parsers: dict[str, str]
    reads_reasoning: bool
    style: str | None


SETTINGS = [
    Setting("2.0", {}, True, "longcat_xml"),
    Setting("2.0", {"tool_parser": "longcat"}, True, "longcat"),
    Setting("chat", {"reasoning_parser": "longcat"}, True, "longcat"),
    Setting("chat", {"tool_parser": "longcat_xml"}, False, "longcat_xml"),
    Setting("2.0", {"tool_parser": "none", "reasoning_parser": "none"}, False, None),
]
SWITCHES: dict[Any, st.SearchStrategy[Any]] = {
    "enable_thinking": st.booleans(),
    "separate_reasoning": st.booleans(),
    "parallel_tool_calls": st.booleans(),
    "tool_choice": st.sampled_from(["auto", "auto", "none", None]),
}


@dataclass(frozen=True)
class Asked:
    setting: int
    body: dict[str, Any]
    raw: bytes
    sizes: list[int]
    spells: list[bool]
    silent: list[int]  # places
    ends_in_nothing: bool
    runs: list[int]


@st.composite
def bodies(draw: st.DrawFn) -> Asked:
    setting = draw(st.integers(0, len(SETTINGS) - 1))
    raw = draw(raw_answers(SETTINGS[setting].style))
    body: dict[str, Any] = {"return_token_ids": True, "ignore_eos": draw(st.booleans())}
    if draw(st.integers(0, 4)) == 0:
        body |= {"prompt": "hi", "max_tokens": 450, "logprobs": draw(st.sampled_from([None, 0, 2]))}
    else:
        body |= {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": draw(st.sampled_from([None, TOOLS, TOOLS, TOOLS])),
        }
        body |= draw(st.sampled_from([{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}]))
        body |= draw(st.fixed_dictionaries({}, optional=SWITCHES))
    stops = draw(stop_strings(raw))
    if stops:
        body |= {"stop": list(stops), "min_tokens": draw(st.sampled_from([0, 0, 3]))}
    if draw(st.integers(0, 3)) == 0:
        body["max_tokens"] = draw(st.integers(3, 40))
    if draw(st.integers(0, 3)) == 0:
        body["stop_token_ids"] = draw(st.lists(st.integers(7, 600), min_size=1, max_size=3))
    if draw(st.booleans()):
        body["include_stop_str_in_output"] = draw(st.booleans())
    return Asked(
        setting=setting,
        body=body,
        raw=raw[:300],
        sizes=draw(sizes),
        spells=draw(st.lists(st.booleans(), min_size=1, max_size=4)),
        silent=draw(st.lists(st.integers(0, 30), max_size=2)),
        ends_in_nothing=draw(st.integers(0, 9)) == 0,
        runs=draw(st.lists(st.integers(1, 6), min_size=1, max_size=5)),
    )


class Faces:
    """Each setting's face. A service plays what the test lays out."""

    def __init__(self, folders: dict[str, str]) -> None:
        self.loop = asyncio.new_event_loop()
        self.ids: list[int] = []
        self.runs: list[int] = []
        self.generated: Delta | None = None
        self.clients = []
        for setting in SETTINGS:
            app = make_app(FakeService(folders[setting.variant], self._play, **setting.parsers))
            self.clients.append(httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://face"))
        self.text = TextProcessor.load(folders["2.0"])
        tokenizer = self.text.need_tokenizer("x")
        spelt = ((self.text.answer_bytes(i), i) for i in range(tokenizer.get_vocab_size()))
        self._id_of_byte = {data[0]: token_id for data, token_id in spelt if len(data) == 1}
        assert len(self._id_of_byte) == 256

    async def _play(self, request: Request) -> AsyncGenerator[Delta, None]:
        (self.generated,) = deltas_of(self.ids, request.sampling, group=len(self.ids))
        parts = sliced(self.generated.tokens, self.runs)
        for part in parts[:-1]:
            yield Delta(part)
        yield replace(self.generated, tokens=parts[-1])

    def ask(self, asked: Asked, **more: Any) -> httpx.Response:
        body = {**asked.body, **more}
        route = CHAT if "messages" in body else COMPLETIONS
        return self.loop.run_until_complete(self.clients[asked.setting].post(route, json=body))

    def encode(self, asked: Asked) -> list[int]:
        """The raw bytes as ids: parts are encoded by the tokenizer or spelt byte by byte; silent ids stand among them."""
        tokenizer = self.text.need_tokenizer("x")
        ids: list[int] = []
        for part, is_spelt in zip(sliced(asked.raw, asked.sizes), cycle(asked.spells), strict=False):
            encoded = tokenizer.encode(part.decode("utf-8", "replace"), add_special_tokens=False).ids
            if is_spelt or b"".join(map(self.text.answer_bytes, encoded)) != part:
                encoded = [self._id_of_byte[byte] for byte in part]
            ids += encoded
        for place in asked.silent:
            ids.insert(min(place, len(ids)), EOS if asked.body["ignore_eos"] else BOS)
        return ids if ids and asked.ends_in_nothing else [*ids, EOS]

    def close(self) -> None:
        for client in self.clients:
            self.loop.run_until_complete(client.aclose())
        self.loop.close()


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faces]:
    made = Faces({variant: write_folder(tmp_path_factory.mktemp("model"), variant) for variant in ("2.0", "chat")})
    yield made
    made.close()


def rules_of(asked: Asked) -> Rules:
    body, setting = asked.body, SETTINGS[asked.setting]
    stops = Rules(
        stops=tuple(body.get("stop", ())),
        num_exempt=body.get("min_tokens", 0),
        keeps_stop=body.get("include_stop_str_in_output", False),
    )
    if "prompt" in body:
        return stops
    open_or_not = f"{THINK}\n" if body.get("enable_thinking") else f"{THINK}\n\n</longcat_think>\n"
    prompt_end = "ASSISTANT:" if setting.variant == "chat" else open_or_not
    return replace(
        stops,
        prompt_end=prompt_end if setting.reads_reasoning else None,
        keeps_markup=not body.get("separate_reasoning", True),
        style=setting.style if body["tools"] and body.get("tool_choice") != "none" else None,
        kinds=kinds,
        only_one=not body.get("parallel_tool_calls", True),
    )


def put_together(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record that the chunks are the pieces of."""
    *parts, last = chunks
    heads = [{name: chunk[name] for name in ("id", "object", "created", "model", "system_fingerprint")} for chunk in chunks]
    assert last["choices"] == [] and heads == [heads[0]] * len(heads) and all(c["usage"] is None for c in parts)
    choices = [choice for chunk in parts for choice in chunk["choices"]]
    assert len(choices) == len(parts) and [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    whole = {"index": 0, "finish_reason": choices[-1]["finish_reason"], "matched_stop": choices[-1]["matched_stop"]}
    whole["token_ids"] = [i for c in choices for i in c["token_ids"]]
    lists = [c["logprobs"] for c in choices if c["logprobs"] is not None]
    whole["logprobs"] = {name: [v for part in lists for v in part[name]] for name in lists[0]} if lists else None
    if "text" in choices[0]:
        whole["text"] = "".join(c["text"] for c in choices)
    else:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""} and choices[-1]["delta"] == {}
        content, reasoning, calls = joined([c["delta"] for c in choices[1:-1] if c["delta"]])
        functions = [{"type": "function", "function": {"name": name, "arguments": text}} for name, text in calls]
        whole["message"] = {
            "role": "assistant",
            "content": content or (None if calls else ""),
            "reasoning_content": reasoning or None,
            "tool_calls": functions or None,
        }
    kind = heads[0]["object"].removesuffix(".chunk")
    return {**last, "object": kind, "choices": [whole], "prompt_token_ids": parts[0]["prompt_token_ids"]}


def bare(record: dict[str, Any]) -> dict[str, Any]:
    """Without the ids and times that are each answer's own."""
    (choice,) = record["choices"]
    calls = choice.get("message", {}).get("tool_calls") or []
    ids = [call.pop("id") for call in calls if "id" in call]
    assert len(set(ids)) == len(ids) and all(re.fullmatch("call_[0-9a-f]{24}", identity) for identity in ids)
    return {name: value for name, value in record.items() if name not in ("id", "created")}


@few_or_many
def test_what_a_client_gets_streamed_or_not_is_what_the_definition_says(faces: Faces, share: int) -> None:
    def is_one_answer(asked: Asked) -> None:
        faces.ids = faces.encode(asked)
        records = []
        for runs in (asked.runs, [1], [len(faces.ids)]):
            faces.runs = runs
            response = faces.ask(asked)
            assert response.status_code == 200, response.text
            records.append(bare(response.json()))
            response = faces.ask(asked, stream=True, stream_options={"include_usage": True})
            assert response.status_code == 200
            *chunks, done = events_of(response.content)
            assert done == "[DONE]"
            records.append(bare(put_together(chunks)))
        assert records == [records[0]] * 6
        says_as_much(records[0], faces, asked)

    holds(bodies(), is_one_answer, 120 * share)


def says_as_much(record: dict[str, Any], faces: Faces, asked: Asked) -> None:
    """The record agrees with the definition in everything that it says."""
    assert faces.generated is not None and faces.generated.finish is not None
    tokens = [(token.token_id, faces.text.answer_bytes(token.token_id)) for token in faces.generated.tokens]
    told = answer(tokens, faces.generated.finish.value, faces.generated.matched_stop_token, rules_of(asked))
    (choice,) = record["choices"]
    assert (choice["finish_reason"], choice["matched_stop"]) == (told.finish_reason, told.matched_stop)
    assert choice["token_ids"] == [token_id for token_id, _ in tokens[: told.num_tokens]]
    if "prompt" in asked.body:
        assert choice["text"] == told.content
    else:
        says_this_message(choice["message"], told, keeps_markup=rules_of(asked).keeps_markup)
    usage, counted = record["usage"], told.num_tokens
    assert usage["completion_tokens"] == counted == usage["total_tokens"] - usage["prompt_tokens"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == told.num_reasoning_tokens
    assert usage["prompt_tokens"] == len(record["prompt_token_ids"])
    logprobs = choice["logprobs"]
    if asked.body.get("logprobs") is None:
        assert logprobs is None
    elif "prompt" in asked.body:
        assert {len(entries) for entries in logprobs.values()} == {counted}
        assert logprobs["text_offset"] == told.offsets
    else:
        spelt = b"".join(bytes(entry["bytes"]) for entry in logprobs["content"])
        silent = {i: faces.text.raw([i]).encode() for i in (BOS, EOS)}
        assert spelt == b"".join(silent.get(token_id, data) for token_id, data in tokens[:counted])
        assert len(logprobs["content"]) == counted


def says_this_message(message: dict[str, Any], told: Message, *, keeps_markup: bool) -> None:
    calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in told.calls]
    reasoning, content = ("", told.reasoning + told.content) if keeps_markup else (told.reasoning, told.content)
    assert message["tool_calls"] == (calls or None)
    assert message["content"] == (content or (None if calls else ""))
    assert message["reasoning_content"] == (reasoning or None)
