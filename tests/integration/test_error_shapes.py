"""Every status of the error table, before a stream and inside one: as the OpenAPI document has it, and as the SDK reads it.

Failures of the kinds 4 and 33. The balancer's process over real sockets; what its workers say is scripted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from itertools import product
from typing import Any

import openai
import pytest

from longcat_pd.errors import LongcatError, RequestError, ServiceError
from longcat_pd.server.errors import error_headers, error_object, to_json
from tests.balancer_rig import BODY, CHAT, DONE, chunk
from tests.contract import Contract
from tests.integration.test_balancer_process import Site, Worker
from tests.integration.test_balancer_process import site as make_site

ALL = sorted({*RequestError.__subclasses__(), *ServiceError.__subclasses__()}, key=lambda kind: kind.__name__)
OF_THE_CALL = {"missing_api_key", "invalid_api_key", "unknown_route", "method_not_allowed"}  # the balancer's own fault
EXCEPTIONS = {
    400: openai.BadRequestError,
    401: openai.AuthenticationError,
    404: openai.NotFoundError,
    429: openai.RateLimitError,
    **dict.fromkeys((500, 502, 503, 504), openai.InternalServerError),
}
STREAMED = {**BODY, "stream": True}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
DETAILS = {"prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0}}


def errors() -> Iterator[LongcatError]:
    """One of each code."""
    for kind in ALL:
        for code in kind.codes:
            yield kind("it is so") if len(kind.codes) == 1 else kind("it is so", code=code)


def first_chunk() -> bytes:
    """As a worker makes it."""
    value = json.loads(chunk("a").removeprefix(b"data: "))
    value["choices"][0]["delta"] = {"role": "assistant", "content": ""}
    value["choices"][0]["logprobs"] = None
    value |= {"system_fingerprint": "fp_00000000", "object": "chat.completion.chunk"}
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def head(status: int, length: int, kind: str, **headers: str) -> bytes:
    told = {"content-type": kind, "content-length": str(length), **headers}
    return f"HTTP/1.1 {status} X\r\n".encode() + "".join(f"{k}: {v}\r\n" for k, v in told.items()).encode() + b"\r\n"


def refusal(error: LongcatError) -> bytes:
    body = to_json(error_object(error, "r"))
    return head(error.status, len(body), "application/json", **error_headers(error, is_worker=True)) + body


def broken_stream(error: LongcatError) -> bytes:
    body = first_chunk() + b"data: " + to_json(error_object(error, "r")) + b"\n\n"
    return head(200, len(body), "text/event-stream") + body


site = make_site


@pytest.fixture
async def said(site: Site, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[dict[str, bytes]]:
    """What workers answer to a call to generate, by name; those that are not in it answer well."""
    told: dict[str, bytes] = {}
    leg = Worker._leg

    async def scripted(
        self: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_stream: bool
    ) -> None:
        if self.name in told:
            writer.write(told[self.name])
        else:
            await leg(self, reader, writer, is_stream=is_stream)

    monkeypatch.setattr(Worker, "_leg", scripted)
    yield told
    assert await site.idle()


def expected(error: LongcatError) -> tuple[int, str]:
    return (502, "bad_worker_answer") if error.code in OF_THE_CALL else (error.status, error.code)


async def test_every_error_before_the_first_byte(site: Site, said: dict[str, bytes]) -> None:
    contract, seen = Contract(), set()
    async with openai.AsyncOpenAI(base_url=f"{site.balancer.url}/v1", api_key="x", max_retries=0) as sdk:
        for error, at, body in product(list(errors()), ("p0", "d0"), (BODY, STREAMED)):
            if error.status in (405, 413, 415) and error.code not in OF_THE_CALL:
                continue  # of the face alone: the balancer has checked the envelope
            said.clear()
            said[at] = refusal(error)
            site.p0.act = site.d0.act = "hang"
            status, code = expected(error)
            answer = await site.client.post(CHAT, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), (error.code, at)
            contract.check("POST", CHAT, status=status, headers=answer.headers, content=answer.content)
            assert answer.headers.get("x-should-retry") == should_retry(status, code), error.code
            with pytest.raises(openai.APIStatusError) as caught:
                await sdk.chat.completions.create(model="", **body)  # type: ignore[call-overload]
            assert type(caught.value) is EXCEPTIONS[status], error.code
            assert (caught.value.status_code, caught.value.code) == (status, code)
            assert caught.value.request_id
            seen.add(status)
    assert seen == {400, 404, 429, 500, 502, 503, 504}


def should_retry(status: int, code: str) -> str | None:
    """The table of errors in docs/api.md."""
    if status < 429:
        return None
    return "false" if code in ("engine_fault", "deadline_exceeded") else "true"


async def test_every_error_inside_a_stream(site: Site, said: dict[str, bytes]) -> None:
    contract, seen = Contract(), set()
    async with openai.AsyncOpenAI(base_url=f"{site.balancer.url}/v1", api_key="x", max_retries=0) as sdk:
        for error in errors():
            if not isinstance(error, ServiceError):
                continue  # a client's fault is found before the first token
            said["d0"] = broken_stream(error)
            answer = await site.client.post(CHAT, json=STREAMED)
            assert answer.status_code == 200 and DONE not in answer.content
            last = json.loads(answer.text.split("\n\n")[-2].removeprefix("data: "))["error"]
            assert (last["code"], last["type"]) == (error.code, "server_error")
            contract.check("POST", CHAT, status=200, headers=answer.headers, content=answer.content)
            texts = []
            with pytest.raises(openai.APIError) as caught:
                async for event in await sdk.chat.completions.create(model="", **STREAMED):  # type: ignore[call-overload]
                    texts.append(event.choices[0].delta.content)
            assert texts == [""] and caught.value.code == error.code
            seen.add(error.code)
    assert len(seen) == sum(len(kind.codes) for kind in ServiceError.__subclasses__())


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_every_body_that_does_not_fit_is_a_status_also_where_a_stream_was_wanted(site: Site, path: str) -> None:
    """And what is refused is refused at once."""
    wrong: tuple[dict[str, Any], ...] = (
        {"temperature": 9},
        {"max_tokens": 0},
        {"n": 99},
        {"stop": [""]},
        {"model": "another"},
        {"stream_options": {"include_usage": 1}},
    )
    asked = BODY if path == CHAT else {"prompt": [5, 6]}
    times = []
    for fields, is_streamed in product(wrong, (False, True)):
        answer = await site.client.post(path, json={**asked, **fields, "stream": is_streamed})
        times.append(answer.elapsed.total_seconds())
        assert answer.status_code in (400, 404) and answer.headers["content-type"] == "application/json"
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert not site.d0.has_leg.is_set() and not site.p0.has_leg.is_set()
    assert min(times) < 0.1
    if path == CHAT:
        assert (await site.client.post(CHAT, json=BODY)).status_code == 200
