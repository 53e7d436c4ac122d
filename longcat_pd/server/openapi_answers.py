"""What is answered, as JSON schemas: answers, chunks of streams, errors, and what servers tell of themselves.

Strict: an answer holds what is written here and nothing else. Errors are made from the exceptions that they come from.
"""

from __future__ import annotations

from typing import Any

from longcat_pd.errors import LongcatError, RequestError, ServiceError
from longcat_pd.server.openapi_bodies import Schema, ref

_TEXT: Schema = {"type": "string"}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_FLAG: Schema = {"type": "boolean"}
_NUMBER: Schema = {"type": "number"}


def record(_optional: Schema | None = None, **fields: Schema) -> Schema:
    """An object of exactly these fields, all of them there but the optional ones."""
    properties = {**fields, **(_optional or {})}
    return {"type": "object", "required": list(fields), "properties": properties, "additionalProperties": False}


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_IDS = _list(_COUNT)
_FINISH: Schema = {"enum": ["stop", "length", "tool_calls"]}
_STOP: Schema = {
    "type": ["string", "integer", "null"],
    "description": "The string or the token of the request that ended it.",
}
_TOKEN = {"token": _TEXT, "logprob": _NUMBER, "bytes": _or_null(_list({"type": "integer", "minimum": 0, "maximum": 255}))}


def _answer(kind: str, prefix: str, *, choices: Schema, extra: Schema, needed: Schema) -> Schema:
    return record(
        extra,
        id={"type": "string", "pattern": f"^{prefix}-[A-Za-z0-9._:-]+$", "description": "Made of the request's id."},
        object={"const": kind},
        created={**_COUNT, "description": "Unix seconds."},
        model=_TEXT,
        system_fingerprint={
            "type": "string",
            "description": "Of code, model, layout and backend: promises of equal tokens hold between equal ones.",
        },
        choices=choices,
        **needed,
    )


def _choices(content: Schema, logprobs: str, *, is_chunk: bool) -> Schema:
    index = {"index": _COUNT}
    ids = {"token_ids": {**_IDS, "description": "With `return_token_ids`: the ids that count, in order."}}
    if "text" in content:
        ids["prompt_token_ids"] = {**_IDS, "description": "With `return_token_ids`, of several prompts: the choice's own."}
    logs = {"logprobs": _or_null(ref(logprobs))}
    if not is_chunk:
        return record(ids, **index, **content, **logs, finish_reason=_FINISH, matched_stop=_STOP)
    running = record(ids, **index, **content, **logs, finish_reason={"type": "null"})
    last = record(ids, **index, **content, **logs, finish_reason=_FINISH, matched_stop=_STOP)
    return {"anyOf": [running, last]}


_PROMPT_IDS = {"prompt_token_ids": {**_IDS, "description": "With `return_token_ids`; in a stream on the first chunk."}}
_CHUNK_USAGE = {"usage": {**_or_null(ref("Usage")), "description": "Only with `include_usage`: null, or running totals."}}
_CALL = record(
    id=_TEXT, type={"const": "function"}, function=record(name=_TEXT, arguments={**_TEXT, "description": "A JSON text."})
)
_CALL_BEGINS = record(index=_COUNT, id=_TEXT, type={"const": "function"}, function=record(name=_TEXT, arguments=_TEXT))
_CALL_GOES_ON = record(index=_COUNT, function=record(arguments=_TEXT))


def _generated() -> Schema:
    usage = {"usage": ref("Usage")}
    parts = {
        "ChatAnswer": ("chat.completion", "chatcmpl", _PROMPT_IDS, usage),
        "ChatChunk": ("chat.completion.chunk", "chatcmpl", {**_PROMPT_IDS, **_CHUNK_USAGE}, {}),
        "CompletionAnswer": ("text_completion", "cmpl", _PROMPT_IDS, usage),
        "CompletionChunk": ("text_completion", "cmpl", {**_PROMPT_IDS, **_CHUNK_USAGE}, {}),
    }
    contents = {"ChatAnswer": {"message": ref("AnswerMessage")}, "ChatChunk": {"delta": ref("Delta")}}
    found: Schema = {}
    for name, (kind, prefix, extra, needed) in parts.items():
        logprobs = "ChatLogprobs" if name.startswith("Chat") else "CompletionLogprobs"
        choice = _choices(contents.get(name, {"text": _TEXT}), logprobs, is_chunk=name.endswith("Chunk"))
        choices = _list(choice, **({} if name.endswith("Chunk") else {"minItems": 1}))
        found[name] = _answer(kind, prefix, choices=choices, extra=extra, needed=needed)
    return found


GENERATED: Schema = {
    **_generated(),
    "AnswerMessage": record(
        role={"const": "assistant"},
        content={"type": ["string", "null"], "description": "null when there are only tool calls."},
        reasoning_content=_TEXT_OR_NULL,
        tool_calls=_or_null(_list(_CALL, minItems=1)),
    ),
    "Delta": {
        "description": "The opening of a choice; then exactly one field; at the end of a choice nothing.",
        "anyOf": [
            record(role={"const": "assistant"}, content={"const": ""}),
            record(content=_TEXT),
            record(reasoning_content=_TEXT),
            record(tool_calls=_list({"anyOf": [_CALL_BEGINS, _CALL_GOES_ON]}, minItems=1)),
            record(),
        ],
    },
    "ChatLogprobs": record(content=_list(record(**_TOKEN, top_logprobs=_list(record(**_TOKEN))))),
    "CompletionLogprobs": record(
        tokens=_list(_TEXT),
        token_logprobs=_list(_NUMBER),
        top_logprobs=_list(_map(_NUMBER)),
        text_offset=_list(_COUNT),
    ),
    "Usage": record(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=record(cached_tokens=_COUNT),
        completion_tokens_details=record(reasoning_tokens=_COUNT),
    ),
}

