"""The bodies that clients send, as JSON schemas: every field with its type, range, default and meaning.

Owns the words and the schemas; the readers decide, and a test holds the two against each other in both directions. Knows no
routes and no answers. What a schema cannot say (relations between fields, the vocabulary, the length of the context) is in
the descriptions.
"""

from __future__ import annotations

from typing import Any

from longcat_pd.engine.request import MAX_BIAS
from longcat_pd.server.conversation import MAX_TOOLS
from longcat_pd.server.openai import DEFAULT_COMPLETION_TOKENS, EFFORTS, INERT, MAX_LOGPROBS, MAX_N, MAX_PRIORITY
from longcat_pd.server.prompts import MAX_CHOICES

Schema = dict[str, Any]

WITHOUT_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "verbosity",
)
NOTHING: tuple[Any, ...] = (None, False, 0, [])  # values that ask for nothing, of any field that is not offered


def optional(kind: str, text: str, **more: Any) -> Schema:
    """A field of one type that may be null, which is the same as absent."""
    return {"type": [kind, "null"], **more, "description": text}


def choice(kind: str, text: str, values: tuple[Any, ...], **more: Any) -> Schema:
    """An optional field of few values."""
    return optional(kind, text, enum=[*values, None], **more)


def ref(name: str) -> Schema:
    """A schema of the document, by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def _refused() -> Schema:
    text = "Not offered: a value that would change the answer is refused with `unsupported_parameter`."
    fields: Schema = {}
    for name, also in INERT.items():
        fields[name] = {"enum": [*NOTHING, *(value for value in also if type(value) is not float)], "description": text}
    fields["best_of"] = {
        "anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_N}, {"enum": [None, False, []]}],
        "description": "Accepted up to `n`, where it changes nothing.",
    }
    fields["add_generation_prompt"] = {"enum": [None, True], "description": "The assistant's turn is always begun."}
    return fields


_TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}

LENGTH: Schema = {
    "max_completion_tokens": optional("integer", "As `max_tokens`; counts if both are given.", minimum=1),
    "min_tokens": optional(
        "integer",
        "Until so many tokens the end token and `stop_token_ids` cannot be drawn and stop strings are not looked for. "
        "At most `max_tokens`.",
        minimum=0,
        default=0,
    ),
    "stop": {
        "anyOf": [
            {"type": ["string", "null"], "minLength": 1, "maxLength": 1024},
            {"type": "array", "maxItems": 16, "items": {"type": "string", "minLength": 1, "maxLength": 1024}},
        ],
        "description": "Strings that end the answer, looked for in the raw text; the earliest match and the rest are cut.",
    },
    "stop_token_ids": optional(
        "array", "Tokens that end the answer; inside the vocabulary.", maxItems=64, items=_TOKEN_IDS["items"]
    ),
    "include_stop_str_in_output": optional("boolean", "The stop string that ends the answer stays in it.", default=False),
    "ignore_eos": optional("boolean", "The end token does not end the answer; the other stops still do.", default=False),
}

_FROM_CHECKPOINT = "Default: the checkpoint's `generation_config.json` (shown by `/server_info`), else {}."

SAMPLING: Schema = {
    "temperature": optional("number", f"0 takes the most likely token. {_FROM_CHECKPOINT.format(1)}", minimum=0, maximum=2),
    "top_p": optional(
        "number",
        f"The smallest set of tokens with at least this probability. {_FROM_CHECKPOINT.format(1)}",
        exclusiveMinimum=0,
        maximum=1,
    ),
    "top_k": optional("integer", f"The k most likely tokens; -1 or 0: all. {_FROM_CHECKPOINT.format('all')}", minimum=-1),
    "min_p": optional(
        "number", "Least probability, as a part of the most likely token's.", minimum=0, maximum=1, default=0
    ),
    "seed": optional(
        "integer",
        "A draw depends on the seed, the choice and the position alone. Absent: drawn by the server.",
        minimum=-(2**63),
        maximum=2**63 - 1,
    ),
    "n": optional(
        "integer",
        f"Choices for each prompt; prompts x n are at most {MAX_CHOICES}. Choice 0 of several is the answer of `n` = 1.",
        minimum=1,
        maximum=MAX_N,
        default=1,
    ),
    "presence_penalty": optional("number", "Over generated tokens.", minimum=-2, maximum=2, default=0),
    "frequency_penalty": optional("number", "Over generated tokens.", minimum=-2, maximum=2, default=0),
    "repetition_penalty": optional("number", "Over prompt and generated tokens.", exclusiveMinimum=0, maximum=2, default=1),
    "logit_bias": optional(
        "object",
        "What is added to the logits of tokens; keys are token ids inside the vocabulary, as strings.",
        maxProperties=MAX_BIAS,
        propertyNames={"pattern": "^[0-9]{1,20}$"},
        additionalProperties={"type": ["number", "null"], "minimum": -100, "maximum": 100},
    ),
}

FORM: Schema = {
    "model": optional("string", 'The served model; absent, null or "" mean it. Any other name is 404 `model_not_found`.'),
    "stream": optional("boolean", "Answer as an event stream.", default=False),
    "stream_options": optional(
        "object",
        "Ignored without `stream`.",
        properties={
            "include_usage": optional("boolean", "One more chunk at the end, with `usage`.", default=False),
            "continuous_usage_stats": optional(
                "boolean", "With `include_usage`: running totals on every chunk.", default=False
            ),
        },
    ),
    "return_token_ids": optional(
        "boolean",
        "Adds `token_ids` to each choice, and `prompt_token_ids` to the answer or to the first chunk. With ids as `prompt` "
        "no tokenizer is needed.",
        default=False,
    ),
    "priority": optional(
        "integer", "Lower goes first; orders waiting requests only.", minimum=-MAX_PRIORITY, maximum=MAX_PRIORITY, default=0
    ),
    "response_format": {
        "anyOf": [ref("TextFormat"), ref("JsonObjectFormat"), ref("JsonSchemaFormat"), {"type": "null"}],
        "description": "What the answer has to look like. Anything but text cannot be combined with tools "
        "(`unsupported_combination`), unless `tool_choice` is `none`.",
    },
}

COMMON: Schema = {
    **FORM,
    **LENGTH,
    **SAMPLING,
    **{name: {"description": "Accepted without effect."} for name in WITHOUT_EFFECT},
    **_refused(),
}

PROMPT: Schema = {
    "anyOf": [
        {"type": "string"},
        {**_TOKEN_IDS, "minItems": 1},
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_CHOICES,
            "items": {"anyOf": [{"type": "string"}, {**_TOKEN_IDS, "minItems": 1}]},
        },
    ],
    "description": "A text, token ids, or a list of either. Of a list, choice index = prompt index x n + i. A prompt that "
    "encodes to no token is refused.",
}

CHAT: Schema = {
    "messages": {"type": "array", "minItems": 1, "items": ref("Message"), "description": "The conversation so far."},
    "max_tokens": optional(
        "integer", "Default: the server's `default_max_tokens`, or the room that the prompt leaves.", minimum=1
    ),
    "logprobs": optional("boolean", "Log-probabilities of the answer's tokens.", default=False),
    "top_logprobs": optional(
        "integer", "And of so many most likely ones. Needs `logprobs`.", minimum=0, maximum=MAX_LOGPROBS, default=0
    ),
    "tools": optional("array", "Functions that may be called; distinct names.", maxItems=MAX_TOOLS, items=ref("Tool")),
    "tool_choice": {
        "anyOf": [choice("string", "", ("auto", "none", "required")), ref("NamedTool")],
        "description": "`auto` (default with tools); `none` (default without; tools are not shown to the model); "
        "`required` or a function of `tools`: a call is enforced.",
    },
    "parallel_tool_calls": optional("boolean", "false: the answer ends after its first complete call.", default=True),
    "chat_template_kwargs": optional(
        "object",
        "Handed to the chat template.",
        properties={
            "enable_thinking": optional("boolean", "Whether the model reasons before it answers."),
            "save_history_reasoning_content": optional("boolean", "Whether earlier reasoning stays in the prompt."),
            "chat_template": {"enum": [None], "description": "Not offered."},
            "continue_final_message": {"enum": [None, False], "description": "Not offered."},
            "add_generation_prompt": {"enum": [None, True], "description": "Always so."},
        },
    ),
    "enable_thinking": optional("boolean", "Short for the above, which wins when both are given."),
    "reasoning_effort": choice("string", "`none` turns reasoning off, the others on.", EFFORTS),
    "separate_reasoning": optional("boolean", "false: reasoning and its tags stay in `content`.", default=True),
}

COMPLETION: Schema = {
    "prompt": PROMPT,
    "max_tokens": optional(
        "integer", "Prompt and answer together fit the context.", minimum=1, default=DEFAULT_COMPLETION_TOKENS
    ),
    "logprobs": optional(
        "integer",
        "Log-probabilities of the answer's tokens, and of so many most likely ones.",
        minimum=0,
        maximum=MAX_LOGPROBS,
    ),
}


def body(required: str, fields: Schema, text: str) -> Schema:
    """A generation body: its own fields and those of both routes. Unknown keys are ignored, at any depth."""
    return {
        "type": "object",
        "description": text,
        "required": [required],
        "properties": {**fields, **COMMON},
        "patternProperties": {"^guided_": {"enum": list(NOTHING), "description": "Not offered."}},
    }


TEXTS: Schema = {
    "TokenizeText": {
        "type": "object",
        "required": ["prompt"],
        "properties": {
            "prompt": {"type": "string"},
            "messages": {"type": "null"},
            "add_special_tokens": optional("boolean", "Put before the text what generation puts there.", default=True),
            "model": FORM["model"],
        },
    },
    "TokenizeConversation": {
        "description": "A chat body; what does not form the prompt is checked and otherwise ignored.",
        "allOf": [
            ref("ChatBody"),
            {"properties": {"add_special_tokens": optional("boolean", "The template decides.", default=True)}},
        ],
    },
    "DetokenizeBody": {
        "type": "object",
        "required": ["tokens"],
        "properties": {
            "tokens": {**_TOKEN_IDS, "description": "Inside the vocabulary."},
            "model": FORM["model"],
        },
    },
    "InstanceBody": {
        "type": "object",
        "properties": {"instance": optional("string", "Which instance; absent: whoever is asked.")},
    },
}

BODIES: Schema = {
    "ChatBody": body("messages", CHAT, "A conversation to be continued."),
    "CompletionBody": body("prompt", COMPLETION, "A text to be continued."),
    **TEXTS,
}
