"""The OpenAPI document as a judge: of bodies that are sent and of answers that come, strictly."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import jsonschema_rs

from longcat_pd.server.openapi import document

_EVENTS = "text/event-stream"


class Contract:
    """One document. Paths may be given with their parameters filled in."""

    def __init__(self, given: dict[str, Any] | None = None) -> None:
        self.document = document(has_keys=True, has_admin_keys=True) if given is None else given
        self._judges: dict[str, jsonschema_rs.Draft202012Validator] = {}

    def judge(self, schema: Mapping[str, Any]) -> jsonschema_rs.Draft202012Validator:
        """A validator of a schema that may refer to others of the document."""
        key = json.dumps(schema, sort_keys=True)
        if key not in self._judges:
            whole = {**schema, "components": self.document["components"]}
            self._judges[key] = jsonschema_rs.Draft202012Validator(whole)
        return self._judges[key]

    def resolve(self, node: Mapping[str, Any]) -> dict[str, Any]:
        """What a reference stands for."""
        while "$ref" in node:
            target: Any = self.document
            for step in node["$ref"].removeprefix("#/").split("/"):
                target = target[step]
            node = target
        return dict(node)

    @cached_property
    def operations(self) -> dict[tuple[str, str], dict[str, Any]]:
        """By method and path."""
        return {
            (method.upper(), path): operation
            for path, item in self.document["paths"].items()
            for method, operation in item.items()
        }

    def operation(self, method: str, path: str) -> dict[str, Any] | None:
        """The operation of a request, if there is one."""
        for (known, template), operation in self.operations.items():
            pattern = re.sub(r"\\\{[^}]*\\\}", ".+", re.escape(template))
            if known == method and re.fullmatch(pattern, path):
                return operation
        return None

    def body_schema(self, path: str) -> dict[str, Any]:
        """Of what is posted to a path."""
        schema: dict[str, Any] = self.operations["POST", path]["requestBody"]["content"]["application/json"]["schema"]
        return schema

    def accepts(self, path: str, body: Any) -> bool:
        """Whether the document lets such a body be sent."""
        return bool(self.judge(self.body_schema(path)).is_valid(body))

    def check(self, method: str, path: str, *, status: int, headers: Mapping[str, str], content: bytes) -> None:
        """Fail unless this is an answer that the document describes; unknown paths and methods have none but the error."""
        kind = headers.get("content-type", "").partition(";")[0]
        assert headers.get("x-request-id"), path
        operation = self.operation("GET" if method == "HEAD" else method, path)
        if operation is None:
            assert status in (404, 405), (method, path, status)
            self._check_json({"$ref": f"#/components/schemas/Error{status}"}, content)
            assert status == 404 or headers["allow"]
            return
        responses = operation["responses"]
        assert str(status) in responses, f"{method} {path} answers {status}, which is not in the document"
        response = self.resolve(responses[str(status)])
        for name in response.get("headers", {}):
            if name == "Retry-After" and status == 500:
                continue
            assert headers.get(name.lower()) is not None, (path, status, name)
        assert kind in response["content"], f"{method} {path} answers {status} in {kind}"
        if method == "HEAD":
            return
        described = response["content"][kind]
        if kind == _EVENTS:
            for event in events(content.decode()):
                self._check_json(event_schema(described), event.encode())
        elif kind == "application/json":
            self._check_json(described["schema"], content)

    def _check_json(self, schema: Mapping[str, Any], content: bytes) -> None:
        errors = list(self.judge(schema).iter_errors(json.loads(content)))
        assert not errors, f"{content[:2000]!r}: {errors[0]}"


def event_schema(described: Mapping[str, Any]) -> dict[str, Any]:
    """Of the JSON in a stream's events."""
    schema: dict[str, Any] = described["schema"]["properties"]["data"]["anyOf"][1]["contentSchema"]
    return schema


def events(text: str) -> list[str]:
    """The JSON of a stream's events; whole ones only, with [DONE] last unless the last is an error."""
    *found, rest = text.split("\n\n")
    assert rest == "" and all(event.startswith("data: ") for event in found), text[-200:]
    data = [event.removeprefix("data: ") for event in found]
    if data[-1] == "[DONE]":
        return data[:-1]
    assert "error" in json.loads(data[-1]), text[-200:]
    return data


def fields(contract: Contract, schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The paths of all fields that a schema names: ``messages[].role``."""
    node = contract.resolve(schema)
    for part in (*node.get("anyOf", ()), *node.get("allOf", ())):
        yield from fields(contract, part, path)
    if "items" in node:
        yield from fields(contract, node["items"], f"{path}[]")
    for name, inner in node.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        yield here
        yield from fields(contract, inner, here)


def narrowed(given: Mapping[str, Any], *, model: str, vocab_size: int) -> dict[str, Any]:
    """The document with what a server knows beyond it: one model, one vocabulary, and how long a test may take.

    Bodies that fit are accepted, but for relations between fields that no schema can say.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(given))
    schemas = changed["components"]["schemas"]
    ids = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    text = {"type": "string", "minLength": 1, "maxLength": 40}
    for name in ("ChatBody", "CompletionBody", "TokenizeText", "DetokenizeBody"):
        schemas[name]["properties"]["model"] = {"enum": ["", None, model]}
    for name in ("ChatBody", "CompletionBody"):
        fields_of = schemas[name]["properties"]
        fields_of["max_tokens"] = fields_of["max_completion_tokens"] = {"type": "integer", "minimum": 1, "maximum": 3}
        fields_of["min_tokens"] = {"enum": [0, 1, None]}
        fields_of["n"] = {"enum": [1, 2, None]}
        fields_of["best_of"] = {"enum": [0, 1, None, False]}
        fields_of["stop_token_ids"]["items"] = ids
        fields_of["logit_bias"]["propertyNames"] = {"enum": [str(token_id) for token_id in range(9)]}
    chat = schemas["ChatBody"]["properties"]
    chat["messages"]["maxItems"] = 4
    chat["top_logprobs"] = {"enum": [0, None]}
    chat["tools"] = {"type": ["array", "null"], "maxItems": 1, "items": schemas["Tool"]}
    chat["tool_choice"] = {"enum": ["auto", "none", None]}
    for name in ("ChatBody", "CompletionBody"):
        schemas[name]["properties"]["response_format"] = {"anyOf": [schemas["TextFormat"], schemas["JsonObjectFormat"]]}
    chat["chat_template_kwargs"]["additionalProperties"] = False
    schemas["Call"]["properties"]["function"]["properties"]["arguments"] = {"enum": ["{}", '{"a": 1}']}
    schemas["TokenizeText"]["properties"]["prompt"] = text
    schemas["InstanceBody"]["properties"]["instance"] = {"type": "null"}
    schemas["DetokenizeBody"]["properties"]["tokens"] = {"type": "array", "maxItems": 20, "items": ids}
    id_list = {"type": "array", "items": ids, "minItems": 1, "maxItems": 20}
    schemas["CompletionBody"]["properties"]["prompt"] = {
        "anyOf": [
            text,
            id_list,
            *({"type": "array", "minItems": 1, "maxItems": 2, "items": one} for one in (text, id_list)),
        ]
    }
    changed["components"]["parameters"]["RequestTimeout"]["schema"] = {"enum": ["30", "60.5"]}
    return changed
