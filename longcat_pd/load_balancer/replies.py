"""What an answer of a worker means: errors with their cause and what follows from them, and whole answers. Pure.

Everything that is not well-formed becomes BadWorkerAnswer, here and in ``events.py``, so that what reaches a client is
well-formed always.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast, get_args

from longcat_pd.errors import BadWorkerAnswer, Cause, InvalidRequest, LongcatError, RequestError, ServiceError
from longcat_pd.load_balancer.workers import Reply, WorkerCut, WorkerRefused, WorkerUnreached, parse_object
from longcat_pd.server.errors import error_headers

_SERVICE = {code: kind for kind in ServiceError.__subclasses__() for code in kind.codes}
_NAMES = {
    code: kind.__name__ for root in (RequestError, ServiceError) for kind in root.__subclasses__() for code in kind.codes
}
_LOAD = frozenset(("overloaded", "starting", "draining", "too_many_requests"))
_OUR_OWN_FAULT = frozenset(("missing_api_key", "invalid_api_key", "unknown_route", "method_not_allowed"))
_PASSED_ON = ("retry-after", "x-should-retry")
_BREAKS = frozenset(("rank_lost", "engine_fault", "transfer_failed", "worker_unavailable", "draining"))
_DEATHS = frozenset(("rank_lost", "engine_fault"))


class AnswerCut(BadWorkerAnswer):
    """The body of an answer ended properly, but before the answer did."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer cost, in tokens."""

    prompt: int
    cached: int
    output: int


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

    @property
    def name(self) -> str:
        """Of the typed error: ours, or that of the worker by its code."""
        if self.error is not None:
            return type(self.error).__name__
        return _NAMES.get(self.code, LongcatError.__name__)

    @property
    def is_break(self) -> bool:
        """Whether another pair may go on with the answer: this one cannot, and what it has said of it stands."""
        return self.code in _BREAKS or isinstance(self.error, AnswerCut)

    @property
    def is_refusal(self) -> bool:
        """Whether nobody is where the worker should be: the connection was refused, or could not be made in time."""
        return isinstance(self.error, WorkerRefused | WorkerUnreached)

    @property
    def is_load(self) -> bool:
        """Whether the instance that it is about takes nothing now, whoever tells it."""
        return self.cause == "load" or self.code in _LOAD

    @property
    def is_death(self) -> bool:
        """Whether a worker died under the request, of which the request may be the cause."""
        return self.code in _DEATHS or isinstance(self.error, WorkerCut | AnswerCut)


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


def error_in_stream(value: Mapping[str, Any], body: bytes) -> Failure:
    """The error object that ended a stream; ``body`` is its JSON. Raises BadWorkerAnswer."""
    failure = _error_object(value, status=None, body=body)
    kind = _SERVICE.get(failure.code)  # no headers came with it
    told = error_headers(kind(failure.reason), is_worker=False) if kind is not None else {}
    return dataclasses.replace(failure, headers=told)


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
        status = kind.status if kind is not None else InvalidRequest.status if code in InvalidRequest.codes else 500
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


def usage_of(value: object) -> Usage | None:
    """Of a ``usage`` object. None for anything else: an answer is not refused for what only counters need."""
    if not isinstance(value, dict):
        return None
    details = value.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    counts = [value.get("prompt_tokens"), cached, value.get("completion_tokens")]
    numbers = [count for count in counts if type(count) is int and count >= 0]
    return Usage(*numbers) if len(numbers) == len(counts) else None


def is_json(headers: Mapping[str, str]) -> bool:
    """Whether the content type is JSON."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


def is_event_stream(headers: Mapping[str, str]) -> bool:
    """Whether the content type is an event stream."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "text/event-stream"


def check_stream_head(headers: Mapping[str, str]) -> None:
    """D's 200 of a call that streams. Raises BadWorkerAnswer."""
    if not is_event_stream(headers):
        kind = headers.get("content-type", "") or "none"
        raise BadWorkerAnswer(f"a decode instance answered a stream with content type {kind!r}")


def finish_reason(choices: list[Any]) -> str | None:
    """The finish reason among choices, if one of them has ended."""
    reasons = [choice["finish_reason"] for choice in choices if isinstance(choice, dict) and choice.get("finish_reason")]
    return str(reasons[-1]) if reasons else None
