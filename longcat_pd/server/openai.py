"""What a client may send: the two generation bodies, checked field by field.

Owns every field of ``/v1/chat/completions`` and ``/v1/completions``: type, range, default, and what is refused. Knows no
tokenizer, vocabulary or model length: what needs those is found where the prompt is encoded. Unknown keys, at any depth,
are ignored; a known field that is not offered is accepted only with the value that changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from longcat_pd.engine.request import MAX_BIAS
from longcat_pd.errors import InvalidRequest, NotFound
from longcat_pd.server.conversation import ToolUse, read_messages, read_tools
from longcat_pd.server.fields import Fields, out_of_range, parse_json, shown, unsupported, wrong_type
from longcat_pd.server.prompts import Prompt, read_prompts, token_id_of

ChatRoute = Literal["/v1/chat/completions"]
CompletionsRoute = Literal["/v1/completions"]
CHAT_ROUTE: ChatRoute = "/v1/chat/completions"
COMPLETIONS_ROUTE: CompletionsRoute = "/v1/completions"

MAX_N = 8
MAX_PRIORITY = 100
MAX_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16
_SEED = 2**63
_ALL_IDS = 2**31 - 1  # more than any vocabulary has: a larger top_k asks for nothing else
_MAX_ID_DIGITS = 20  # what is longer is no id of any vocabulary, and no number that is quickly read
INERT: dict[str, tuple[Any, ...]] = {
    "echo": (),
    "suffix": ("",),
    "prompt_logprobs": (),
    "functions": (),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "chat_template": (),
    "continue_final_message": (),
    "stop_regex": (),
    "no_stop_trim": (),
    "regex": (),
    "ebnf": (),
    "structured_outputs": (),
    "structural_tag": (),
    "use_beam_search": (),
    "length_penalty": (1, 1.0),
    "lora_path": (),
    "session_params": (),
    "custom_logit_processor": (),
    "return_hidden_states": (),
}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # of reasoning: none, or as much as there is
_TEMPLATE_FLAGS = ("enable_thinking", "save_history_reasoning_content")


@dataclass(frozen=True, kw_only=True)
class Common:
    """What both bodies have. None: the server's default, which depends on the checkpoint or on the prompt."""

    model: str
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0 = off
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    return_token_ids: bool = False
    num_logprobs: int | None = None
    min_p: float = 0.0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    include_stop: bool = False  # what stopped an answer stays in its text
    priority: int = 0
    answer_schema: dict[str, Any] | None = None  # the answer has to be JSON by it, unchecked; None: any text

    @property
    def num_prompts(self) -> int:
        """Each has ``n`` choices."""
        return 1

    @property
    def num_choices(self) -> int:
        """Choice i of prompt p has the index p * n + i."""
        return self.num_prompts * self.n


@dataclass(frozen=True, kw_only=True)
class ChatBody(Common):
    """A checked chat body. ``template_kwargs`` goes to the template."""

    route: ChatRoute = CHAT_ROUTE
    messages: tuple[dict[str, Any], ...]
    tool_use: ToolUse = field(default_factory=ToolUse)
    parallel_tool_calls: bool = True
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    separate_reasoning: bool = True

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """The tools that the model is shown, as sent."""
        return self.tool_use.tools


@dataclass(frozen=True, kw_only=True)
class CompletionBody(Common):
    """A checked completions body."""

    route: CompletionsRoute = COMPLETIONS_ROUTE
    prompts: tuple[Prompt, ...]

    @property
    def num_prompts(self) -> int:
        """One at least."""
        return len(self.prompts)


Body = ChatBody | CompletionBody


def decode_body(raw: bytes) -> dict[str, Any]:
    """The JSON object that a body is. Raises InvalidRequest invalid_json."""
    try:
        value = parse_json(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not UTF-8", code="invalid_json") from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body is not a JSON object", code="invalid_json")
    return value


def read_body(route: str, values: dict[str, Any], served_name: str) -> Body:
    """Check a body of a generation route.

    Args:
        route: ``CHAT_ROUTE`` or ``COMPLETIONS_ROUTE``.
        values: the decoded body.
        served_name: the one model; an absent, null or empty ``model`` means it.

    Raises:
        InvalidRequest: 400, with the path of the culprit as ``param``.
        NotFound: model_not_found.
    """
    return READERS[route](Fields(values), served_name)


