"""The OpenAPI document of the server that clients talk to: the balancer, or one engine alone; it is the same at both.

Owns the paths, their headers and what they can answer. Made when a server starts, of what that server has: without key
files there is no security, without an admin key no admin route.
"""

from __future__ import annotations

from typing import Any

from longcat_pd.errors import Overloaded, TooManyRequests, WorkerUnavailable
from longcat_pd.server import openapi_answers, openapi_bodies, openapi_examples, openapi_messages
from longcat_pd.server.openai import CHAT_ROUTE, COMPLETIONS_ROUTE
from longcat_pd.server.openapi_answers import STATUSES
from longcat_pd.server.openapi_bodies import Schema, ref
from longcat_pd.version import VERSION

PATH = "/openapi.json"
_JSON = "application/json"
_EVENTS = "text/event-stream"
_ABOUT = """An OpenAI-compatible API.

GET routes answer HEAD; any other path is 404, a known path with another method 405 with `Allow`. Unknown keys of a body are
ignored at any depth, `null` is the same as absent, nothing is coerced. Every answer carries `X-Request-Id`; every error is
an `error` object. The bodies of streams are events, `data: <json>` and an empty line; the schemas are those of each event.
An error inside a stream is one event `{"error": {...}}` without `[DONE]` behind it."""

