"""What an answer of a worker means: errors with their cause, whole answers, events of a stream. Pure.

Everything that is not well-formed becomes BadWorkerAnswer here, so that what reaches a client is well-formed always.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast, get_args

from longcat_pd.errors import BadWorkerAnswer, Cause, LongcatError, ServiceError
from longcat_pd.load_balancer.workers import Reply, parse_object

MAX_EVENT_BYTES = 16 << 20  # a worker that never ends an event does not fill our memory

_SERVICE = {code: kind for kind in ServiceError.__subclasses__() for code in kind.codes}
_LOAD = frozenset(("overloaded", "starting", "draining", "too_many_requests"))
_OUR_OWN_FAULT = frozenset(("missing_api_key", "invalid_api_key", "unknown_route", "method_not_allowed"))
_PASSED_ON = ("retry-after", "x-should-retry")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a call has no answer: what follows from it, and what the client gets.

    ``error``: an error of ours to be told; else ``status``, ``headers`` and ``body`` are the worker's own, unchanged.
    """

    cause: Cause
    code: str
    status: int
    retryable: bool
    counts: bool  # against the instance, in its breaker
    error: LongcatError | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    reason: str = ""  # for the log


def failure_of(error: LongcatError) -> Failure:
    """An error that the balancer itself has found."""
    return Failure(
        cause=error.cause,
        code=error.code,
        status=error.status,
        retryable=error.retryable,
        counts=error.cause == "self",
        error=error,
        reason=error.message,
    )


def error_reply(reply: Reply) -> Failure:
    """A worker's answer with a status other than 200."""
    try:
        if reply.status < 400:
            raise BadWorkerAnswer(f"a worker answered with status {reply.status}")
        failure = _error_object(parse_object(reply.body), status=reply.status, body=reply.body)
    except BadWorkerAnswer as error:
        return failure_of(error)
    said = reply.headers.get("x-longcat-cause")
    cause = cast(Cause, said) if said in get_args(Cause) else failure.cause
    return dataclasses.replace(
        failure,
        cause=cause,
        counts=failure.counts and cause == "self",
        headers={name: reply.headers[name] for name in _PASSED_ON if name in reply.headers},
    )


def _error_object(value: Mapping[str, Any], *, status: int | None, body: bytes) -> Failure:
    """The OpenAI error object of a worker. ``status`` None: it came in a stream. Raises BadWorkerAnswer."""
    inner = value.get("error")
    if not isinstance(inner, dict) or not all(isinstance(inner.get(key), str) for key in ("message", "type", "code")):
        raise BadWorkerAnswer("an error of a worker is not an error object")
    code = inner["code"]
    if code in _OUR_OWN_FAULT:  # of the balancer's own call: no client can mend it
        raise BadWorkerAnswer(f"a worker refused the balancer's call: {code}")
    kind = _SERVICE.get(code)
    if status is None:
        status = kind.status if kind is not None else 500
    cause: Cause = "load" if code in _LOAD else "client" if status < 500 else "self"
    return Failure(
        cause=cause,
        code=code,
        status=status,
        retryable=kind is not None and code in kind.retryable_codes,
        counts=cause == "self" and code != "deadline_exceeded",  # the request's time, not the instance's health
        body=body,
        reason=inner["message"],
    )


# ---------------------------------------------------------------------- answers


def check_prefilled(reply: Reply) -> dict[str, Any]:
    """P's 200. Raises BadWorkerAnswer."""
    value = reply.json_object()
    if value.get("object") != "prefill":
        raise BadWorkerAnswer("a prefill instance answered with something else than its account")
    return value


def check_answer(reply: Reply) -> dict[str, Any]:
    """D's 200 of a call that does not stream. Raises BadWorkerAnswer."""
    value = reply.json_object()
    if not is_json(reply.headers) or not isinstance(value.get("choices"), list):
        raise BadWorkerAnswer("a decode instance answered with something else than choices")
    return value


def is_json(headers: Mapping[str, str]) -> bool:
    """Whether the content type is JSON."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


def check_stream_head(headers: Mapping[str, str]) -> None:
    """D's 200 of a call that streams. Raises BadWorkerAnswer."""
    kind = headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "text/event-stream":
        raise BadWorkerAnswer(f"a decode instance answered a stream with content type {kind or 'none'!r}")


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream: the bytes to pass on, and what they say. ``failure``: it is the stream's error."""

    raw: bytes
    finish: str | None = None
    is_done: bool = False
    failure: Failure | None = None


class EventReader:
    """Bytes of a stream in pieces of any size -> whole events. Comments are dropped; half an event never comes out."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._is_over = False
        self._has_chunk = False

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
        if len(self._rest) > MAX_EVENT_BYTES:
            events += self._bad(BadWorkerAnswer(f"an event of a worker is longer than {MAX_EVENT_BYTES} bytes"))
        return events

    def _read(self, block: bytes) -> list[Event]:
        try:
            event = _event(block)
            if event is not None and event.is_done and not self._has_chunk:
                raise BadWorkerAnswer("the stream of a worker ended without a chunk")
        except BadWorkerAnswer as error:
            return self._bad(error)
        if event is None:
            return []
        self._has_chunk = True
        self._is_over = event.is_done or event.failure is not None
        return [event]

    def _bad(self, error: BadWorkerAnswer) -> list[Event]:
        self._is_over = True
        return [Event(b"", failure=failure_of(error))]

    def end(self) -> None:
        """The body has ended. Raises BadWorkerAnswer unless its last event had come."""
        if not self._is_over:
            raise BadWorkerAnswer("the stream of a worker ended without its last event")


def _event(block: bytes) -> Event | None:
    """One event without its empty line; None for comments. Raises BadWorkerAnswer."""
    lines = [line for line in block.split(b"\n") if line and not line.startswith(b":")]
    if not lines:
        return None
    if len(lines) > 1 or not lines[0].startswith(b"data:"):
        raise BadWorkerAnswer("the stream of a worker holds something else than events")
    data = lines[0][5:].strip()
    raw = b"data: " + data + b"\n\n"
    if data == b"[DONE]":
        return Event(raw, is_done=True)
    value = parse_object(data)
    if "error" in value:
        return Event(raw, failure=_error_object(value, status=None, body=data))
    choices = value.get("choices")
    if not isinstance(choices, list):
        raise BadWorkerAnswer("an event of a worker is neither a chunk nor an error")
    return Event(raw, finish=finish_reason(choices))


def finish_reason(choices: list[Any]) -> str | None:
    """The finish reason among choices, if one of them has ended."""
    reasons = [choice["finish_reason"] for choice in choices if isinstance(choice, dict) and choice.get("finish_reason")]
    return str(reasons[-1]) if reasons else None
