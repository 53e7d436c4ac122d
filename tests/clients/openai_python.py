"""The `openai` Python client, as it comes."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any, Literal

import openai
from checks import Suite, admin, failed, joined, same, wait_until_idle
from pydantic import BaseModel

suite = Suite("openai (Python)", openai.__version__)
IS_OLD = int(openai.__version__.split(".")[0]) < 2  # its helpers are still under `beta`
USER = [{"role": "user", "content": "What is the plan?"}]
GREEDY = {"model": "", "messages": USER, "temperature": 0}
LONG = {"ignore_eos": True}
TOOL = {
    "type": "function",
    "function": {
        "name": "plan",
        "description": "Plans a journey.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
OTHER = {
    "type": "function",
    "function": {
        "name": "other",
        "parameters": {
            "type": "object",
            "properties": {"is_far": {"type": "boolean"}},
            "required": ["is_far"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "journey", "strict": True, "schema": SCHEMA}}


class Journey(BaseModel):
    """What `parse` makes of an answer."""

    city: Literal["Rome", "Oslo"]
    is_far: bool


def client_of(s: SimpleNamespace, **options: Any) -> openai.OpenAI:
    options = {"base_url": f"{s.url}/v1", "api_key": s.key, "max_retries": 0, "timeout": 60.0, **options}
    return openai.OpenAI(**options)


def helpers(client: openai.OpenAI) -> Any:
    return client.beta.chat.completions if IS_OLD else client.chat.completions


def counting(s: SimpleNamespace, **options: Any) -> tuple[openai.OpenAI, list[str]]:
    """A client, and the URLs of what it has sent."""
    sent: list[str] = []
    http = openai.DefaultHttpxClient(event_hooks={"request": [lambda request: sent.append(str(request.url))]})
    return client_of(s, http_client=http, **options), sent


@suite.check("models: list, retrieve")
def models(s: SimpleNamespace) -> None:
    client = client_of(s)
    same([model.id for model in client.models.list()], [s.model])
    same(client.models.retrieve(s.model).owned_by, "longcat")


@suite.check("chat: text, usage, ids")
def chat(s: SimpleNamespace) -> None:
    answer = client_of(s).chat.completions.create(**GREEDY)
    choice = answer.choices[0]
    assert choice.message.content.startswith(s.content), choice
    same((choice.message.role, choice.finish_reason, choice.message.tool_calls), ("assistant", "stop", None))
    usage = answer.usage
    same(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
    assert usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens
    same(usage.completion_tokens_details.reasoning_tokens, 0)
    assert answer.id.startswith("chatcmpl-") and answer.system_fingerprint.startswith("fp_") and answer._request_id


@suite.check("chat: roles, parts, fields without effect")
def fields(s: SimpleNamespace) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "the plan?"}],
            "name": "ann",
        },
        {"role": "assistant", "content": "Which?"},
        *USER,
    ]
    answer = client_of(s).chat.completions.create(
        model=s.model, messages=messages, temperature=0, max_completion_tokens=3, top_p=0.9, seed=7, n=1, tools=[],
        presence_penalty=0.0, frequency_penalty=0.0, user="ann", metadata={"a": "b"}, store=False, service_tier="auto",
        parallel_tool_calls=True, extra_headers={"X-Request-Id": "mine"},
    )  # fmt: skip
    same((answer.choices[0].finish_reason, answer.usage.completion_tokens, answer.id), ("length", 3, "chatcmpl-mine"))


@suite.check("stream: equals the whole, usage, order")
def stream(s: SimpleNamespace) -> None:
    client = client_of(s)
    whole = client.chat.completions.create(**GREEDY)
    chunks = list(client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    same(chunks[0].choices[0].delta.role, "assistant")
    same(joined(c.choices[0].delta.content for c in chunks if c.choices), whole.choices[0].message.content)
    same([c.choices[0].finish_reason for c in chunks if c.choices][-1], "stop")
    same((chunks[-1].choices, chunks[-1].usage.completion_tokens), ([], whole.usage.completion_tokens))
    same({c.usage for c in chunks[:-1]}, {None})
    same(len({(c.id, c.created, c.model, c.system_fingerprint) for c in chunks}), 1)


@suite.check("stream: without usage; left in the middle")
def left(s: SimpleNamespace) -> None:
    client = client_of(s)
    assert not any(chunk.usage for chunk in client.chat.completions.create(**GREEDY, stream=True))
    running = client.chat.completions.create(**GREEDY, stream=True, max_tokens=2000, extra_body=LONG)
    for _, chunk in zip(range(5), running, strict=False):
        same(chunk.object, "chat.completion.chunk")
    running.close()
    wait_until_idle(s)


@suite.check("stream helper: events and final message")
def stream_helper(s: SimpleNamespace) -> None:
    whole = client_of(s).chat.completions.create(**GREEDY).choices[0].message.content
    with helpers(client_of(s)).stream(**GREEDY, stream_options={"include_usage": True}) as running:
        texts = [event.delta for event in running if event.type == "content.delta"]
        final = running.get_final_completion()
    same((joined(texts), final.choices[0].message.content), (whole, whole))
    assert final.usage.completion_tokens > 0


@suite.check("with_raw_response, with_streaming_response")
def raw(s: SimpleNamespace) -> None:
    client = client_of(s)
    answer = client.chat.completions.with_raw_response.create(**GREEDY)
    assert answer.headers["x-request-id"] and answer.parse().choices[0].message.content.startswith(s.content)
    with client.chat.completions.with_streaming_response.create(**GREEDY, stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        same([line for line in response.iter_lines() if line][-1], "data: [DONE]")


@suite.check("reasoning: extra_body and reasoning_effort")
def reasoning(s: SimpleNamespace) -> None:
    client = client_of(s)
    for more in ({"extra_body": {"enable_thinking": True}}, {"reasoning_effort": "high"}):
        answer = client.chat.completions.create(**GREEDY, **more)
        message = answer.choices[0].message
        assert message.reasoning_content.startswith(s.content), message
        same(message.content, "")
        assert answer.usage.completion_tokens_details.reasoning_tokens > 0
        chunks = list(client.chat.completions.create(**GREEDY, **more, stream=True))
        deltas = [c.choices[0].delta.model_dump().get("reasoning_content") for c in chunks]
        same(joined(deltas), message.reasoning_content)


def _check_call(call: Any, s: SimpleNamespace) -> None:
    same((call.type, call.function.name, json.loads(call.function.arguments)), ("function", s.call_name, s.call_arguments))
    assert call.id.startswith("call_")


@suite.check("tools, auto: a call, and its result sent back")
def tools_auto(s: SimpleNamespace) -> None:
    client = client_of(s)
    answer = client.chat.completions.create(**GREEDY, tools=[TOOL, OTHER])
    message = answer.choices[0].message
    same((answer.choices[0].finish_reason, message.content), ("tool_calls", s.content))
    _check_call(message.tool_calls[0], s)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "By train."}
    again = client.chat.completions.create(
        **{**GREEDY, "messages": [*USER, message, result]}, tools=[TOOL, OTHER], tool_choice="auto"
    )
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


@suite.check("tools, auto, streamed: deltas and helper")
def tools_stream(s: SimpleNamespace) -> None:
    client = client_of(s)
    deltas = [c.choices[0].delta for c in client.chat.completions.create(**GREEDY, tools=[TOOL], stream=True)]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    same({call.index for call in calls}, {0})
    same((calls[0].function.name, [call.function.name for call in calls[1:]]), (s.call_name, [None] * (len(calls) - 1)))
    same(json.loads(joined(call.function.arguments for call in calls)), s.call_arguments)
    same(joined(delta.content for delta in deltas), s.content)
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    with helpers(client).stream(**GREEDY, tools=[strict]) as running:
        kinds = {event.type for event in running}
        final = running.get_final_completion().choices[0].message.tool_calls[0]
    assert "tool_calls.function.arguments.done" in kinds, kinds
    same((final.function.name, final.function.parsed_arguments), (s.call_name, s.call_arguments))


@suite.check("tools, none: the markup is content")
def tools_none(s: SimpleNamespace) -> None:
    message = client_of(s).chat.completions.create(**GREEDY, tools=[TOOL], tool_choice="none").choices[0].message
    same(message.tool_calls, None)
    assert "<longcat_tool_call>" in message.content


@suite.check("tools, required and named, whole and streamed")
def tools_forced(s: SimpleNamespace) -> None:
    client = client_of(s)
    named = {"type": "function", "function": {"name": "other"}}
    for choice, names in (("required", {"plan", "other"}), (named, {"other"})):
        asked = {**GREEDY, "tools": [TOOL, OTHER], "tool_choice": choice, "parallel_tool_calls": False}
        choices = client.chat.completions.create(**asked).choices
        call = choices[0].message.tool_calls[0]
        assert call.function.name in names, call
        wanted = OTHER if call.function.name == "other" else TOOL
        same(set(json.loads(call.function.arguments)), set(wanted["function"]["parameters"]["required"]))
        streamed = [c.choices[0] for c in client.chat.completions.create(**asked, stream=True)]
        calls = [part for c in streamed for part in c.delta.tool_calls or []]
        same((calls[0].function.name, streamed[-1].finish_reason), (call.function.name, choices[0].finish_reason))
        same(joined(part.function.arguments for part in calls), call.function.arguments)


@suite.check("response_format: json_object, json_schema")
def json_answers(s: SimpleNamespace) -> None:
    client = client_of(s)
    shown = client.chat.completions.create(**GREEDY, response_format=JSON_SCHEMA).choices[0]
    value = json.loads(shown.message.content)
    assert value["city"] in ("Rome", "Oslo") and 1 <= value["days"] <= 9, value
    chunks = list(client.chat.completions.create(**GREEDY, response_format=JSON_SCHEMA, stream=True))
    same(joined(c.choices[0].delta.content for c in chunks), shown.message.content)
    hot = {**GREEDY, "temperature": 1, "seed": 3, "max_tokens": 400}
    free = client.chat.completions.create(**hot, response_format={"type": "json_object"}).choices[0]
    if free.finish_reason == "stop":
        assert isinstance(json.loads(free.message.content), dict)
    text = client.chat.completions.create(**GREEDY, response_format={"type": "text"}).choices[0]
    assert text.message.content.startswith(s.content)


@suite.check("parse(): a pydantic model, streamed too; cut short, LengthFinishReasonError")
def parse(s: SimpleNamespace) -> None:
    client = client_of(s)
    message = helpers(client).parse(**GREEDY, response_format=Journey).choices[0].message
    assert isinstance(message.parsed, Journey) and message.refusal is None, message
    with helpers(client).stream(**GREEDY, response_format=Journey) as running:
        for _ in running:
            pass
        same(running.get_final_completion().choices[0].message.parsed, message.parsed)
    call = lambda: helpers(client).parse(**GREEDY, response_format=Journey, max_tokens=2)  # noqa: E731
    failed(openai.LengthFinishReasonError, call)


@suite.check("parse(): a pydantic tool")
def parse_tool(s: SimpleNamespace) -> None:
    tool = openai.pydantic_function_tool(Journey)
    named = {"type": "function", "function": {"name": "Journey"}}
    message = helpers(client_of(s)).parse(**GREEDY, tools=[tool], tool_choice=named).choices[0].message
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Journey), message


@suite.check("a schema keyword that cannot be enforced is refused and named")
def keyword(s: SimpleNamespace) -> None:
    schema = {**SCHEMA, "unevaluatedProperties": False, "dependentSchemas": {"city": {"minProperties": 2}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "journey", "schema": schema}}
    error = failed(openai.BadRequestError, lambda: client_of(s).chat.completions.create(**GREEDY, response_format=wanted))
    assert "unevaluatedProperties" in str(error) or "dependentSchemas" in str(error), error


@suite.check("logprobs: chat")
def logprobs(s: SimpleNamespace) -> None:
    client = client_of(s)
    answer = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    same(len(entries), answer.usage.completion_tokens)
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 3 for entry in entries)
    same(bytes(entries[0].bytes).decode(), entries[0].token)
    chunks = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3, stream=True)
    streamed = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    same(streamed, entries)


@suite.check("sampling: seed, n, stop, logit_bias")
def sampling(s: SimpleNamespace) -> None:
    client = client_of(s)
    drawn = {"model": "", "messages": USER, "temperature": 1.5, "seed": 5, "max_tokens": 8}
    one, three = client.chat.completions.create(**drawn), client.chat.completions.create(**drawn, n=3)
    same([choice.index for choice in three.choices], [0, 1, 2])
    same(three.choices[0].message.content, one.choices[0].message.content)
    stopped = client.chat.completions.create(**GREEDY, stop=["K"]).choices[0]
    same((stopped.message.content, stopped.finish_reason), (s.content.split("K")[0], "stop"))
    banned = client.chat.completions.create(**GREEDY, logit_bias={"50": -100}, max_tokens=2)
    same(banned.usage.completion_tokens, 2)


@suite.check("completions: text, ids, log-probs, stream")
def completions(s: SimpleNamespace) -> None:
    client = client_of(s)
    text = client.completions.create(model="", prompt="the plan", temperature=0, max_tokens=6, logprobs=2)
    shown = text.choices[0]
    same((len(shown.logprobs.tokens), len(shown.logprobs.top_logprobs), text.object), (6, 6, "text_completion"))
    ids = client.completions.create(model="", prompt=[40, 41, 42], temperature=0, max_tokens=6)
    same(ids.usage.prompt_tokens, 3)
    chunks = client.completions.create(model="", prompt="the plan", temperature=0, max_tokens=6, stream=True)
    same(joined(c.choices[0].text for c in chunks), shown.text)


@suite.check("completions: a list of prompts")
def prompts(s: SimpleNamespace) -> None:
    client = client_of(s)
    asked = {"model": "", "temperature": 0, "max_tokens": 5}
    texts = [client.completions.create(**asked, prompt=prompt).choices[0].text for prompt in ("one", "two")]
    both = client.completions.create(**asked, prompt=["one", "two"], n=2)
    same([(choice.index, choice.text) for choice in both.choices], list(enumerate([texts[0]] * 2 + [texts[1]] * 2)))


@suite.check("400 BadRequestError: code, param, message")
def bad_request(s: SimpleNamespace) -> None:
    client = client_of(s)
    wrong = {
        "temperature": ({"temperature": 3}, "invalid_value"),
        "max_tokens": ({"max_tokens": "7"}, "invalid_type"),
        "messages": ({"messages": []}, "invalid_value"),
        "prediction": ({"prediction": {"type": "content", "content": "x"}}, "unsupported_parameter"),
    }
    for param, (more, code) in wrong.items():
        error = failed(openai.BadRequestError, lambda more=more: client.chat.completions.create(**{**GREEDY, **more}))
        same((error.status_code, error.code, error.param, error.type), (400, code, param, "invalid_request_error"))
        assert error.request_id and error.body["message"] in str(error)
    error = failed(openai.BadRequestError, lambda: client.chat.completions.create(**GREEDY, max_tokens=10**6))
    same(error.code, "context_length_exceeded")
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    error = failed(openai.BadRequestError, lambda: client.chat.completions.create(**{**GREEDY, "messages": [picture]}))
    same((error.code, error.param), ("unsupported_content_part", "messages[0].content[0].type"))


@suite.check("401 AuthenticationError, 404 NotFoundError")
def refused(s: SimpleNamespace) -> None:
    error = failed(openai.AuthenticationError, lambda: client_of(s, api_key="wrong").models.list())
    same(error.code, "invalid_api_key")
    client = client_of(s)
    for call in (
        lambda: client.models.retrieve("another"),
        lambda: client.chat.completions.create(**{**GREEDY, "model": "another"}),
    ):
        same(failed(openai.NotFoundError, call).code, "model_not_found")
    call = lambda: client.embeddings.create(model="", input="x")  # noqa: E731
    same(failed(openai.NotFoundError, call).code, "unknown_route")


@suite.check("413 APIStatusError: a body that is too large")
def too_large(s: SimpleNamespace) -> None:
    client, sent = counting(s, max_retries=2)
    large = {**GREEDY, "messages": [{"role": "user", "content": "x" * 40_000_000}]}
    error = failed(openai.APIStatusError, lambda: client.chat.completions.create(**large))
    same((error.status_code, error.code, len(sent)), (413, "body_too_large", 1))


@suite.check("504 InternalServerError, not repeated")
def deadline(s: SimpleNamespace) -> None:
    client, sent = counting(s, max_retries=2)
    late = {"max_tokens": 3000, "extra_body": LONG, "extra_headers": {"X-Request-Timeout": "0.5"}}
    error = failed(openai.InternalServerError, lambda: client.chat.completions.create(**GREEDY, **late))
    same((error.status_code, error.code, len(sent)), (504, "deadline_exceeded", 1))
    wait_until_idle(s)


@suite.check("an error in the middle of a stream: APIError")
def broken_stream(s: SimpleNamespace) -> None:
    late = {"max_tokens": 3000, "stream": True, "extra_body": LONG, "extra_headers": {"X-Request-Timeout": "1"}}
    seen = []
    error = failed(openai.APIError, lambda: seen.extend(client_of(s).chat.completions.create(**GREEDY, **late)))
    assert len(seen) > 1
    same((error.code, error.type), ("deadline_exceeded", "server_error"))
    wait_until_idle(s)


@suite.check("APITimeoutError, APIConnectionError")
def connection(s: SimpleNamespace) -> None:
    client = client_of(s, timeout=0.5)
    failed(openai.APITimeoutError, lambda: client.chat.completions.create(**GREEDY, max_tokens=3000, extra_body=LONG))
    wait_until_idle(s)
    dead = client_of(s, base_url=s.dead_url)
    failed(openai.APIConnectionError, lambda: dead.chat.completions.create(**GREEDY))


@suite.check("503 InternalServerError while draining; a retry lives through it")
def draining(s: SimpleNamespace) -> str:
    admin(s, "drain")
    try:
        error = failed(openai.InternalServerError, lambda: client_of(s).chat.completions.create(**GREEDY))
        same((error.status_code, error.code, error.response.headers["x-should-retry"]), (503, "draining", "true"))
        threading.Timer(1.0, admin, (s, "undrain")).start()
        client, sent = counting(s, max_retries=2)
        began = time.monotonic()
        assert client.chat.completions.create(**GREEDY).choices[0].message.content.startswith(s.content)
        same(len(sent), 2)
    finally:
        admin(s, "undrain")
    return f"second try after {time.monotonic() - began:.1f} s"


@suite.check("429 RateLimitError; a retry gets through")
def rate_limit(s: SimpleNamespace) -> str | None:
    with client_of(s, base_url=f"{s.narrow_url}/v1").chat.completions.create(
        **GREEDY, stream=True, max_tokens=3000, extra_body=LONG
    ) as running:
        next(iter(running))
        narrow = client_of(s, base_url=f"{s.narrow_url}/v1")
        error = failed(openai.RateLimitError, lambda: narrow.chat.completions.create(**GREEDY))
        same((error.code, error.response.headers["retry-after"]), ("too_many_requests", "1"))
        threading.Timer(0.3, running.close).start()
        patient, sent = counting(s, base_url=f"{s.narrow_url}/v1", max_retries=3)
        assert patient.chat.completions.create(**GREEDY).choices[0].message.content.startswith(s.content)
    assert len(sent) >= 2, sent
    return f"{len(sent)} tries"


@suite.check("AsyncOpenAI: chat, stream, sixteen at once, cancelled")
def asynchronous(s: SimpleNamespace) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key=s.key, max_retries=0) as client:
            whole = (await client.chat.completions.create(**GREEDY)).choices[0].message.content
            running = await client.chat.completions.create(**GREEDY, stream=True)
            same(joined([chunk.choices[0].delta.content async for chunk in running]), whole)
            many = await asyncio.gather(*(client.chat.completions.create(**GREEDY) for _ in range(16)))
            same({answer.choices[0].message.content for answer in many}, {whole})
            with_error = client.chat.completions.create(**{**GREEDY, "temperature": 9})
            try:
                await with_error
            except openai.BadRequestError as error:
                same(error.param, "temperature")
            else:
                raise AssertionError("no BadRequestError")
            task = asyncio.create_task(client.chat.completions.create(**GREEDY, max_tokens=3000, extra_body=LONG))
            await asyncio.sleep(0.3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    wait_until_idle(s)


if __name__ == "__main__":
    sys.exit(suite.run())
