"""The records that a client gets: whole answers, chunks of a stream, usage, log-probs.

Owns their form. Knows pieces (``choice.py``) and how a token is shown, nothing of requests or engines. A whole answer is
made by joining the same pieces that a stream sends one by one, so that the two cannot differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longcat_pd.engine.request import Request
from longcat_pd.kv_transfer.hello import fingerprint
from longcat_pd.kv_transfer.messages import Hello
from longcat_pd.server.choice import CountedToken, Piece
from longcat_pd.server.openai import Body, ChatBody
from longcat_pd.server.resume import Origin, Resume
from longcat_pd.server.tally import PromptTally

_LOWEST = -9999.0  # stands for minus infinity, which JSON cannot say

ShowToken = Callable[[int], tuple[str, bytes | None]]


@dataclass(kw_only=True)
class Usage:
    """Running totals of one answer: the prompts whose choices have begun once each, the choices added up."""

    prompts: PromptTally = field(default_factory=PromptTally)
    completions: dict[int, int] = field(default_factory=dict)
    reasoning: dict[int, int] = field(default_factory=dict)

    def count(self, piece: Piece) -> None:
        """Take the running counts of a choice."""
        self.completions[piece.index] = piece.num_tokens
        self.reasoning[piece.index] = piece.num_reasoning_tokens

    @property
    def num_completion(self) -> int:
        """Counted tokens of all choices."""
        return sum(self.completions.values())

    def record(self) -> dict[str, Any]:
        """The ``usage`` object."""
        prompt, completion = self.prompts.num_tokens, self.num_completion
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.prompts.num_cached},
            "completion_tokens_details": {"reasoning_tokens": sum(self.reasoning.values())},
        }


@dataclass(kw_only=True)
class _Parts:
    """One choice of a whole answer, as its pieces come."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[CountedToken] = field(default_factory=list)
    finish_reason: str | None = None
    matched_stop: str | int | None = None

    def add(self, piece: Piece) -> None:
        """Join the piece to what is there."""
        self.tokens.extend(piece.tokens)
        if piece.finish_reason is not None:
            self.finish_reason, self.matched_stop = piece.finish_reason, piece.matched_stop
        for name, value in piece.delta.items():
            if name != "tool_calls":
                self.texts.setdefault(name, []).append(value)
                continue
            for call in value:
                if "id" in call:
                    function = call["function"]
                    self.calls.append({"id": call["id"], "type": call["type"], "function": dict(function)})
                else:
                    self.calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]

    def text(self, name: str) -> str | None:
        """A text field; None if no piece had it."""
        return "".join(self.texts[name]) if name in self.texts else None


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of the engine adds to an answer: the records to send, and the counted ids that they take.

    Of an answer that is told as a whole, the ids come without records, and the record at last without ids. ``token_ids`` is
    None for what follows the last token. ``usage``: the object of that name, on the last step of an answer.
    """

    origin: Origin
    records: tuple[dict[str, Any], ...] = ()
    token_ids: tuple[int, ...] | None = None
    usage: Mapping[str, Any] | None = None


class AnswerForm:
    """The form of the answer to one body, streamed or whole. Call ``begin`` before anything else.

    Args:
        body: what was asked.
        request_id: the answer's id is made of it.
        computed_by: the instances that compute it, whom ``system_fingerprint`` is made of.
        show: a token's text and bytes.
        resume: how the answer began elsewhere; of a stream the beginning has been sent.
    """

    def __init__(
        self,
        body: Body,
        request_id: str,
        *,
        computed_by: Sequence[Hello],
        show: ShowToken,
        resume: Resume | None = None,
    ) -> None:
        self._body = body
        self._is_chat = isinstance(body, ChatBody)
        self._show = show
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{request_id}"
        self._created = int(time.time()) if resume is None else resume.created
        self._fingerprint = f"fp_{fingerprint(*computed_by)}"
        self._prompts: dict[int, Sequence[int]] = {}
        self._seed = 0
        # choices that the ids of their prompt have been sent with
        self._told: set[int] = {0} if resume is not None and body.stream else set()
        self.usage = Usage()

    def begin(self, index: int, request: Request) -> None:
        """The prompt of a choice is known; called for each."""
        self._prompts[index // self._body.n] = request.asked_token_ids
        self._seed = request.sampling.seed
        self.usage.prompts.begin(index // self._body.n, request)

    @property
    def origin(self) -> Origin:
        """What the answer began with, once its first prompt is known."""
        return Origin(seed=self._seed, created=self._created, prompt_token_ids=self._prompts[0])

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """One chunk of a stream."""
        self.usage.count(piece)
        choice: dict[str, Any] = {"index": piece.index}
        is_opening = not piece.delta and not piece.tokens and piece.finish_reason is None
        if not self._is_chat:
            choice["text"] = piece.delta.get("text", "")
        else:
            choice["delta"] = {"role": "assistant", "content": ""} if is_opening else piece.delta
        choice["logprobs"] = self._logprobs(piece.tokens) if piece.tokens else None
        choice["finish_reason"] = piece.finish_reason
        if piece.finish_reason is not None:
            choice["matched_stop"] = piece.matched_stop
        if self._body.return_token_ids:
            choice["token_ids"] = [token.output.token_id for token in piece.tokens]
        chunk = self._head("chat.completion.chunk" if self._is_chat else "text_completion", [choice])
        self._tell_prompt(chunk, choice)
        if self._body.include_usage:
            chunk["usage"] = self.usage.record() if self._body.continuous_usage else None
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream with ``include_usage``."""
        chunk = self._head("chat.completion.chunk" if self._is_chat else "text_completion", [])
        return {**chunk, "usage": self.usage.record()}

    def whole(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """The answer that is not streamed, from the pieces of all choices."""
        parts = [_Parts() for _ in range(self._body.num_choices)]
        for piece in pieces:
            self.usage.count(piece)
            parts[piece.index].add(piece)
        choices = [self._choice(index, part) for index, part in enumerate(parts)]
        answer = self._head("chat.completion" if self._is_chat else "text_completion", choices)
        for choice in choices:
            self._tell_prompt(answer, choice)
        return {**answer, "usage": self.usage.record()}

    def _tell_prompt(self, answer: dict[str, Any], choice: dict[str, Any]) -> None:
        """The ids of the prompt, once: with the answer, or with each choice where there are several prompts."""
        is_shared, index = self._body.num_prompts == 1, choice["index"]
        if not self._body.return_token_ids or (0 if is_shared else index) in self._told:
            return
        self._told.add(0 if is_shared else index)
        (answer if is_shared else choice)["prompt_token_ids"] = list(self._prompts[index // self._body.n])

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._body.model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }

    def _choice(self, index: int, parts: _Parts) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index}
        if self._is_chat:
            content = parts.text("content")
            choice["message"] = {
                "role": "assistant",
                "content": content if content is not None or parts.calls else "",
                "reasoning_content": parts.text("reasoning_content"),
                "tool_calls": parts.calls or None,
            }
        else:
            choice["text"] = parts.text("text") or ""
        choice["logprobs"] = self._logprobs(parts.tokens)
        choice["finish_reason"] = parts.finish_reason
        choice["matched_stop"] = parts.matched_stop
        if self._body.return_token_ids:
            choice["token_ids"] = [token.output.token_id for token in parts.tokens]
        return choice

    def _logprobs(self, tokens: Sequence[CountedToken]) -> dict[str, Any] | None:
        if self._body.num_logprobs is None:
            return None
        return self._chat_logprobs(tokens) if self._is_chat else self._completion_logprobs(tokens)

    def _chat_logprobs(self, tokens: Sequence[CountedToken]) -> dict[str, Any]:
        num_top = self._body.num_logprobs or 0
        content = []
        for token in tokens:
            entry = self._entry(token.output.token_id, token.output.logprob)
            entry["top_logprobs"] = [self._entry(*best) for best in token.output.top[:num_top]]
            content.append(entry)
        return {"content": content}

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        text, data = self._show(token_id)
        return {"token": text, "logprob": _number(logprob), "bytes": None if data is None else list(data)}

    def _completion_logprobs(self, tokens: Sequence[CountedToken]) -> dict[str, Any]:
        num_top = self._body.num_logprobs or 0
        tops: list[dict[str, float]] = []
        for token in tokens:
            top: dict[str, float] = {}
            for token_id, logprob in (*token.output.top[:num_top], (token.output.token_id, token.output.logprob)):
                top.setdefault(self._show(token_id)[0], _number(logprob))  # the best of those that look alike
            tops.append(top)
        return {
            "tokens": [self._show(token.output.token_id)[0] for token in tokens],
            "token_logprobs": [_number(token.output.logprob) for token in tokens],
            "top_logprobs": tops,
            "text_offset": [token.text_offset for token in tokens],
        }


def _number(logprob: float | None) -> float:
    return _LOWEST if logprob is None else max(_LOWEST, logprob)