_WORDS = {
    400: "Something in the request cannot be done; `param` is the path of the culprit.",
    401: "No key, or not one of ours.",
    404: "No such model.",
    405: "The path has other methods, named by `Allow`.",
    413: "The body is longer than the server takes; the connection closes.",
    415: "The body is not JSON in UTF-8, or it is compressed.",
    429: "Too many requests are open.",
    500: "A defect of ours; a process died under the request.",
    502: "The hand-over between instances broke, or an instance answered nonsense.",
    503: "No room, no usable instance, starting, or draining.",
    504: "The request's own time is over.",
}
_BODY = (400, 413, 415)
_GENERATION = (*_BODY, 404, 429, 500, 502, 503, 504)
_LATER = {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds after which another try makes sense."}
_HEADERS: Schema = {
    "X-Request-Id": {"schema": {"type": "string"}, "description": "The request's, if it was well-formed, else a new one."},
    "Retry-After": _LATER,
    "x-should-retry": {"schema": {"enum": ["true", "false"]}, "description": "Whether another try makes sense."},
    "WWW-Authenticate": {"schema": {"const": "Bearer"}, "description": "What kind of key is wanted."},
}
_PARAMETERS: Schema = {
    "RequestId": {
        "name": "X-Request-Id",
        "in": "header",
        "schema": {"type": "string"},
        "description": "Names the request in logs and answers if it matches `[A-Za-z0-9._:-]{1,128}`, else it is replaced.",
    },
    "RequestTimeout": {
        "name": "X-Request-Timeout",
        "in": "header",
        "schema": {"type": "string", "pattern": "^[0-9]{1,9}(\\.[0-9]{1,9})?$", "not": {"pattern": "^[0.]*$"}},
        "description": "Seconds from the arrival of the request, > 0; shortens the server's own limit, never lengthens it.",
    },
}


def _named(*names: str, kind: str = "headers") -> Schema:
    return {name: {"$ref": f"#/components/{kind}/{name}"} for name in names}


def _failure(status: int) -> Schema:
    names = ["X-Request-Id"]
    if status == 401:
        names.append("WWW-Authenticate")
    if status in (TooManyRequests.status, Overloaded.status, WorkerUnavailable.status):
        names.append("Retry-After")
    if status >= 429:
        names.append("x-should-retry")
    return {
        "description": _WORDS[status],
        "headers": _named(*names),
        "content": {_JSON: {"schema": ref(f"Error{status}")}},
    }


def _success(schema: str, text: str, examples: Schema | None = None, *, also: Schema | None = None) -> Schema:
    content: Schema = {"schema": ref(schema)}
    if examples:
        content["examples"] = {name: {"value": value} for name, value in examples.items()}
    return {"description": text, "headers": _named("X-Request-Id"), "content": {_JSON: content, **(also or {})}}


def _operation(name: str, tag: str, *, text: str, responses: Schema, failures: tuple[int, ...] = ()) -> Schema:
    failed = {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted({*failures, 500})}
    return {
        "operationId": name,
        "tags": [tag],
        "summary": text,
        "parameters": [{"$ref": "#/components/parameters/RequestId"}],
        "responses": {**responses, **failed},
    }


def _posted(operation: Schema, path: str, schema: Schema, *, required: bool = True, timed: bool = True) -> Schema:
    examples = {name: {"value": value} for name, value in openapi_examples.REQUESTS.get(path, {}).items()}
    content = {"schema": schema, **({"examples": examples} if examples else {})}
    more = [{"$ref": "#/components/parameters/RequestTimeout"}] if timed else []
    return {
        **operation,
        "parameters": [*operation["parameters"], *more],
        "requestBody": {"required": required, "content": {_JSON: content}},
    }


def _generation(path: str, name: str, answer: str, chunk: str) -> Schema:
    data = {"contentMediaType": _JSON, "contentSchema": {"anyOf": [ref(chunk), ref("Error")]}}
    event = {"data": {"anyOf": [{"const": "[DONE]"}, {"type": "string", **data}]}}
    events = {
        "schema": {"type": "object", "description": "Of each event.", "required": ["data"], "properties": event},
        "examples": {"stream": {"value": openapi_examples.STREAMS[path]}},
    }
    text = "The whole answer, or with `stream` its events; status and headers leave with the first token."
    success = _success(answer, text, openapi_examples.ANSWERS[path], also={_EVENTS: events})
    summary = "Continue a conversation" if path == CHAT_ROUTE else "Continue a text"
    operation = _operation(name, "generation", text=summary, responses={"200": success}, failures=_GENERATION)
    return _posted(operation, path, ref("ChatBody" if path == CHAT_ROUTE else "CompletionBody"))


def _texts() -> dict[str, Schema]:
    asks = {
        "/tokenize": ("tokenize", "Tokens", "The ids that generation would use"),
        "/detokenize": ("detokenize", "Text", "The text of ids, special tokens included"),
    }
    schemas = {
        "/tokenize": {"anyOf": [ref("TokenizeText"), ref("TokenizeConversation")]},
        "/detokenize": ref("DetokenizeBody"),
    }
    posts = {}
    for path, (name, schema, text) in asks.items():
        success = {"200": _success(schema, text, openapi_examples.ANSWERS[path])}
        operation = _operation(name, "text", text=text, responses=success, failures=(*_BODY, 404, 502, 503, 504))
        posts[path] = _posted(operation, path, schemas[path])
    return posts


def _open_gets() -> dict[str, Schema]:
    metrics = {
        "description": "Prometheus text.",
        "headers": _named("X-Request-Id"),
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
    shown = {
        "description": "This document.",
        "headers": _named("X-Request-Id"),
        "content": {_JSON: {"schema": {"type": "object"}}},
    }
    lost, unready = _success("Alive", "It cannot, and is about to exit."), _success("Readiness", "It cannot serve now.")
    return {
        "/health": _operation(
            "health",
            "state",
            text="Whether the process can recover by itself",
            responses={"200": _success("Alive", "It can."), "503": lost},
        ),
        "/ready": _operation(
            "ready",
            "state",
            text="Whether requests can be served",
            responses={"200": _success("Readiness", "They can; `busy` is not hung."), "503": unready},
        ),
        "/health_generate": _operation(
            "prove",
            "state",
            text="Proof by a small request through the whole path",
            responses={"200": _success("Proof", "It went through, or a client's request just did.")},
            failures=(503,),
        ),
        "/metrics": _operation("metrics", "state", text="Figures for Prometheus", responses={"200": metrics}),
        PATH: _operation("describe", "state", text="This API", responses={"200": shown}),
    }


def _gets() -> dict[str, Schema]:
    names = {
        "/v1/models": ("list_models", "models", "ModelList", "The served model", (503,)),
        "/v1/models/{model_id}": ("get_model", "models", "Model", "One model; ids may contain slashes", (404, 503)),
        "/server_info": ("server_info", "models", "ServerInfo", "Layout, defaults and figures", ()),
        "/model_info": ("model_info", "models", "ModelInfo", "Where the model is", ()),
        "/debug/accounting": ("accounting", "state", "Account", "What is in use; nothing when idle", ()),
    }
    found: dict[str, Schema] = {}
    for path, (name, tag, schema, text, failures) in names.items():
        found[path] = _operation(name, tag, text=text, responses={"200": _success(schema, text)}, failures=failures)
    named = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
    found["/v1/models/{model_id}"]["parameters"].append(named)
    return found


def _posts() -> dict[str, Schema]:
    flushed = {"200": _success("Flushed", "No prefix is found any more; the means of `/server_info` begin anew.")}
    return {
        CHAT_ROUTE: _generation(CHAT_ROUTE, "chat", "ChatAnswer", "ChatChunk"),
        COMPLETIONS_ROUTE: _generation(COMPLETIONS_ROUTE, "complete", "CompletionAnswer", "CompletionChunk"),
        **_texts(),
        "/flush_cache": _operation("flush_cache", "state", text="Forget prefixes", responses=flushed, failures=(503,)),
    }


def _admin_posts() -> dict[str, Schema]:
    words = {"/admin/drain": "Take no new requests", "/admin/undrain": "Take requests again"}
    posts = {}
    for path, text in words.items():
        done = {"202": _success("Draining", "So it is; `open` requests are still running.")}
        operation = _operation(path.rpartition("/")[2], "admin", text=text, responses=done, failures=_BODY)
        posts[path] = _posted(operation, path, ref("InstanceBody"), required=False, timed=False)
    return posts


def _guarded(operations: dict[str, Schema], scheme: str | None) -> dict[str, Schema]:
    """The same, with a key if there is a scheme for it."""
    if scheme is None:
        return operations
    denied = {"401": {"$ref": "#/components/responses/401"}}
    return {
        path: {**one, "security": [{scheme: []}], "responses": {**one["responses"], **denied}}
        for path, one in operations.items()
    }


def document(*, has_keys: bool, has_admin_keys: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a server with or without keys for clients and for the operator."""
    client = "clientKey" if has_keys else None
    gets = {**_open_gets(), **_guarded(_gets(), client)}
    posts = _guarded(_posts(), client)
    if has_admin_keys:
        posts |= _guarded(_admin_posts(), "adminKey")
    schemes = {"clientKey": has_keys, "adminKey": has_admin_keys}
    return {
        "openapi": "3.1.0",
        "info": {"title": "longcat-pd", "version": VERSION, "description": _ABOUT},
        "paths": {
            **{path: {"post": one} for path, one in posts.items()},
            **{path: {"get": one} for path, one in gets.items()},
        },
        "components": {
            "schemas": {
                **openapi_bodies.BODIES,
                **openapi_messages.MESSAGES,
                **openapi_messages.FORMATS,
                **openapi_answers.GENERATED,
                **openapi_answers.TOLD,
                **openapi_answers.ERRORS,
            },
            "parameters": _PARAMETERS,
            "headers": _HEADERS,
            "responses": {str(status): _failure(status) for status in STATUSES},
            "securitySchemes": {name: {"type": "http", "scheme": "bearer"} for name, is_used in schemes.items() if is_used},
        },
    }
