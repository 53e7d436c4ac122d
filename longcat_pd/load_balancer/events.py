"""Events of a worker's stream: bytes to whole events with what their comments say, and events to what may be passed on.

Owns the comment lines beside an answer. Pure: knows neither calls nor clients. Comments never come out.

    : answer {"seed": …, "created": …, "prompt_digest": "…"}    once, before the first event and the first ids
    : ids BASE64                                                 the ids that a group of events takes, little-endian int32
    : usage {…}                                                  the ``usage`` object, at the end of an answer
"""

from __future__ import annotations

import base64
import binascii
import struct
from contextlib import suppress
from dataclasses import dataclass, replace

from longcat_pd.errors import BadWorkerAnswer
from longcat_pd.load_balancer.replies import (
    AnswerCut,
    Failure,
    Usage,
    error_in_stream,
    failure_of,
    finish_reason,
    usage_of,
)
from longcat_pd.load_balancer.workers import parse_object

MAX_EVENT_BYTES = 16 << 20  # a worker that never ends an event, or a group of them, does not fill our memory
MAX_ANSWER_BYTES = 1 << 30  # the one event of a whole answer, with its log-probs


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What D has fixed for an answer beside the client's body: whoever goes on with it needs the same."""

    seed: int
    created: int  # unix time
    prompt_digest: str

    @classmethod
    def read(cls, text: bytes) -> Origin:
        """Raises BadWorkerAnswer."""
        value = parse_object(text)
        seed, created, digest = (value.get(key) for key in ("seed", "created", "prompt_digest"))
        if type(seed) is not int or type(created) is not int or not isinstance(digest, str) or not digest:
            raise BadWorkerAnswer("a worker says of an answer something else than seed, created and prompt_digest")
        return cls(seed=seed, created=created, prompt_digest=digest)


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream: the bytes to pass on, and what they say. ``failure``: it is the stream's error.

    ``ids``, ``origin`` and ``usage`` are what comments before it say; no ids are said by ``()``. With comments alone there
    are no bytes.
    """

    raw: bytes
    finish: str | None = None
    is_done: bool = False
    failure: Failure | None = None
    ids: tuple[int, ...] | None = None
    origin: Origin | None = None
    usage: Usage | None = None

    @property
    def data(self) -> bytes:
        """Without what makes an event of it."""
        return self.raw[len(b"data: ") : -2]


class EventReader:
    """Bytes of a stream in pieces of any size -> whole events; half an event never comes out.

    Args:
        hears: whether comments of failover are read; else they are dropped as all others but that of usage.
        max_bytes: of one event.
    """

    def __init__(self, *, hears: bool = False, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._rest = bytearray()
        self._is_over = False
        self._has_chunk = False
        self._has_origin = False
        self._hears = hears
        self._max_bytes = max_bytes

    @property
    def is_over(self) -> bool:
        """Whether the last event, ``[DONE]`` or an error, has been read."""
        return self._is_over

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that ``chunk`` completes; nothing after the last one. What is no event is the last, as a failure."""
        start = max(len(self._rest) - 1, 0)  # an empty line may be cut in two
        self._rest += chunk
        events: list[Event] = []
        while not self._is_over and (end := self._rest.find(b"\n\n", start)) >= 0:
            events += self._read(bytes(self._rest[:end]))
            del self._rest[: end + 2]
            start = 0
        if len(self._rest) > self._max_bytes:
            events += self._bad(BadWorkerAnswer(f"an event of a worker is longer than {self._max_bytes} bytes"))
        return events

    def _read(self, block: bytes) -> list[Event]:
        try:
            event = self._event(block)
        except BadWorkerAnswer as error:
            return self._bad(error)
        if event is None:
            return []
        self._has_chunk = self._has_chunk or bool(event.raw)
        self._is_over = event.is_done or event.failure is not None
        return [event]

    def _event(self, block: bytes) -> Event | None:
        lines = [line for line in block.split(b"\n") if line]
        comments = [line[1:].strip() for line in lines if line.startswith(b":")]
        origin, ids = self._heard(comments)
        usage = _usage_in(comments)
        data = [line for line in lines if not line.startswith(b":")]
        if not data:
            is_heard = (ids, origin, usage) != (None, None, None)
            return Event(b"", ids=ids, origin=origin, usage=usage) if is_heard else None
        if len(data) > 1 or not data[0].startswith(b"data:"):
            raise BadWorkerAnswer("the stream of a worker holds something else than events")
        event = _read_data(data[0][5:].strip(), is_first=not self._has_chunk)
        return replace(event, ids=ids, origin=origin, usage=usage)

    def _heard(self, comments: list[bytes]) -> tuple[Origin | None, tuple[int, ...] | None]:
        """What the comments before one event say. Raises BadWorkerAnswer."""
        origin: Origin | None = None
        ids: tuple[int, ...] | None = None
        for kind, _, text in (comment.partition(b" ") for comment in comments if self._hears):
            if kind == b"answer":
                if self._has_origin or self._has_chunk:
                    raise BadWorkerAnswer("a worker says of an answer what it is when that has begun")
                origin, self._has_origin = Origin.read(text), True
            elif kind == b"ids":
                if not self._has_origin:
                    raise BadWorkerAnswer("a worker says ids of an answer of which it has said nothing else")
                ids = (ids or ()) + _unpacked(text.strip())
        return origin, ids

    def _bad(self, error: BadWorkerAnswer) -> list[Event]:
        self._is_over = True
        return [Event(b"", failure=failure_of(error))]

    def end(self) -> None:
        """The body has ended. Raises AnswerCut unless its last event had come."""
        if not self._is_over:
            raise AnswerCut("the stream of a worker ended without its last event")


