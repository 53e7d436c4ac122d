"""``/tokenize`` and ``/detokenize``: the ids that generation would use, and back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response

from longcat_pd.config.schema import LoadBalancerConfig
from longcat_pd.server.about_routes import Endpoint, Routes
from longcat_pd.server.errors import json_response
from longcat_pd.server.intake import read_in_time, time_limit_of
from longcat_pd.server.openai import decode_body
from longcat_pd.server.requests import Encoded
from longcat_pd.server.service import Service
from longcat_pd.server.text import TextProcessor
from longcat_pd.server.text_bodies import PlainText, read_detokenize, read_tokenize


class Tokenization:
    """Answers about text and ids of one checkpoint."""

    def __init__(self, service: Service, text: TextProcessor, encoded: Encoded) -> None:
        self._service = service
        self._text = text
        self._encoded = encoded

    async def tokenize(self, values: dict[str, Any]) -> dict[str, Any]:
        """Ids of a prompt or of a conversation. Raises InvalidRequest."""
        body = read_tokenize(values, self._service.model.served_name)
        if isinstance(body, PlainText):
            tokens = await self._encoded.encode_text(body.prompt, adds_special=body.adds_special)
        else:
            tokens = await self._encoded.encode_chat(body)
        max_model_len = self._service.engine_config.max_model_len
        return {"tokens": tokens, "count": len(tokens), "max_model_len": max_model_len}

    async def detokenize(self, values: dict[str, Any]) -> dict[str, Any]:
        """The text of ids, special tokens included. Raises InvalidRequest."""
        ids = read_detokenize(values, self._service.model.served_name)
        self._text.need_tokenizer("tokens")
        self._text.check_ids(ids, "tokens")
        text = self._text.raw(ids)
        return {"text": text, "prompt": text}


def text_routes(tokenization: Tokenization, front: LoadBalancerConfig) -> Routes:
    """The two as POST routes."""

    def answered_by(answer: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            limit_s = time_limit_of(request, front.request_timeout_s)  # of the body; the work itself is short
            body = await read_in_time(request, front.max_body_bytes, limit_s)
            return json_response(await answer(decode_body(body)))

        return endpoint

    return {"/tokenize": answered_by(tokenization.tokenize), "/detokenize": answered_by(tokenization.detokenize)}
