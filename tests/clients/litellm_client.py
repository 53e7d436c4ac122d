"""`litellm`, as it comes."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, Literal

import litellm
from checks import Suite, joined, same, wait_until_idle
from pydantic import BaseModel

suite = Suite("litellm", version("litellm"))
USER = [{"role": "user", "content": "What is the plan?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "plan", "description": "Plans a journey.", "parameters": PARAMETERS}}
LONG = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}}


class Journey(BaseModel):
    """A journey."""

    city: Literal["Rome", "Oslo"]
    is_far: bool


def ask(s: SimpleNamespace, **more: Any) -> dict[str, Any]:
    common = {"api_base": f"{s.url}/v1", "api_key": s.key, "temperature": 0, "num_retries": 0, "max_retries": 0}
    return {**common, "model": f"openai/{s.model}", "messages": USER, **more}


@suite.check("completion: text, usage")
def completion(s: SimpleNamespace) -> None:
    for provider in ("openai", "hosted_vllm"):
        answer = litellm.completion(**ask(s, model=f"{provider}/{s.model}"))
        assert answer.choices[0].message.content.startswith(s.content), answer
        usage = answer.usage
        same((answer.choices[0].finish_reason, usage.total_tokens), ("stop", usage.prompt_tokens + usage.completion_tokens))


@suite.check("stream: equals the whole, usage")
def stream(s: SimpleNamespace) -> None:
    whole = litellm.completion(**ask(s))
    chunks = list(litellm.completion(**ask(s, stream=True, stream_options={"include_usage": True})))
    same(joined(c.choices[0].delta.content for c in chunks if c.choices), whole.choices[0].message.content)
    built = litellm.stream_chunk_builder(chunks, messages=USER)
    same(built.usage.completion_tokens, whole.usage.completion_tokens)


@suite.check("acompletion, eight at once")
def asynchronous(s: SimpleNamespace) -> None:
    async def run() -> set[str]:
        answers = await asyncio.gather(*(litellm.acompletion(**ask(s)) for _ in range(8)))
        return {answer.choices[0].message.content for answer in answers}

    same(len(asyncio.run(run())), 1)


@suite.check("reasoning_content, whole and streamed")
def reasoning(s: SimpleNamespace) -> None:
    more = {"extra_body": {"enable_thinking": True}}
    whole = litellm.completion(**ask(s, **more)).choices[0].message.reasoning_content
    assert whole.startswith(s.content), whole
    deltas = [c.choices[0].delta for c in litellm.completion(**ask(s, stream=True, **more))]
    same(joined(delta.get("reasoning_content") for delta in deltas), whole)


@suite.check("tools: auto, the result sent back, streamed")
def tools(s: SimpleNamespace) -> None:
    choice = litellm.completion(**ask(s, tools=[TOOL])).choices[0]
    (call,) = choice.message.tool_calls
    same((choice.finish_reason, call.function.name), ("tool_calls", s.call_name))
    same(json.loads(call.function.arguments), s.call_arguments)
    result = {"role": "tool", "tool_call_id": call.id, "name": "plan", "content": "By train."}
    litellm.completion(**ask(s, tools=[TOOL], messages=[*USER, choice.message, result]))
    chunks = list(litellm.completion(**ask(s, tools=[TOOL], stream=True)))
    (built,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    same((built.function.name, json.loads(built.function.arguments)), (s.call_name, s.call_arguments))


@suite.check("tools: required, by name")
def forced(s: SimpleNamespace) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "plan"}}):
        (call,) = (
            litellm.completion(**ask(s, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False))
            .choices[0]
            .message.tool_calls
        )
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo"), call


@suite.check("response_format: a pydantic model, json_object")
def structured(s: SimpleNamespace) -> None:
    answer = litellm.completion(**ask(s, response_format=Journey))
    Journey.model_validate_json(answer.choices[0].message.content)
    free = litellm.completion(
        **ask(s, response_format={"type": "json_object"}, temperature=1, seed=3, max_tokens=400)
    ).choices[0]
    if free.finish_reason == "stop":
        assert isinstance(json.loads(free.message.content), dict)


@suite.check("text_completion; logprobs")
def text_completion(s: SimpleNamespace) -> None:
    asked = ask(s, model=f"text-completion-openai/{s.model}", max_tokens=6)
    del asked["messages"]
    text = litellm.text_completion(**asked, prompt="the plan").choices[0].text
    same(joined(c.choices[0].text for c in litellm.text_completion(**asked, prompt="the plan", stream=True)), text)
    answer = litellm.completion(**ask(s, logprobs=True, top_logprobs=2))
    same(len(answer.choices[0].logprobs.content), answer.usage.completion_tokens)


@suite.check("exceptions are mapped to its own classes")
def exceptions(s: SimpleNamespace) -> str:
    wanted = (
        (litellm.BadRequestError, {"temperature": 3}),
        (litellm.AuthenticationError, {"api_key": "wrong"}),
        (litellm.NotFoundError, {"model": "openai/another"}),
        (litellm.Timeout, {"timeout": 0.4, **LONG}),
        (litellm.Timeout, {"extra_headers": {"X-Request-Timeout": "0.5"}, **LONG}),
        (litellm.InternalServerError, {"api_base": s.dead_url}),
        (litellm.ContextWindowExceededError, {"max_tokens": 10**6}),
    )
    got = {}
    for kind, more in wanted:
        try:
            litellm.completion(**ask(s, **more))
        except Exception as error:
            got[kind.__name__] = type(error).__name__
            continue
        raise AssertionError(f"no {kind.__name__}")
    wait_until_idle(s)
    wrong = {name: is_instead for name, is_instead in got.items() if name != is_instead}
    assert not wrong, wrong
    return ", ".join(got)


@suite.check("an error in the middle of a stream is raised")
def broken_stream(s: SimpleNamespace) -> str:
    seen: list[Any] = []
    try:
        seen.extend(litellm.completion(**ask(s, stream=True, extra_headers={"X-Request-Timeout": "1"}, **LONG)))
    except Exception as error:
        assert "deadline" in str(error) or "time" in str(error), error
        wait_until_idle(s)
        return type(error).__name__
    raise AssertionError(f"no error after {len(seen)} chunks")


if __name__ == "__main__":
    sys.exit(suite.run())
