"""Separating the model's reasoning from its answer, however the text is cut.

Owns where a block begins and ends, and the newline at each of its borders. Does not know tokens or tool calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from longcat_pd.server.markup import THINK_CLOSE, THINK_OPEN, open_tail


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of text: of the reasoning, or of what comes after it."""

    text: str
    is_reasoning: bool


class _State(Enum):
    START = 0  # the output may still begin with the opening tag
    INSIDE = 1
    CLOSED = 2  # one newline behind the closing tag belongs to the block
    OUTSIDE = 3


class ReasoningSplitter:
    """Reads the raw text of one answer.

    Args:
        prompt_end: the text at the end of the prompt; when it ends in an open block, the output starts inside.
        keeps_markup: the spans hold tags and border newlines too, so that they join to the raw text.
    """

    def __init__(self, prompt_end: str, *, keeps_markup: bool = False) -> None:
        bare = prompt_end.rstrip()
        self._is_open = bare.endswith(THINK_OPEN)
        self._drops_newline = "\n" not in prompt_end[len(bare) :]
        self._keeps_markup = keeps_markup
        self._state = _State.START
        self._buffer = ""
        self._num_read = 0
        self.closed_at: int | None = None  # characters of raw text up to and with the closing tag

    @property
    def is_inside(self) -> bool:
        """Whether everything read so far is reasoning."""
        return self._state is _State.INSIDE or (self._state is _State.START and self._is_open)

    def push(self, text: str) -> list[Span]:
        """Read more text."""
        self._num_read += len(text)
        self._buffer += text
        spans: list[Span] = []
        while self._buffer and self._advance(spans):
            pass
        return [span for span in spans if span.text]

    def finish(self) -> list[Span]:
        """The text has ended: what was held back is ordinary text of where it stands."""
        rest, self._buffer = self._buffer, ""
        return [Span(rest, self.is_inside)] if rest else []

    def _advance(self, spans: list[Span]) -> bool:
        """One move. False: more text is needed."""
        if self._state is _State.START:
            return self._start(spans)
        if self._state is _State.INSIDE:
            return self._inside(spans)
        if self._state is _State.CLOSED:
            self._drop_newline(spans)
            self._state = _State.OUTSIDE
            return True
        spans.append(Span(self._buffer, False))
        self._buffer = ""
        return False

    def _start(self, spans: list[Span]) -> bool:
        if self._buffer.startswith(THINK_OPEN):
            self._take(spans, len(THINK_OPEN), is_markup=True)
            self._state, self._drops_newline = _State.INSIDE, True
        elif THINK_OPEN.startswith(self._buffer):
            return False
        else:
            self._state = _State.INSIDE if self._is_open else _State.OUTSIDE
        return True

    def _inside(self, spans: list[Span]) -> bool:
        if self._drops_newline:
            self._drop_newline(spans)
            self._drops_newline = False
            return True
        end = self._buffer.find(THINK_CLOSE)
        if end < 0:
            held = open_tail(self._buffer, (THINK_CLOSE, "\n" + THINK_CLOSE))
            self._take(spans, len(self._buffer) - held)
            return False
        border = end - 1 if self._buffer[:end].endswith("\n") else end
        self._take(spans, border)
        self._take(spans, end - border + len(THINK_CLOSE), is_markup=True)
        self.closed_at = self._num_read - len(self._buffer)
        self._state = _State.CLOSED
        return True

    def _drop_newline(self, spans: list[Span]) -> None:
        if self._buffer.startswith("\n"):
            self._take(spans, 1, is_markup=True)

    def _take(self, spans: list[Span], length: int, *, is_markup: bool = False) -> None:
        if self._keeps_markup or not is_markup:
            spans.append(Span(self._buffer[:length], True))
        self._buffer = self._buffer[length:]
