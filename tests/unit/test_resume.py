"""What travels beside an answer that may have to go on elsewhere, and what a leg that goes on with one says and gets."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from longcat_pd.engine.request import Delta, FinishReason, Request, TokenOutput
from longcat_pd.errors import RankLost, TransferFailed
from longcat_pd.metrics import Metrics
from longcat_pd.server.choice import ChoiceText
from longcat_pd.server.stops import StopFinder
from longcat_pd.server.text import TextProcessor
from longcat_pd.wire import pack
from tests.manual_clock import settle
from tests.resumption import IDS, RESUME, read_plain, read_told
from tests.unit.control_rig import pair
from tests.unit.fake_service import EOS, LEG, FakeService, make_app, plays, write_folder

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = (5, 6, 7)
DIGEST = hashlib.blake2b(b"\5\0\0\0\6\0\0\0\7\0\0\0", digest_size=16).hexdigest()
GOOD = {"token_ids": [300, 301], "seed": 77, "created": 12345, "prompt_digest": DIGEST}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
BASE = {"prompt": list(PROMPT), "max_tokens": 16, "return_token_ids": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(folder: str) -> TextProcessor:
    return TextProcessor.load(folder)


async def post(
    service: FakeService, fields: dict[str, Any], header: dict[str, str], *, metrics: Metrics | None = None
) -> httpx.Response:
    transport = httpx.ASGITransport(make_app(service, metrics=metrics))
    async with httpx.AsyncClient(transport=transport, base_url="http://d0") as client:
        headers = {**LEG, **header, "X-Request-Id": "r"}
        return await client.post(CHAT if "messages" in fields else COMPLETIONS, json=fields, headers=headers)


def deltas(*runs: list[int], finish: FinishReason = FinishReason.LENGTH) -> list[Delta]:
    made = [Delta(tuple(map(TokenOutput, run))) for run in runs]
    return [*made[:-1], Delta(made[-1].tokens, finish)]


def says(*runs: list[int], finish: FinishReason = FinishReason.LENGTH) -> Any:
    async def script(_: Request) -> AsyncGenerator[Delta, None]:
        for delta in deltas(*runs, finish=finish):
            await asyncio.sleep(0)
            yield delta

    return script


# ---- the answer that may break


async def test_a_stream_has_exactly_these_lines(folder: str, text: TextProcessor) -> None:
    first, second, third = text.encode("ab"), text.encode(" Hello"), text.encode(" x")
    service = FakeService(folder, says(first, second, third), role="decode")
    answer = await post(service, {**BASE, **STREAM}, IDS)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = answer.text.split("\n")
    assert lines[0].startswith(": answer {")
    created = json.loads(lines[2].removeprefix("data: "))["created"]
    assert json.loads(lines[0].removeprefix(": answer ")) == {"seed": 77, "created": created, "prompt_digest": DIGEST}
    assert lines[1] == ": ids " + base64.b64encode(pack(first)).decode()
    assert lines[3] == "" and lines[4] == ": ids " + base64.b64encode(pack(second)).decode()
    kinds = [line.partition(" ")[2][:3] if line.startswith(":") else line[:6] for line in lines[5:]]
    assert kinds == ["data: ", "", "data: ", "", "ids", "data: ", "", "data: ", "", "usa", "data: ", "", ""]
    told = read_told(answer.content, is_stream=True)
    assert [group.ids for group in told.groups] == [first, second]


async def test_what_one_step_makes_leaves_at_once(folder: str, text: TextProcessor) -> None:
    """Opening, reasoning, content of the same tokens: one piece of the body, ids before the last event."""
    ids = text.encode("why\n</longcat_think>\nyes")
    service = FakeService(folder, says(ids, text.encode(" no")), role="decode")
    service.offered_prompt = tuple(text.encode("x<longcat_think>\n"))
    sent = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "enable_thinking": True, **STREAM}).encode()
    headers = {**LEG, **IDS, "content-type": "application/json"}
    scope = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "query_string": b"",
        "http_version": "1.1",
        "scheme": "http",
        "server": ("d0", 1),
    }
    scope["headers"] = [(k.lower().encode(), v.encode()) for k, v in headers.items()]
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        message = next(messages, None)
        return message or await asyncio.get_running_loop().create_future()

    await make_app(service)(scope, receive, send)
    first = sent[1].split(b"\n\n")
    assert [block.count(b": ids") for block in first] == [0, 0, 1, 0] and first[-1] == b""
    assert b'"role"' in first[0] and b"why" in first[1] and b"yes" in first[2].split(b"\n")[1]


async def test_ids_whose_text_is_held_back_are_not_said(folder: str, text: TextProcessor) -> None:
    """The opening shows that there is a token; which, is said with the first event that takes it."""
    held = text.encode("<longcat_think")
    service = FakeService(folder, says(held, text.encode(" no"), text.encode(" more")), role="decode")
    service.offered_prompt = tuple(text.encode("x"))
    body = {"messages": [{"role": "user", "content": "x"}], "return_token_ids": True, **STREAM}
    told = read_told((await post(service, body, IDS)).content, is_stream=True)
    assert [(len(group.events), len(group.ids)) for group in told.groups] == [
        (1, 0),
        (1, len(held) + len(text.encode(" no"))),
    ]


async def test_ids_of_a_whole_answer_are_said_now_and_then(folder: str, text: TextProcessor) -> None:
    ids = [text.encode(letter)[-1] for letter in "abcde" * 20]
    service = FakeService(folder, says(*([i] for i in ids), [EOS], finish=FinishReason.STOP), role="decode")
    answer = await post(service, {**BASE, "max_tokens": 200}, IDS)
    told = read_told(answer.content, is_stream=False)
    said = [group.ids for group in told.groups]
    assert said == [ids[:1], ids[1:33], ids[33:65], ids[65:97]]
    assert told.ending[0]["object"] == "text_completion" and told.ending[0]["choices"][0]["token_ids"] == [*ids, EOS]
    plain = (await post(service, {**BASE, "max_tokens": 200}, {})).json()
    assert {**plain, "created": 0} == {**told.ending[0], "created": 0}


async def test_the_ids_of_the_last_step_are_said_with_the_whole_answer_only(folder: str, text: TextProcessor) -> None:
    """Behind an end nothing goes on: also where it is the first step, or its text is one event and its end another."""
    for runs, expected in (([[300], [301, EOS]], [[300]]), ([[300, EOS]], [])):
        service = FakeService(folder, says(*runs, finish=FinishReason.STOP), role="decode")
        told = read_told((await post(service, BASE, IDS)).content, is_stream=False)
        assert [group.ids for group in told.groups] == expected and told.origin["seed"] == 77


async def test_with_logprobs_a_whole_answer_says_no_ids(folder: str) -> None:
    service = FakeService(folder, says(*([i] for i in range(300, 380))), role="decode")
    told = read_told((await post(service, {**BASE, "logprobs": 0, "max_tokens": 200}, IDS)).content, is_stream=False)
    assert [group.ids for group in told.groups] == [[]]


async def test_an_error_is_a_status_before_the_first_line_and_an_event_behind(folder: str) -> None:
    async def lost(_: Request) -> AsyncGenerator[Delta, None]:
        for token_id in runs:
            yield Delta((TokenOutput(token_id),))
        raise RankLost("rank 1 is gone")

    for fields in (BASE, {**BASE, **STREAM}):
        runs: list[int] = []
        answer = await post(FakeService(folder, lost, role="decode"), fields, IDS)
        assert (answer.status_code, answer.headers["X-Longcat-Cause"]) == (500, "self")
        runs = [300]
        answer = await post(FakeService(folder, lost, role="decode"), fields, IDS)
        *_, last, rest = answer.text.split("\n\n")
        assert (
            answer.status_code == 200
            and rest == ""
            and json.loads(last.removeprefix("data: "))["error"]["code"] == "rank_lost"
        )


# ---- the leg that goes on


BAD: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"resume": None}, "missing_field", "resume"),
    ({"resume": [1]}, "invalid_type", "resume"),
    ({"resume": {**GOOD, "token_ids": None}}, "missing_field", "resume.token_ids"),
    ({"resume": {**GOOD, "token_ids": "3"}}, "invalid_type", "resume.token_ids"),
    ({"resume": {**GOOD, "token_ids": [3, "4"]}}, "invalid_type", "resume.token_ids[1]"),
    ({"resume": {**GOOD, "token_ids": [3, -1]}}, "invalid_value", "resume.token_ids[1]"),
    ({"resume": {**GOOD, "token_ids": [3, 2**31]}}, "invalid_value", "resume.token_ids[1]"),
    ({"resume": {**GOOD, "token_ids": [3, 1024]}}, "invalid_value", "resume.token_ids[1]"),
    ({"resume": {**GOOD, "seed": None}}, "missing_field", "resume.seed"),
    ({"resume": {**GOOD, "seed": 2**63}}, "invalid_value", "resume.seed"),
    ({"resume": {**GOOD, "created": 1.5}}, "invalid_type", "resume.created"),
    ({"resume": {**GOOD, "created": -1}}, "invalid_value", "resume.created"),
    ({"resume": {**GOOD, "prompt_digest": None}}, "missing_field", "resume.prompt_digest"),
    ({"resume": {**GOOD, "prompt_digest": "ab"}}, "invalid_value", "resume.prompt_digest"),
    ({"resume": GOOD, "n": 2}, "unsupported_combination", "resume"),
    ({"resume": GOOD, "prompt": [[5], [6]]}, "unsupported_combination", "resume"),
)


@pytest.mark.parametrize(("fields", "code", "param"), BAD)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_is_wrong_is_named(folder: str, role: str, fields: dict[str, Any], code: str, param: str) -> None:
    service = FakeService(folder, plays([300]), role=role)
    answer = await post(service, {**BASE, **fields}, RESUME)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param)
    assert answer.headers["X-Longcat-Cause"] == "client" and not service.requests


@pytest.mark.parametrize("value", ["1", "IDS", "ids,resume", "resumed"])
async def test_another_header_is_malformed(folder: str, value: str) -> None:
    answer = await post(FakeService(folder, plays([300]), role="decode"), BASE, {"X-Longcat-Failover": value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Longcat-Failover")


async def test_ids_of_several_choices_are_not_told(folder: str) -> None:
    answer = await post(FakeService(folder, plays([300]), role="decode"), {**BASE, "n": 2}, IDS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_combination")


async def test_prefill_computes_the_prompt_with_the_ids_behind_it(folder: str) -> None:
    service = FakeService(folder, plays([300]), role="prefill")
    answer = await post(service, {**BASE, "seed": 5, "min_tokens": 3, "resume": GOOD}, RESUME)
    assert answer.status_code == 200 and answer.json()["prompt_tokens"] == len(PROMPT)
    (request,) = service.requests
    sampling = request.sampling
    assert request.prompt_token_ids == (*PROMPT, 300, 301) and request.said_token_ids == (300, 301)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed, sampling.num_said) == (14, 1, 77, 2)
    await post(service, {**BASE, "min_tokens": 1, "resume": {**GOOD, "token_ids": []}}, RESUME)
    sampling = service.requests[-1].sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.num_said) == (16, 1, 0)


async def test_a_whole_answer_with_logprobs_begins_anew(folder: str) -> None:
    """Those of the ids that were said are known to nobody any more. A stream has sent them."""
    service = FakeService(folder, plays([300]), role="prefill")
    for more, said in (({}, ()), ({"stream": True}, (300, 301))):
        await post(service, {**BASE, "logprobs": 0, **more, "resume": GOOD}, RESUME)
        assert service.requests[-1].said_token_ids == said and service.requests[-1].sampling.seed == 77


async def test_prefill_refuses_another_prompt_and_ids_behind_which_nothing_comes(folder: str) -> None:
    service = FakeService(folder, plays([300]), role="prefill")
    answer = await post(service, {**BASE, "prompt": [5, 6], "resume": GOOD}, RESUME)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_unavailable")
    assert DIGEST in answer.json()["error"]["message"]
    answer = await post(service, {**BASE, "max_tokens": 2, "resume": GOOD}, RESUME)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "resume.token_ids")
    assert not service.requests


def continuing(folder: str, script: Any, said: tuple[int, ...] = (300, 301)) -> FakeService:
    service = FakeService(folder, script, role="decode")
    service.offered_prompt, service.offered_max_tokens = (*PROMPT, *said), 16 - len(said)
    return service


async def test_decode_sends_what_follows_and_counts_everything(folder: str) -> None:
    service, metrics = continuing(folder, says([302], [303])), Metrics(role="decode", instance="d0")
    fields = {**BASE, **STREAM, "resume": GOOD}
    events = read_plain((await post(service, fields, RESUME, metrics=metrics)).content)
    assert {event["created"] for event in events} == {12345} and not any("prompt_token_ids" in event for event in events)
    assert [i for event in events for choice in event["choices"] for i in choice["token_ids"]] == [302, 303]
    usage = events[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 4, 7)
    assert service.requests[0].sampling.num_said == 2
    assert metrics.requests.output_tokens_total._value.get() == 2, "what was drawn here"
    assert metrics.requests.prompt_tokens_total._value.get() == 3


async def test_not_more_of_the_prompt_is_cached_than_there_is(folder: str) -> None:
    service = continuing(folder, says([302]))
    script = service.script

    async def cached(request: Request) -> AsyncGenerator[Delta, None]:
        request.life.num_cached_tokens = 4  # the prompt and an id of the answer
        async for delta in script(request):
            yield delta

    service.script = cached
    usage = (await post(service, {**BASE, "resume": GOOD}, RESUME)).json()["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (3, 3)


@pytest.mark.parametrize("is_stream", [True, False])
async def test_an_answer_that_turns_out_to_be_finished_is_finished(
    folder: str, text: TextProcessor, is_stream: bool
) -> None:
    said = tuple(text.encode("so it stops here"))
    service = continuing(folder, says([400]), said)
    fields = {**BASE, "stop": ["stops"], **(STREAM if is_stream else {})}
    answer = await post(service, {**fields, "resume": {**GOOD, "token_ids": said}}, RESUME)
    assert answer.status_code == 200 and not service.requests, "nothing is generated"
    if not is_stream:
        choice = answer.json()["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == ("so it ", "stop", "stops")
        return
    last, usage = read_plain(answer.content)
    (choice,) = last["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"], choice["matched_stop"]) == (
        "",
        [],
        "stop",
        "stops",
    )
    assert usage["usage"]["completion_tokens"] <= len(said)


# ---- between the two


async def test_both_halves_go_on_behind_the_same_ids() -> None:
    async with pair() as p:
        leg = p.prefill_leg(num_said=2).send()
        await settle()
        p.close_lanes("t")
        assert await leg.ends() == [None, None]
        assert leg.tokens == [6, 7, 8]
        await p.assert_idle()


@pytest.mark.parametrize("offer_first", [True, False])
async def test_halves_that_do_not_agree_both_end(offer_first: bool) -> None:
    async with pair() as p:
        prefill, decode = p.prefill_leg(num_said=2), p.prefill_leg(num_said=1)
        if offer_first:
            prefill.send(d=False)
            await settle()
            decode.send(p=False)
        else:
            decode.send(p=False)
            await settle()
            prefill.send(d=False)
        (theirs,) = await prefill.ends()
        (ours,) = await decode.ends()
        assert isinstance(ours, TransferFailed) and "behind 2 ids of the answer, this leg behind 1" in ours.message
        assert isinstance(theirs, TransferFailed) and theirs.cause == "peer"
        await p.assert_idle()


# ---- the reader of an answer


def reader(text: TextProcessor) -> ChoiceText:
    return ChoiceText(0, text.decoder(), stops=StopFinder(["halt"]))


def test_what_was_sent_is_not_said_again(text: TextProcessor) -> None:
    """Neither the beginning, nor text, nor ids, not even those whose text is still held back; it comes when it may."""
    [token_id] = text.encode("h")[-1:]
    choice = reader(text)
    assert choice.replay([token_id], were_sent=True) == []
    pieces = choice.push(Delta(tuple(map(TokenOutput, text.encode("i there")))))
    assert [piece.delta for piece in pieces] == [{"content": "hi there"}]
    assert pieces[0].token_ids == tuple(text.encode("i there")) and pieces[0].ends_step
    assert pieces[0].num_tokens == 1 + len(text.encode("i there"))


def test_what_was_not_sent_is_said(text: TextProcessor) -> None:
    choice = reader(text)
    opening, piece = choice.replay(text.encode("so h"), were_sent=False)
    assert (opening.delta, piece.delta) == ({}, {"content": "so "})
    assert (opening.ends_step, piece.ends_step) == (False, True) and piece.token_ids == tuple(text.encode("so h"))


async def test_whether_reasoning_is_open_is_seen_from_the_prompt_proper(folder: str, text: TextProcessor) -> None:
    prompt, said = text.encode("x<longcat_think>\n"), text.encode("why")
    service = FakeService(folder, says(text.encode(" so\n</longcat_think>\nyes")), role="decode")
    service.offered_prompt, service.offered_max_tokens = (*prompt, *said), 90
    body = {"messages": [{"role": "user", "content": "x"}], "resume": {**GOOD, "token_ids": said}}
    message = (await post(service, body, RESUME)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("why so", "yes")
