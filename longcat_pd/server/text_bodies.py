"""The bodies of ``/tokenize`` and ``/detokenize``, checked field by field. Knows no tokenizer and no vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from longcat_pd.server.fields import Fields
from longcat_pd.server.openai import ChatBody, check_model, read_chat
from longcat_pd.server.prompts import token_id_of


@dataclass(frozen=True, kw_only=True)
class PlainText:
    """A text to be encoded; ``adds_special``: with what generation puts before it."""

    prompt: str
    adds_special: bool


def read_tokenize(values: dict[str, Any], served_name: str) -> PlainText | ChatBody:
    """A text, or a conversation as the chat route takes it. Raises InvalidRequest, NotFound."""
    fields = Fields(values)
    adds_special = fields.flag("add_special_tokens") is not False
    if fields.get("messages") is not None:
        return read_chat(fields, served_name)
    check_model(fields, served_name)
    fields.required("prompt")
    return PlainText(prompt=fields.text("prompt") or "", adds_special=adds_special)


def read_detokenize(values: dict[str, Any], served_name: str) -> tuple[int, ...]:
    """Ids, not yet compared with a vocabulary. Raises InvalidRequest, NotFound."""
    fields = Fields(values)
    check_model(fields, served_name)
    fields.required("tokens")
    return tuple(token_id_of(value, f"tokens[{i}]") for i, value in enumerate(fields.items("tokens") or []))


TEXT_READERS: dict[str, Callable[[dict[str, Any], str], object]] = {
    "/tokenize": read_tokenize,
    "/detokenize": read_detokenize,
}