def _unpacked(text: bytes) -> tuple[int, ...]:
    """Raises BadWorkerAnswer."""
    try:
        packed = base64.b64decode(text, validate=True)
        ids = struct.unpack(f"<{len(packed) // 4}i", packed)
    except (binascii.Error, struct.error):
        raise BadWorkerAnswer("the ids that a worker says are none") from None
    if ids and min(ids) < 0:
        raise BadWorkerAnswer(f"a worker says the id {min(ids)}")
    return ids


def _usage_in(comments: list[bytes]) -> Usage | None:
    """What the comments before one event say that the answer cost; what is malformed says nothing."""
    for kind, _, text in (comment.partition(b" ") for comment in comments):
        if kind == b"usage":
            with suppress(BadWorkerAnswer):
                return usage_of(parse_object(text))
    return None


def _read_data(data: bytes, *, is_first: bool) -> Event:
    """Raises BadWorkerAnswer."""
    raw = b"data: " + data + b"\n\n"
    if data == b"[DONE]":
        if is_first:
            raise BadWorkerAnswer("the stream of a worker ended without a chunk")
        return Event(raw, is_done=True)
    value = parse_object(data)
    if "error" in value:
        return Event(raw, failure=error_in_stream(value, data))
    choices = value.get("choices")
    if not isinstance(choices, list):
        raise BadWorkerAnswer("an event of a worker is neither a chunk nor an error")
    return Event(raw, finish=finish_reason(choices))


class Groups:
    """Events as they come -> those that are passed on together, so that what a client has is at any time what ids say.

    A stream of a worker that has said the answer's origin: events wait for the one with their ids, and from the first
    finish reason on for ``[DONE]``. Without the origin nothing waits. Of a whole answer ids alone come out as they
    come, and the answer with ``[DONE]``.
    """

    def __init__(self, *, is_whole: bool = False) -> None:
        self._is_whole = is_whole
        self._waits = is_whole
        self._is_ending = False
        self._held: list[Event] = []
        self._num_bytes = 0

    def take(self, events: list[Event]) -> list[Event]:
        """Those that may be passed on now, in their order. Raises BadWorkerAnswer when too much waits."""
        free: list[Event] = []
        for event in events:
            self._waits = self._waits or event.origin is not None
            self._is_ending = self._is_ending or bool(event.finish) or (self._is_whole and bool(event.raw))
            self._held.append(event)
            self._num_bytes += len(event.raw)
            if self._may_go(event):
                free += self._held
                self._held, self._num_bytes = [], 0
        if self._num_bytes > (MAX_ANSWER_BYTES if self._is_whole else MAX_EVENT_BYTES):
            raise BadWorkerAnswer(f"a worker sent {self._num_bytes} bytes of events and did not say their ids")
        return free

    def _may_go(self, last: Event) -> bool:
        if last.is_done or not self._waits:
            return True
        if self._is_ending:
            return False
        # what an event takes stands before it: ids alone belong to the next one
        return (self._is_whole or bool(last.raw)) and any(event.ids is not None for event in self._held)