def read_chat(body: Fields, served_name: str) -> ChatBody:
    """Check a chat body; as ``read_body``."""
    common = _common(body, served_name)
    tool_use = read_tools(body)
    answer_schema = _response_format(body, has_tools=bool(tool_use.tools))
    wants_logprobs = body.flag("logprobs") or False
    top = body.integer("top_logprobs", 0, MAX_LOGPROBS) or 0
    if top and not wants_logprobs:
        raise InvalidRequest(f"top_logprobs = {top} needs logprobs = true", param="top_logprobs")
    return ChatBody(
        **common,
        num_logprobs=top if wants_logprobs else None,
        messages=read_messages(body),
        tool_use=tool_use,
        answer_schema=answer_schema,
        parallel_tool_calls=body.flag("parallel_tool_calls") is not False,
        template_kwargs=_template_kwargs(body),
        separate_reasoning=body.flag("separate_reasoning") is not False,
    )


def read_completion(body: Fields, served_name: str) -> CompletionBody:
    """Check a completions body; as ``read_body``."""
    common = _common(body, served_name, max_tokens=DEFAULT_COMPLETION_TOKENS)
    return CompletionBody(
        **common,
        num_logprobs=body.integer("logprobs", 0, MAX_LOGPROBS),
        answer_schema=_response_format(body, has_tools=False),
        prompts=read_prompts(body, common["n"]),
    )


READERS: dict[str, Callable[[Fields, str], Body]] = {CHAT_ROUTE: read_chat, COMPLETIONS_ROUTE: read_completion}


def check_model(body: Fields, served_name: str) -> str:
    """The model that is meant: the served one, or NotFound."""
    model = body.text("model") or served_name
    if model != served_name:
        raise NotFound(f"the model {model!r} is not served here; {served_name!r} is", code="model_not_found", param="model")
    return model


def _common(body: Fields, served_name: str, *, max_tokens: int | None = None) -> dict[str, Any]:
    model = check_model(body, served_name)
    options = body.object("stream_options") or Fields({})
    old, new = body.integer("max_tokens", 1), body.integer("max_completion_tokens", 1)
    given = old if new is None else new
    max_tokens = max_tokens if given is None else given
    n = body.integer("n", 1, MAX_N)
    top_k = body.integer("top_k", -1)
    common: dict[str, Any] = {
        "model": model,
        "stream": body.flag("stream") or False,
        "include_usage": options.flag("include_usage") or False,
        "continuous_usage": options.flag("continuous_usage_stats") or False,
        "max_tokens": max_tokens,
        "temperature": body.number("temperature", 0, 2),
        "top_p": body.number("top_p", 0, 1, above_low=True),
        "top_k": None if top_k is None else min(max(top_k, 0), _ALL_IDS),
        "seed": body.integer("seed", -_SEED, _SEED - 1),
        "n": n or 1,
        "stop": _stop(body),
        "stop_token_ids": _stop_token_ids(body),
        "ignore_eos": body.flag("ignore_eos") or False,
        "return_token_ids": body.flag("return_token_ids") or False,
        "min_p": body.number("min_p", 0, 1) or 0.0,
        "min_tokens": body.integer("min_tokens", 0, max_tokens) or 0,
        "presence_penalty": body.number("presence_penalty", -2, 2) or 0.0,
        "frequency_penalty": body.number("frequency_penalty", -2, 2) or 0.0,
        "repetition_penalty": body.number("repetition_penalty", 0, 2, above_low=True) or 1.0,
        "logit_bias": _logit_bias(body),
        "include_stop": body.flag("include_stop_str_in_output") or False,
        "priority": body.integer("priority", -MAX_PRIORITY, MAX_PRIORITY) or 0,
    }
    _refused(body, n or 1)
    return common


