"""The nested records of a chat body as JSON schemas: messages, tools, formats of the answer."""

from __future__ import annotations

from typing import Any

from longcat_pd.server.conversation import TOOL_NAME
from longcat_pd.server.openapi_bodies import Schema, optional, ref

_NAME = optional("string", "Accepted, unused.")


def _message(text: str, roles: tuple[str, ...], required: tuple[str, ...] = ("content",), **fields: Any) -> Schema:
    return {
        "type": "object",
        "description": text,
        "required": ["role", *required],
        "properties": {"role": {"enum": list(roles)}, "content": ref("Content"), "name": _NAME, **fields},
    }


_REASONING = optional("string", "What the model had thought before it answered.")
_FUNCTION_TYPE = {"const": "function"}


def _function(**fields: Any) -> Schema:
    """A function by its name, and what else is said of it."""
    function = {"type": "object", "required": ["name"], "properties": fields}
    return {
        "type": "object",
        "required": ["type", "function"],
        "properties": {"type": _FUNCTION_TYPE, "function": function},
    }


MESSAGES: Schema = {
    "Message": {"anyOf": [ref(name) for name in ("PlainMessage", "AssistantMessage", "CallingMessage", "ToolMessage")]},
    "PlainMessage": _message("`developer` is another word for `system`.", ("system", "developer", "user")),
    "AssistantMessage": _message(
        "An earlier answer.",
        ("assistant",),
        reasoning_content=_REASONING,
        tool_calls=optional("array", "Calls that it made.", items=ref("Call")),
    ),
    "CallingMessage": _message(
        "An earlier answer that consists of calls.",
        ("assistant",),
        ("tool_calls",),
        content={"anyOf": [ref("Content"), {"type": "null"}]},
        reasoning_content=_REASONING,
        tool_calls={"type": "array", "minItems": 1, "items": ref("Call")},
    ),
    "ToolMessage": _message(
        "What a call brought.",
        ("tool",),
        ("content", "tool_call_id"),
        tool_call_id={"type": "string", "description": "The `id` of the call."},
    ),
    "Content": {
        "anyOf": [{"type": "string"}, {"type": "array", "items": ref("TextPart")}],
        "description": "A text, or parts that are joined without separator. Other kinds of parts are refused "
        "(`unsupported_content_part`).",
    },
    "TextPart": {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    },
    "Call": {
        "type": "object",
        "required": ["function"],
        "properties": {
            "id": {"type": ["string", "null"]},
            "type": {"enum": ["function", None]},
            "function": {
                "type": "object",
                "required": ["name", "arguments"],
                "properties": {
                    "name": {"type": "string"},
                    "arguments": {
                        "type": "string",
                        "contentMediaType": "application/json",
                        "description": "The JSON text of an object.",
                    },
                },
            },
        },
    },
    "Tool": _function(
        name={"type": "string", "pattern": f"^{TOOL_NAME.pattern}$"},
        description=optional("string", "What it does, for the model."),
        parameters=optional("object", "A JSON schema of the arguments."),
    ),
    "NamedTool": _function(name={"type": "string", "description": "One of `tools`."}),
}

FORMATS: Schema = {
    "TextFormat": {"type": "object", "required": ["type"], "properties": {"type": {"const": "text"}}},
    "JsonObjectFormat": {
        "type": "object",
        "description": "Any JSON object.",
        "required": ["type"],
        "properties": {"type": {"const": "json_object"}},
    },
    "JsonSchemaFormat": {
        "type": "object",
        "description": "JSON that the schema describes; always strict.",
        "required": ["type", "json_schema"],
        "properties": {
            "type": {"const": "json_schema"},
            "json_schema": {
                "type": "object",
                "required": ["schema"],
                "properties": {
                    "name": {"type": ["string", "null"]},
                    "description": {"type": ["string", "null"]},
                    "strict": optional("boolean", "It is strict in any case."),
                    "schema": {
                        "type": "object",
                        "description": "A keyword that cannot be enforced is refused and named.",
                    },
                },
            },
        },
    },
}
