"""One answer as it comes into being: tokens in, pieces of a message out.

Owns the way from generated tokens to text, stop strings, reasoning, tool calls, counts and the finish reason. The result
does not depend on how the tokens were grouped. Knows no JSON of answers: that is ``answers.py``.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from longcat_pd.engine.request import Delta, FinishReason, TokenOutput
from longcat_pd.server.reasoning import ReasoningSplitter, Span
from longcat_pd.server.stops import StopFinder
from longcat_pd.server.text import TextDecoder
from longcat_pd.server.tool_calls import CallArguments, CallBegan, Event, Text, ToolCallParser

MAX_HELD = 256  # tokens that wait for their text: with 20 log-probs each takes 1.6 KB of an event


@dataclass(frozen=True, slots=True)
class CountedToken:
    """A token of the answer, and where its text begins in the raw text of it."""

    output: TokenOutput
    text_offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A step of one choice. ``delta`` has one field of the message, or none: in the first piece, which has no tokens, in
    the last, and in one that tells many tokens whose text is held back.

    ``tokens`` are the counted tokens since the piece before; the counts run. ``finish_reason`` is on the last piece.
    ``ends_step``: of all pieces that the same tokens made, this is the last one.
    """

    index: int
    delta: Mapping[str, Any]
    tokens: tuple[CountedToken, ...]
    num_tokens: int
    num_reasoning_tokens: int
    finish_reason: str | None = None
    matched_stop: str | int | None = None
    ends_step: bool = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of its tokens."""
        return tuple(token.output.token_id for token in self.tokens)


class ChoiceText:
    """Reads what the engine generates for one choice.

    Args:
        index: the choice's number.
        decoder: of this answer; where it has no text, tokens show by an empty one.
        stops: of this answer.
        splitter: None where reasoning is not looked for.
        tools: None where tool calls are not looked for.
        reasoning_field: where reasoning goes: ``reasoning_content`` or ``content``.
        content_field: ``content``, or ``text`` for completions.
    """

    def __init__(
        self,
        index: int,
        decoder: TextDecoder,
        *,
        stops: StopFinder,
        splitter: ReasoningSplitter | None = None,
        tools: ToolCallParser | None = None,
        reasoning_field: str = "reasoning_content",
        content_field: str = "content",
    ) -> None:
        self._index = index
        self._decoder = decoder
        self._stops = stops
        self._splitter = splitter
        self._tools = tools
        self._fields = {True: reasoning_field, False: content_field}
        self._ends: list[int] = []  # characters of raw text after each token
        self._pending: list[CountedToken] = []
        self._has_begun = False
        self._finish: tuple[str, str | int | None] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the last piece has been made; nothing more is to be read."""
        return self._finish is not None

    @property
    def finish_reason(self) -> str:
        """Why it is finished."""
        assert self._finish is not None, "only a finished choice has a reason"
        return self._finish[0]

    @property
    def num_tokens(self) -> int:
        """Counted tokens so far."""
        return len(self._ends)

    def push(self, delta: Delta) -> list[Piece]:
        """Read what the engine generated; the first call makes the piece that begins the choice."""
        is_first, self._has_begun = not self._has_begun, True
        deltas: list[dict[str, Any]] = []
        for place, token in enumerate(delta.tokens):
            is_last = place == len(delta.tokens) - 1
            is_stop = is_last and delta.matched_stop_token == token.token_id
            self._read(token, deltas, is_stop=is_stop)
            if self.is_finished:
                break
        if delta.finish is not None and not self.is_finished:
            self._end(delta.finish, delta.matched_stop_token, deltas)
        if self._pending and not self._decoder.has_text and not self.is_finished:
            deltas.append({self._fields[False]: ""})  # tokens have ids and nothing else: they show at once
        pieces = self._opening(has_text=bool(deltas)) if is_first else []
        pieces += [self._piece(d) for d in _joined(deltas)]
        if len(self._pending) >= MAX_HELD and not self.is_finished:
            pieces.append(self._piece({}))
        if self.is_finished:
            pieces.append(self._piece({}, is_last=True))
        if pieces:
            pieces[-1] = replace(pieces[-1], ends_step=True)
        return pieces

    def replay(self, token_ids: Iterable[int], *, were_sent: bool) -> list[Piece]:
        """Read what was generated elsewhere, before anything else. ``were_sent``: with all that came of it; then only the
        last piece is left, if the answer is finished by that."""
        pieces = self.push(Delta(tuple(map(TokenOutput, token_ids))))
        if not were_sent:
            return pieces
        self._pending = []
        return [replace(pieces[-1], tokens=())] if self.is_finished else []

    def _opening(self, *, has_text: bool) -> list[Piece]:
        """The first token shows at once: by the role, or by an empty text where none is released yet."""
        if self._fields[False] == "content":
            return [self._piece({}, takes_tokens=False)]
        return [] if has_text or self.is_finished else [self._piece({"text": ""})]

    def _read(self, token: TokenOutput, deltas: list[dict[str, Any]], *, is_stop: bool) -> None:
        """The text of a stop token is cut or kept like a stop string, which is not looked for in it."""
        text = "" if is_stop and not self._stops.keeps_match else self._decoder.push(token.token_id)
        start = self._ends[-1] if self._ends else 0
        self._ends.append(start + len(text))
        self._pending.append(CountedToken(token, start))
        released, stop = (self._stops.flush() + text, None) if is_stop else self._stops.push(text)
        self._parse(released, deltas)
        if self._tools is not None and self._tools.is_done:
            self._finish = ("tool_calls", None)
        elif stop is not None:
            self._close(deltas, was_cut=False)
            self._finish = ("stop", stop)

    def _end(self, finish: FinishReason, stop_token: int | None, deltas: list[dict[str, Any]]) -> None:
        self._parse(self._stops.flush(), deltas)
        is_done = self._tools is not None and self._tools.is_done
        self._close(deltas, was_cut=finish is FinishReason.LENGTH)
        has_ended_itself = finish is FinishReason.STOP and stop_token is None
        if is_done or (has_ended_itself and self._tools is not None and self._tools.num_complete):
            self._finish = ("tool_calls", None)
        else:
            self._finish = (finish.value, stop_token)

    def _parse(self, text: str, deltas: list[dict[str, Any]]) -> None:
        if text:
            self._split([Span(text, False)] if self._splitter is None else self._splitter.push(text), deltas)

    def _close(self, deltas: list[dict[str, Any]], *, was_cut: bool) -> None:
        if self._splitter is not None:
            self._split(self._splitter.finish(), deltas)
        if self._tools is not None:
            self._add_events(self._tools.finish(was_cut=was_cut), deltas)

    def _split(self, spans: list[Span], deltas: list[dict[str, Any]]) -> None:
        for span in spans:
            if self._tools is None or span.is_reasoning:
                deltas.append({self._fields[span.is_reasoning]: span.text})
            else:
                self._add_events(self._tools.push(span.text), deltas)

    def _add_events(self, events: list[Event], deltas: list[dict[str, Any]]) -> None:
        for event in events:
            match event:
                case Text(text):
                    deltas.append({self._fields[False]: text})
                case CallBegan(index, name):
                    function = {"name": name, "arguments": ""}
                    identity = f"call_{secrets.token_hex(12)}"
                    call = {"index": index, "id": identity, "type": "function", "function": function}
                    deltas.append({"tool_calls": [call]})
                case CallArguments(index, text):
                    deltas.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})

    def _piece(self, delta: Mapping[str, Any], *, takes_tokens: bool = True, is_last: bool = False) -> Piece:
        tokens: tuple[CountedToken, ...] = ()
        if takes_tokens:
            tokens, self._pending = tuple(self._pending), []
        reason, stop = self._finish if is_last and self._finish is not None else (None, None)
        return Piece(
            index=self._index,
            delta=delta,
            tokens=tokens,
            num_tokens=self.num_tokens,
            num_reasoning_tokens=self._num_reasoning_tokens(),
            finish_reason=reason,
            matched_stop=stop,
        )

    def _num_reasoning_tokens(self) -> int:
        if self._splitter is None:
            return 0
        if self._splitter.closed_at is not None:
            return bisect_left(self._ends, self._splitter.closed_at) + 1
        return self.num_tokens if self._splitter.is_inside else 0


def _joined(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours of the same text field in one."""
    joined: list[dict[str, Any]] = []
    for delta in deltas:
        (field, value), *_ = delta.items()
        if joined and field in joined[-1] and isinstance(value, str):
            joined[-1] = {field: joined[-1][field] + value}
        else:
            joined.append(delta)
    return joined
