"""`langchain-openai`, as it comes."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, Literal

import openai
from checks import Suite, joined, same, wait_until_idle
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

suite = Suite("langchain-openai", version("langchain-openai"))
USER = [SystemMessage("Be brief."), HumanMessage("What is the plan?")]


@tool
def plan(city: Literal["Rome", "Oslo"]) -> str:
    """Plans a journey."""
    return f"By train to {city}."


class Journey(BaseModel):
    """A journey."""

    city: Literal["Rome", "Oslo"] = Field(description="where to")
    is_far: bool


def chat(s: SimpleNamespace, **options: Any) -> ChatOpenAI:
    options = {"base_url": f"{s.url}/v1", "api_key": s.key, "model": s.model, "temperature": 0, "max_retries": 0, **options}
    return ChatOpenAI(**options)


@suite.check("invoke: text, usage, metadata")
def invoke(s: SimpleNamespace) -> None:
    answer = chat(s).invoke(USER)
    assert answer.content.startswith(s.content), answer
    usage = answer.usage_metadata
    same(usage["total_tokens"], usage["input_tokens"] + usage["output_tokens"])
    same((answer.response_metadata["finish_reason"], answer.response_metadata["model_name"]), ("stop", s.model))


@suite.check("stream, astream, batch, generate")
def stream(s: SimpleNamespace) -> None:
    whole = chat(s).invoke(USER)
    total = None
    for chunk in chat(s, stream_usage=True).stream(USER):
        total = chunk if total is None else total + chunk
    same((total.content, total.usage_metadata["output_tokens"]), (whole.content, whole.usage_metadata["output_tokens"]))
    same(joined(chunk.content for chunk in chat(s, stream_usage=False).stream(USER)), whole.content)
    same({answer.content for answer in chat(s).batch([USER] * 4)}, {whole.content})

    async def run() -> str:
        return joined([chunk.content async for chunk in chat(s).astream(USER)])

    same(asyncio.run(run()), whole.content)


@suite.check("bind_tools: auto, the result sent back, streamed")
def bind_tools(s: SimpleNamespace) -> None:
    model = chat(s).bind_tools([plan])
    answer = model.invoke(USER)
    (call,) = answer.tool_calls
    same((call["name"], call["args"], answer.content), (s.call_name, s.call_arguments, s.content))
    result = plan.invoke(call)
    assert isinstance(result, ToolMessage)
    assert isinstance(model.invoke([*USER, answer, result]), AIMessage)
    total = None
    for chunk in model.stream(USER):
        total = chunk if total is None else total + chunk
    same([(call["name"], call["args"]) for call in total.tool_calls], [(s.call_name, s.call_arguments)])


@suite.check("bind_tools: any, by name, strict")
def forced_tools(s: SimpleNamespace) -> None:
    for choice in ("any", "plan"):
        (call,) = (
            chat(s).bind_tools([plan], tool_choice=choice, parallel_tool_calls=False, strict=True).invoke(USER).tool_calls
        )
        assert call["name"] == "plan" and call["args"]["city"] in ("Rome", "Oslo"), call


@suite.check("with_structured_output: json_schema")
def structured_schema(s: SimpleNamespace) -> None:
    for strict in (None, True):
        got = chat(s).with_structured_output(Journey, method="json_schema", strict=strict).invoke(USER)
        assert isinstance(got, Journey)
    both = chat(s).with_structured_output(Journey, method="json_schema", include_raw=True).invoke(USER)
    assert isinstance(both["parsed"], Journey) and both["parsing_error"] is None, both
    streamed = list(chat(s).with_structured_output(Journey, method="json_schema").stream(USER))
    same(streamed[-1], got)


@suite.check("with_structured_output: function_calling")
def structured_function(s: SimpleNamespace) -> None:
    assert isinstance(chat(s).with_structured_output(Journey, method="function_calling").invoke(USER), Journey)
    schema = {"title": "Journey", "description": "A journey.", **Journey.model_json_schema()}
    assert set(chat(s).with_structured_output(schema, method="function_calling").invoke(USER)) == {"city", "is_far"}


@suite.check("logprobs, seed, stop, n")
def options(s: SimpleNamespace) -> None:
    answer = chat(s, logprobs=True, top_logprobs=2).invoke(USER)
    same(len(answer.response_metadata["logprobs"]["content"]), answer.usage_metadata["output_tokens"])
    same(chat(s).invoke(USER, stop=["K"]).content, s.content.split("K")[0])
    drawn = chat(s, temperature=1.2, seed=5, n=2, max_tokens=6).generate([USER])
    same(len(drawn.generations[0]), 2)


@suite.check("completions: OpenAI().invoke, stream, several prompts")
def completions(s: SimpleNamespace) -> None:
    model = OpenAI(base_url=f"{s.url}/v1", api_key=s.key, model=s.model, temperature=0, max_tokens=6, max_retries=0)
    text = model.invoke("the plan")
    same(joined(model.stream("the plan")), text)
    same([group[0].text for group in model.generate(["the plan", "the plan"]).generations], [text, text])


@suite.check("errors keep the openai class")
def errors(s: SimpleNamespace) -> None:
    for wanted, options in (
        (openai.BadRequestError, {"temperature": 3}),
        (ContextOverflowError, {"max_tokens": 10**6}),
        (openai.AuthenticationError, {"api_key": "wrong"}),
        (openai.NotFoundError, {"model": "another"}),
        (openai.APITimeoutError, {"timeout": 0.4, "max_tokens": 3000, "extra_body": {"ignore_eos": True}}),
        (openai.APIConnectionError, {"base_url": s.dead_url}),
    ):
        try:
            chat(s, **options).invoke(USER)
        except wanted:
            continue
        raise AssertionError(f"no {wanted.__name__}")
    late = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}, "default_headers": {"X-Request-Timeout": "1"}}
    seen: list[Any] = []
    try:
        seen.extend(chat(s, **late).stream(USER))
    except openai.APIError as error:
        same(error.code, "deadline_exceeded")
    else:
        raise AssertionError("no APIError in the middle of the stream")
    wait_until_idle(s)


if __name__ == "__main__":
    sys.exit(suite.run())