def _stop(body: Fields) -> tuple[str, ...]:
    value = body.get("stop")
    stops = [value] if isinstance(value, str) else body.items("stop", 16) or []
    for i, stop in enumerate(stops):
        path = "stop" if isinstance(value, str) else f"stop[{i}]"
        if not isinstance(stop, str):
            raise wrong_type(path, "a string", stop)
        if not 1 <= len(stop) <= 1024:
            raise InvalidRequest(f"{path} has {len(stop)} characters, outside 1 ... 1024", param=path)
    return tuple(stops)


def _stop_token_ids(body: Fields) -> tuple[int, ...]:
    ids = body.items("stop_token_ids", 64) or []
    return tuple(token_id_of(value, f"stop_token_ids[{i}]") for i, value in enumerate(ids))


def _logit_bias(body: Fields) -> tuple[tuple[int, float], ...]:
    """Ids, not yet compared with a vocabulary, and what is added to their logits; without those that change nothing."""
    given = body.object("logit_bias") or Fields({})
    if len(given.values) > MAX_BIAS:
        raise InvalidRequest(f"logit_bias has {len(given.values)} entries, at most {MAX_BIAS}", param="logit_bias")
    bias = {}
    for token_id in given.values:
        if not (token_id.isascii() and token_id.isdigit()) or len(token_id) > _MAX_ID_DIGITS:
            raise out_of_range(given.path(token_id), token_id, "the vocabulary")
        bias[int(token_id)] = given.number(token_id, -100, 100) or 0.0
    return tuple((token_id, value) for token_id, value in bias.items() if value)


def _refused(body: Fields, n: int) -> None:
    for name, value in body.values.items():
        allowed = INERT.get(name, () if name.startswith("guided_") else None)
        if allowed is not None and not _is_inert(value, allowed):
            raise unsupported(name, value)
    best_of = body.get("best_of")
    if not _is_inert(best_of) and (body.integer("best_of", 0) or 0) > n:
        raise InvalidRequest(f"best_of = {shown(best_of)} > n = {n}", code="unsupported_parameter", param="best_of")
    starts_answer = body.get("add_generation_prompt")
    if starts_answer is not None and starts_answer is not True:
        raise unsupported("add_generation_prompt", starts_answer)


def _is_inert(value: Any, also: tuple[Any, ...] = ()) -> bool:
    return value is None or value is False or value == 0 or value == [] or (value in also and value is not True)


def _response_format(body: Fields, *, has_tools: bool) -> dict[str, Any] | None:
    """The schema that the answer has to be JSON by; what is in it is found where the grammar is made."""
    wanted = body.object("response_format")
    if wanted is None:
        return None
    wanted.required("type")
    kind = wanted.text("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise out_of_range(wanted.path("type"), kind, "text | json_object | json_schema")
    if kind == "text":
        return None
    schema: dict[str, Any] = {"type": "object"}
    if kind == "json_schema":
        wanted.required("json_schema")
        described = Fields.of(wanted.get("json_schema"), wanted.path("json_schema"))
        described.text("name")
        described.text("description")
        described.flag("strict")
        described.required("schema")
        schema = dict(Fields.of(described.get("schema"), described.path("schema")).values)
    if has_tools:
        raise InvalidRequest(
            f"response_format {kind} together with tools", code="unsupported_combination", param="response_format"
        )
    return schema


def _template_kwargs(body: Fields) -> dict[str, Any]:
    """The template's switches. What ``chat_template_kwargs`` says wins over the short forms."""
    kwargs: dict[str, Any] = {}
    effort = body.text("reasoning_effort")
    if effort is not None:
        if effort not in EFFORTS:
            raise out_of_range("reasoning_effort", effort, " | ".join(EFFORTS))
        kwargs["enable_thinking"] = effort != "none"
    thinking = body.flag("enable_thinking")
    if thinking is not None:
        kwargs["enable_thinking"] = thinking
    given = body.object("chat_template_kwargs")
    if given is None:
        return kwargs
    for name in _TEMPLATE_FLAGS:
        given.flag(name)
    for name, inert in (("chat_template", None), ("continue_final_message", False), ("add_generation_prompt", True)):
        if given.get(name) is not None and given.get(name) is not inert:
            raise unsupported(given.path(name), given.get(name))
    return {**kwargs, **{name: value for name, value in given.values.items() if value is not None}}
