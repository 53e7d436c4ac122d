"""Several choices of one body: which requests a list of prompts becomes, how they stand in line, what the answer tells."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from longcat_pd.engine.request import Delta, Request, TokenOutput
from longcat_pd.errors import LongcatError, Overloaded, WorkerUnavailable
from longcat_pd.server.face import Face
from longcat_pd.server.gate import Gate
from longcat_pd.server.openai import ChatBody
from longcat_pd.server.text import TextProcessor
from tests.unit.fake_service import EOS, LEG, TRANSFER, FakeService, events_of, folded, make_app, plays, write_folder

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPTS = ["once", [5, 6, 7], "upon a time"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_folder(tmp_path_factory.mktemp("model"))


async def says_who(request: Request) -> AsyncGenerator[Delta, None]:
    """The choice, the last id of the prompt, as many tokens as both come to, and EOS."""
    last = request.prompt_token_ids[-1]
    ids = [300 + request.sampling.choice, 400 + last % 100, *[500] * (1 + request.sampling.choice), EOS]
    async for delta in plays(ids)(request):
        yield delta


def client_of(service: FakeService) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(make_app(service)), base_url="http://face")


async def ask(service: FakeService, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    route = CHAT if "messages" in fields else COMPLETIONS
    async with client_of(service) as client:
        return await client.post(route, json={"return_token_ids": True, **fields}, headers=headers)


async def test_a_list_of_prompts_is_the_answers_to_each(folder: str) -> None:
    service = FakeService(folder, says_who)
    whole = (await ask(service, prompt=PROMPTS, n=2, seed=9, logprobs=1)).json()
    assert [request.sampling.choice for request in service.requests] == [0, 1] * 3, (
        "choice i of any prompt draws as choice i"
    )
    assert {request.sampling.seed for request in service.requests} == {9}
    assert "prompt_token_ids" not in whole
    usages = []
    for p, prompt in enumerate(PROMPTS):
        alone = (await ask(FakeService(folder, says_who), prompt=prompt, n=2, seed=9, logprobs=1)).json()
        ids = alone.pop("prompt_token_ids")
        for i in (0, 1):
            told = whole["choices"][2 * p + i]
            assert told == {**alone["choices"][i], "index": 2 * p + i, "prompt_token_ids": ids}
        usages.append(alone["usage"])
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert whole["usage"][name] == sum(usage[name] for usage in usages)
    assert usages[0]["prompt_tokens"] == len(service.requests[0].prompt_token_ids), "once, though it has two choices"


async def test_a_stream_of_a_list_of_prompts_is_the_whole_answer(folder: str) -> None:
    fields = {"prompt": PROMPTS, "n": 3, "seed": 4, "logprobs": 2}
    whole = (await ask(FakeService(folder, says_who), **fields)).json()
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, done = events_of((await ask(FakeService(folder, says_who), **fields, **options)).content)
    assert done == "[DONE]" and chunks[-1]["usage"] == whole["usage"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks)
    texts = folded(chunks)
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert [token for part in mine for token in part["token_ids"]] == choice["token_ids"]
        assert texts[choice["index"]]["content"] == choice["text"]
        assert [part.get("prompt_token_ids") for part in mine] == [choice["prompt_token_ids"]] + [None] * (len(mine) - 1)
        for name, values in choice["logprobs"].items():
            assert [v for part in mine if part["logprobs"] for v in part["logprobs"][name]] == values
    totals = [chunk["usage"] for chunk in chunks]
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in totals)
    for name in ("prompt_tokens", "completion_tokens"):
        assert [u[name] for u in totals] == sorted(u[name] for u in totals)


@pytest.mark.parametrize("prompt", [["once"], [[5, 6, 7]]])
async def test_a_list_of_one_prompt_has_the_form_of_that_prompt(folder: str, prompt: list[Any]) -> None:
    answers = [
        (await ask(FakeService(folder, says_who), {"X-Request-Id": "r"}, prompt=p)).json() for p in (prompt, prompt[0])
    ]
    assert "prompt_token_ids" in answers[0]
    assert [{**answer, "created": 0} for answer in answers] == [{**answers[0], "created": 0}] * 2


ERRORS = [
    (["a", "b", "c", ""], "invalid_value", "prompt[3]"),
    (["a", [5, 1024]], "invalid_value", "prompt[1][1]"),
    ([[5], [6] * 505, "a"], "context_length_exceeded", "prompt[1]"),
]


@pytest.mark.parametrize(("prompt", "code", "param"), ERRORS)
async def test_an_error_names_the_prompt_and_nothing_is_asked(folder: str, prompt: Any, code: str, param: str) -> None:
    service = FakeService(folder, says_who)
    answer = await ask(service, prompt=prompt)
    assert (answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["param"]) == (400, code, param)
    assert service.requests == []


async def test_without_a_tokenizer_a_list_may_hold_ids_only(tmp_path: Path) -> None:
    service = FakeService(write_folder(tmp_path / "m", has_tokenizer=False), says_who)
    assert (await ask(service, prompt=[[5], [6, 7]])).status_code == 200
    error = (await ask(service, prompt=[[5], "a"])).json()["error"]
    assert (error["code"], error["param"]) == ("tokenizer_missing", "prompt[1]")


async def test_every_choice_has_a_hand_over_of_its_own(folder: str) -> None:
    transfers = [f"{TRANSFER}.{i}" for i in range(6)]
    service = FakeService(folder, says_who, role="decode")
    answer = (await ask(service, LEG, prompt=PROMPTS, n=2, priority=7)).json()
    assert [t.id for t in service.adopted] == transfers
    assert [(r.transfer.id if r.transfer else "", r.priority) for r in service.requests] == [(t, 7) for t in transfers]
    assert [request.sampling.choice for request in service.requests] == [0, 1] * 3
    assert answer["usage"]["prompt_tokens"] == 3 * len(service.offered_prompt)

    async def hands_over(_: Request) -> AsyncGenerator[Delta, None]:
        yield Delta(())

    prefill = FakeService(folder, hands_over, role="prefill")
    told = (await ask(prefill, LEG, prompt=PROMPTS, n=2, priority=-7)).json()
    assert [(r.transfer.id if r.transfer else "", r.priority) for r in prefill.requests] == [(t, -7) for t in transfers]
    lengths = [len(request.prompt_token_ids) for request in prefill.requests]
    assert lengths[::2] == lengths[1::2] and told["prompt_tokens"] == sum(lengths[::2])


class Narrow(FakeService):
    """Has room for a request only when told so."""

    def __init__(self, folder: str, *, fails_at: int | None = None) -> None:
        super().__init__(folder, plays([EOS]))
        self.doors: list[asyncio.Event] = []
        self.fails_at = fails_at

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        self.num_running += 1
        try:
            self.doors.append(asyncio.Event())
            if len(self.doors) - 1 == self.fails_at:
                raise Overloaded("full")
            await self.doors[-1].wait()
            request.on_room()
            yield Delta((TokenOutput(300),))
            await asyncio.Event().wait()
        finally:
            self.num_running -= 1


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_body_stands_in_line_once_and_many_bodies_take_turns(folder: str) -> None:
    service = Narrow(folder)
    tasks = [asyncio.create_task(ask(service, prompt=[[7]] * 8, n=n)) for n in (8, 1)]
    await settled()
    assert len(service.doors) == 2, "one of each body"
    for opened in range(5):
        service.doors[opened].set()
        await settled()
        assert len(service.doors) == 3 + opened, "who has room lets the next of its body stand in line"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert service.num_running == 0


async def test_one_that_is_refused_fails_all_of_them(folder: str) -> None:
    service = Narrow(folder, fails_at=2)
    task = asyncio.create_task(ask(service, prompt=[[7]] * 8, stream=True))
    for opened in range(2):
        await settled()
        service.doors[opened].set()
    answer = await task
    assert b"overloaded" in answer.content and b"[DONE]" not in answer.content
    assert len(service.doors) == 3 and service.num_running == 0


@pytest.mark.parametrize("end", ["deadline", "cut"])
async def test_what_ends_a_request_is_heard_while_a_grammar_is_made(folder: str, end: str) -> None:
    go_on, gate = threading.Event(), Gate()
    text, service = TextProcessor.load(folder), FakeService(folder, says_who)
    face = Face(service, text, gate=gate, check_grammar=lambda _: "" if go_on.wait(60) else "late")
    fields = {"prompt": "once", "response_format": {"type": "json_object"}}
    bodies = [face.read(COMPLETIONS, dict(fields)) for _ in range(2)]
    asking = [
        asyncio.ensure_future(face.answer(body, face.call(f"r{i}", 0.2 if end == "deadline" else 60)))
        for i, body in enumerate(bodies)  # one in its turn and one behind it
    ]
    try:
        if end == "cut":
            await settled()
            assert gate.cut(WorkerUnavailable("over", code="draining")) == 2
        done, waiting = await asyncio.wait(asking, timeout=30)
        assert not waiting and not go_on.is_set() and gate.num_open == 0
        wanted = {"deadline": "deadline_exceeded", "cut": "draining"}[end]
        assert [error.code for error in (one.exception() for one in done) if isinstance(error, LongcatError)] == [
            wanted
        ] * 2
    finally:
        go_on.set()
    assert not service.requests


async def test_whoever_leaves_while_a_grammar_is_made_leaves_its_thread_its_turn(folder: str) -> None:
    """Or many that leave would fill the threads, which encode prompts too."""
    go_on, text, service = threading.Event(), TextProcessor.load(folder), FakeService(folder, says_who)
    making: list[str] = []

    def check(grammar: str) -> str:
        making.append(grammar)
        return "" if go_on.wait(60) else "late"

    face = Face(service, text, check_grammar=check)
    body = face.read(COMPLETIONS, {"prompt": "once", "response_format": {"type": "json_object"}})
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(2) as threads:
        loop.set_default_executor(threads)
        try:
            for _ in range(4):
                asking = asyncio.ensure_future(face.answer(body, face.call("r", 60)))
                await asyncio.wait([asking], timeout=0.1)
                asking.cancel()
                await asyncio.wait([asking], timeout=30)
            assert len(making) == 1
            assert len(await asyncio.wait_for(face.encoded.encode_text("x" * 5000), 30)) > 0
        finally:
            go_on.set()
        assert (await asyncio.wait_for(face.answer(body, face.call("r", 60)), 60))["choices"]
    assert len(making) == 2


BIG = "x " * 5000
CALLS = [{"id": "a", "function": {"name": "f", "arguments": json.dumps({"x": BIG})}}]
ANSWERED = {"role": "tool", "tool_call_id": "a", "content": "ok"}
HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "fields,is_long",
    [
        ({"messages": [HI, HI]}, False),
        ({"messages": [{"role": "user", "content": BIG}]}, True),
        ({"messages": [{"role": "assistant", "content": "a", "reasoning_content": BIG}, HI]}, True),
        ({"messages": [{"role": "assistant", "tool_calls": CALLS}, ANSWERED]}, True),
        ({"messages": [HI], "tools": [{"type": "function", "function": {"name": "f", "description": BIG}}]}, True),
        ({"messages": [HI], "tools": [{"type": "function", "function": {"name": "f", "parameters": {BIG: [1]}}}]}, True),
        ({"messages": [{"role": "user", "content": ""}] * 3000}, True),
        ({"messages": [HI], "chat_template_kwargs": {"x": [[]] * 3000}}, True),
    ],
    ids=["short", "content", "reasoning", "arguments", "description", "parameters", "messages", "kwargs"],
)
async def test_whatever_is_long_in_a_conversation_is_encoded_in_a_thread(
    folder: str, fields: dict[str, Any], is_long: bool
) -> None:
    face = Face(FakeService(folder, says_who), TextProcessor.load(folder))
    threads = []
    encoded = face.encoded
    encoded._text = EncodesNothing(threads)  # type: ignore[assignment]
    body = face.read(CHAT, fields)
    assert isinstance(body, ChatBody)
    await encoded.encode_chat(body)
    assert [thread is not threading.main_thread() for thread in threads] == [is_long]


class EncodesNothing:
    """Notes who asks."""

    def __init__(self, threads: list[threading.Thread]) -> None:
        self._threads = threads

    def encode_chat(self, *_: Any) -> list[int]:
        self._threads.append(threading.current_thread())
        return [1]
