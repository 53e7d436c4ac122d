"""Finding tool calls in the model's answer, however the text is cut.

Owns where a block begins and ends, the white space around blocks, and what becomes of a malformed or unfinished one. The
blocks themselves are read by ``json_call.py`` (passed on as they are generated) and ``xml_call.py`` (as a whole).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from longcat_pd.server.json_call import JsonCall
from longcat_pd.server.markup import CALL_CLOSE, CALL_OPEN, open_tail
from longcat_pd.server.xml_call import argument_schemas, read_block

Style = Literal["longcat", "longcat_xml"]


@dataclass(frozen=True, slots=True)
class Text:
    """Ordinary content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegan:
    """Call number ``index`` of the answer is of this function."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Event = Text | CallBegan | CallArguments


class ToolCallParser:
    """Reads the content of one answer.

    Args:
        style: ``longcat`` is JSON in the block, ``longcat_xml`` keys and values in tags.
        tools: as the client sent them; their schemas say which values are strings.
        only_one: everything behind the first complete call is ignored.
    """

    def __init__(self, style: Style, tools: Iterable[Mapping[str, Any]], *, only_one: bool = False) -> None:
        self._style = style
        self._schemas = argument_schemas(tools)
        self._only_one = only_one
        self._buffer = ""
        self._call: JsonCall | None = None
        self._is_in_block = False
        self._has_begun = False  # whether anything of the open block has been passed on
        self._space: str | None = None  # white space behind a call, dropped if only a call that begins or the end follows
        self._num_calls = 0
        self.num_complete = 0

    @property
    def is_done(self) -> bool:
        """Whether nothing further will be read."""
        return self._only_one and self.num_complete > 0

    def push(self, text: str) -> list[Event]:
        """Read more text."""
        self._buffer += text
        events: list[Event] = []
        while self._buffer and not self.is_done and self._advance(events):
            pass
        return events

    def finish(self, *, was_cut: bool) -> list[Event]:
        """The text has ended; ``was_cut`` by the limit of tokens and not by the model."""
        rest, self._buffer = self._buffer, ""
        events: list[Event] = []
        if self.is_done:
            return events
        if self._call is not None:
            self._finish_json(self._call, events)
        elif self._is_in_block:
            end = len(rest) - open_tail(rest, (CALL_CLOSE,))
            call = None if was_cut else read_block(rest[:end], self._schemas)
            if call is None:
                self._content(CALL_OPEN + rest, events)
            else:
                self._whole_call(*call, events)
                self._content(rest[end:], events)
        else:
            self._content(rest, events)
        return events

    def _advance(self, events: list[Event]) -> bool:
        """One move. False: more text is needed."""
        if self._call is not None:
            return self._read_json(self._call, events)
        if self._is_in_block:
            return self._read_xml(events)
        place = self._buffer.find(CALL_OPEN)
        if place < 0:
            place = len(self._buffer) - open_tail(self._buffer, (CALL_OPEN,))
            self._content(self._buffer[:place], events)
            self._buffer = self._buffer[place:]
            return False
        self._content(self._buffer[:place], events)
        self._buffer = self._buffer[place + len(CALL_OPEN) :]
        self._is_in_block, self._has_begun = True, False
        self._call = JsonCall() if self._style == "longcat" else None
        return True

    def _content(self, text: str, events: list[Event]) -> None:
        if self._space is not None:
            text = self._space + text
            self._space = text if not text.strip() else None
            if self._space is not None:
                return
        if text:
            events.append(Text(text))

    def _read_json(self, call: JsonCall, events: list[Event]) -> bool:
        for place, character in enumerate(self._buffer):
            if not call.push(character):
                self._pass_on(call, events)
                # what came behind the object's brace may be the beginning of something else
                self._buffer = call.behind + self._buffer[place:]
                self._end_block()
                if not self._has_begun:
                    self._content(CALL_OPEN + call.raw.removesuffix(call.behind), events)
                return True
            if call.is_complete:
                self._buffer = self._buffer[place + 1 :]
                self._close_json(call, events)
                return True
        self._buffer = ""
        self._pass_on(call, events)
        return False

    def _pass_on(self, call: JsonCall, events: list[Event]) -> None:
        """What can be sent of an open block: nothing before both the name and the beginning of the arguments are there."""
        if not call.name or not call.has_arguments:
            return
        if not self._has_begun:
            self._begin(call.name, events)
        text = call.take_arguments()
        if text:
            events.append(CallArguments(self._num_calls - 1, text))

    def _begin(self, name: str, events: list[Event]) -> None:
        events.append(CallBegan(self._num_calls, name))
        self._num_calls += 1
        self._has_begun = True
        self._space = ""

    def _close_json(self, call: JsonCall, events: list[Event]) -> None:
        self._pass_on(call, events)
        if not self._has_begun:
            self._begin(call.name or "", events)
            events.append(CallArguments(self._num_calls - 1, "{}"))
        self._complete()

    def _finish_json(self, call: JsonCall, events: list[Event]) -> None:
        self._pass_on(call, events)
        if call.is_whole:
            behind = call.behind
            self._close_json(call, events)
            self._content(behind, events)
        elif not self._has_begun:
            self._content(CALL_OPEN + call.raw, events)

    def _read_xml(self, events: list[Event]) -> bool:
        end = self._buffer.find(CALL_CLOSE)
        if end < 0:
            return False
        block, self._buffer = self._buffer[:end], self._buffer[end + len(CALL_CLOSE) :]
        call = read_block(block, self._schemas)
        self._end_block()
        if call is None:
            self._content(CALL_OPEN + block + CALL_CLOSE, events)
        else:
            self._whole_call(*call, events)
        return True

    def _whole_call(self, name: str, arguments: str, events: list[Event]) -> None:
        self._begin(name, events)
        events.append(CallArguments(self._num_calls - 1, arguments))
        self._complete()

    def _complete(self) -> None:
        self._end_block()
        self.num_complete += 1

    def _end_block(self) -> None:
        self._is_in_block, self._call = False, None
