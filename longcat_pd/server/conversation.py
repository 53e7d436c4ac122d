"""Reading the messages and tools of a chat body into what a chat template is given.

Owns the shapes of messages, content parts, tools and tool_choice. Does not know templates.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from longcat_pd.errors import InvalidRequest
from longcat_pd.server.amount import Amount
from longcat_pd.server.fields import Fields, missing, out_of_range, parse_json, wrong_type

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TOOLS = 128
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def read_messages(body: Fields) -> tuple[dict[str, Any], ...]:
    """The conversation: role (developer has become system), content as one string, tool calls with their arguments as
    mappings, reasoning_content and tool_call_id where given."""
    body.required("messages")
    messages = body.items("messages") or []
    if not messages:
        raise InvalidRequest("messages has 0 entries, at least 1", param="messages")
    arguments = Amount()  # of all calls: each is a text of its own in the body
    return tuple(_message(Fields.of(m, f"messages[{i}]"), arguments) for i, m in enumerate(messages))


def _message(message: Fields, arguments: Amount) -> dict[str, Any]:
    message.required("role")
    role = message.text("role")
    if role not in ROLES:
        raise out_of_range(message.path("role"), role, " | ".join(ROLES))
    message.text("name")
    read: dict[str, Any] = {"role": "system" if role == "developer" else role}
    if role == "assistant":
        calls = [_tool_call(Fields.of(c, f"{message.path('tool_calls')}[{i}]"), arguments) for i, c in _calls(message)]
        if calls:
            read["tool_calls"] = calls
        reasoning = message.text("reasoning_content")
        if reasoning is not None:
            read["reasoning_content"] = reasoning
    if role == "tool":
        message.required("tool_call_id")
        read["tool_call_id"] = message.text("tool_call_id")
    read["content"] = _content(message, may_lack="tool_calls" in read)
    return read


def _calls(message: Fields) -> list[tuple[int, Any]]:
    return list(enumerate(message.items("tool_calls") or []))


def _content(message: Fields, *, may_lack: bool) -> str:
    content = message.get("content")
    path = message.path("content")
    if content is None:
        if may_lack:
            return ""
        raise missing(path)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(path, "a string or an array", content)
    return "".join(_part(Fields.of(part, f"{path}[{i}]")) for i, part in enumerate(content))


def _part(part: Fields) -> str:
    part.required("type")
    kind = part.text("type")
    if kind != "text":
        raise InvalidRequest(
            f"{part.path('type')} = {kind!r}: only text parts are supported",
            code="unsupported_content_part",
            param=part.path("type"),
        )
    part.required("text")
    return part.text("text") or ""


def _tool_call(call: Fields, amount: Amount) -> dict[str, Any]:
    _function_type(call, required=False)
    call.required("function")
    function = Fields.of(call.get("function"), call.path("function"))
    for name in ("name", "arguments"):
        function.required(name)
    text = function.text("arguments") or ""
    path = function.path("arguments")
    try:
        arguments = parse_json(text, amount)
    except ValueError as error:
        raise InvalidRequest(f"{path} is not the JSON text of an object: {error}", param=path) from None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{path} is not the JSON text of an object", param=path)
    read: dict[str, Any] = {"type": "function", "function": {"name": function.text("name"), "arguments": arguments}}
    identity = call.text("id")
    return {"id": identity, **read} if identity is not None else read


def _function_type(fields: Fields, *, required: bool) -> None:
    if required:
        fields.required("type")
    kind = fields.text("type")
    if kind not in (None, "function"):
        raise out_of_range(fields.path("type"), kind, '"function"')


@dataclass(frozen=True)
class ToolUse:
    """The tools that the model is shown, as sent, and whether it has to call one: ``named`` if it is set, or any."""

    tools: tuple[dict[str, Any], ...] = ()
    is_forced: bool = False
    named: str | None = None


def read_tools(body: Fields) -> ToolUse:
    """What ``tools`` and ``tool_choice`` ask for; no tools when the choice is ``none``, for then they are not shown."""
    names: set[str] = set()
    tools = body.items("tools", MAX_TOOLS) or []
    for i, tool in enumerate(tools):
        fields = Fields.of(tool, f"tools[{i}]")
        _function_type(fields, required=True)
        fields.required("function")
        function = Fields.of(fields.get("function"), fields.path("function"))
        function.required("name")
        name = function.text("name") or ""
        if not TOOL_NAME.fullmatch(name):
            raise out_of_range(function.path("name"), name, TOOL_NAME.pattern)
        if name in names:
            raise InvalidRequest(f"{function.path('name')} = {name!r} occurs twice", param=function.path("name"))
        names.add(name)
        function.text("description")
        function.object("parameters")
    choice, named = _choice(body, names)
    return ToolUse() if choice == "none" else ToolUse(tuple(tools), choice == "required", named)


def _choice(body: Fields, names: set[str]) -> tuple[str, str | None]:
    """``auto``, ``none`` or ``required``, and the one function that is required."""
    choice = body.get("tool_choice")
    if choice is None:
        return ("auto" if names else "none"), None
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise out_of_range("tool_choice", choice, "auto | none | required | a function")
        if choice == "required" and not names:
            raise InvalidRequest("tool_choice = required without tools", param="tool_choice")
        return choice, None
    fields = Fields.of(choice, "tool_choice")
    _function_type(fields, required=True)
    fields.required("function")
    function = Fields.of(fields.get("function"), "tool_choice.function")
    function.required("name")
    name = function.text("name")
    if name not in names:
        raise InvalidRequest(
            f"tool_choice.function.name = {name!r} is not among the tools", param="tool_choice.function.name"
        )
    return "required", name