TOLD: Schema = {
    "Alive": record(status={"enum": ["ok", "lost"]}),
    "Reason": record(code=_TEXT, detail=_TEXT, rank={"type": ["integer", "null"]}),
    "StartStep": record(step=_TEXT, unit=_TEXT, done=_COUNT, total=_COUNT, seconds=_NUMBER, ended=_FLAG),
    "Readiness": record(
        {"instances": _map(record(ready=_FLAG, reasons=_list(ref("Reason")))), "start": _list(ref("StartStep"))},
        ready=_FLAG,
        busy=_FLAG,
        role={"enum": ["load_balancer", "standalone"]},
        instance=_TEXT,
        incarnation=_TEXT,
        config_digest=_TEXT,
        ranks=record(total=_COUNT, ok=_COUNT),
        peers=_map({"enum": ["up", "down", "mismatch"]}),
        reasons=_list(ref("Reason")),
    ),
    "Proof": record(status={"const": "ok"}, by={"enum": ["probe", "traffic"]}, ms=_COUNT, pair=_list(_TEXT)),
    "Model": record(
        id=_TEXT,
        object={"const": "model"},
        created=_COUNT,
        owned_by=_TEXT,
        root=_TEXT,
        parent={"type": "null"},
        max_model_len=_COUNT,
    ),
    "ModelList": record(object={"const": "list"}, data=_list(ref("Model"))),
    "ModelInfo": record(model_path=_TEXT, tokenizer_path=_TEXT, is_generation={"const": True}),
    "Parallel": {"type": "object", "additionalProperties": {"type": ["integer", "string", "array"]}},
    "DecodeState": record(
        avg_spec_accept_length={"type": ["number", "null"]},
        dp_size=_COUNT,
        attn_dp_size=_COUNT,
        effective_max_running_requests_per_dp=_COUNT,
        memory_usage=record(token_capacity=_COUNT),
    ),
    "InstanceInfo": record(
        instance=_TEXT,
        tokenizer_path=_TEXT,
        parallel=ref("Parallel"),
        internal_states=_list({"anyOf": [ref("DecodeState"), record()]}),
    ),
    "ServerInfo": record(
        {
            "instance": _TEXT,
            "parallel": ref("Parallel"),
            "memory": _list(record(rank=_COUNT, node=_TEXT, bytes=_map(_COUNT))),
            "prefill": _list(ref("InstanceInfo")),
            "decode": _list(ref("InstanceInfo")),
            "sampling_defaults": record(temperature=_NUMBER, top_p=_NUMBER, top_k={"type": "integer"}),
            "determinism": {"enum": ["batch_invariant", "per_batch"]},
        },
        version=_TEXT,
        role={"enum": ["load_balancer", "standalone"]},
        model_path=_TEXT,
        tokenizer_path=_TEXT,
        served_model_name=_TEXT,
        max_model_len=_COUNT,
        internal_states=_list(ref("DecodeState")),
    ),
    "RankAccount": record(
        rank=_COUNT,
        silent=_FLAG,
        blocks=record(total=_COUNT, free=_COUNT, cached=_COUNT, reserved=_COUNT, live=_COUNT, quarantined=_COUNT),
        slots=record(total=_COUNT, used=_COUNT),
        lanes=record(posted=_COUNT, unsent=_COUNT),
        collectives=_map(_COUNT),
    ),
    "InstanceAccount": record(
        role={"enum": ["standalone", "prefill", "decode"]},
        instance=_TEXT,
        incarnation=_TEXT,
        idle=_FLAG,
        outstanding=_COUNT,
        mismatch=_list(_TEXT),
        driver=record(requests_waiting=_COUNT, requests_running=_COUNT, transfers=_COUNT, request_sockets=_COUNT),
        ranks=_list(ref("RankAccount")),
    ),
    "ClusterAccount": record(
        role={"const": "load_balancer"},
        idle=_FLAG,
        outstanding=_COUNT,
        balancer=record(clients=_COUNT, legs=record(prefill=_COUNT, decode=_COUNT)),
        instances=_map(ref("InstanceAccount")),
        unreachable=_list(_TEXT),
    ),
    "Account": {"anyOf": [ref("InstanceAccount"), ref("ClusterAccount")]},
    "Tokens": record(tokens=_IDS, count=_COUNT, max_model_len=_COUNT),
    "Text": record(text=_TEXT, prompt={**_TEXT, "description": "The same."}),
    "Flushed": record(success={"const": True}),
    "Draining": record(draining=_FLAG, open=_COUNT),
}


def errors_of(status: int) -> tuple[list[str], list[str]]:
    """OpenAI types and codes that answers with this status can have."""
    kinds: list[type[LongcatError]] = [*RequestError.__subclasses__(), *ServiceError.__subclasses__()]
    made = [kind("", code=code) if len(kind.codes) > 1 else kind("") for kind in kinds for code in kind.codes]
    fitting = [found for found in made if found.status == status]
    return sorted({found.kind for found in fitting}), sorted({found.code for found in fitting})


def error(status: int) -> Schema:
    """The error object, as answers with this status have it."""
    types, codes = errors_of(status)
    inner = record(message=_TEXT, type={"enum": types}, param=_TEXT_OR_NULL, code={"enum": codes})
    return record(error=inner)


STATUSES = (400, 401, 404, 405, 413, 415, 429, 500, 502, 503, 504)
ERRORS: Schema = {
    "Error": {
        **record(error=record(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT)),
        "description": "`param` is the path of the culprit in the request, such as `messages[2].content[0].type`.",
    },
    **{f"Error{status}": error(status) for status in STATUSES},
}
