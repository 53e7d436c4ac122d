"""The exceptions of the product, each with what a client sees of it.

Owns the closed set of error codes, their HTTP status, OpenAI ``type`` and whether the balancer may try another pair.
Knows nothing of HTTP libraries: ``server/errors.py`` turns any exception into an answer.

    LongcatError
    +- ConfigError              start only; exit status 2
    +- RequestError             the client's fault; never retried
    |  +- InvalidRequest        400
    |  +- AuthenticationFailed  401
    |  +- NotFound              404
    |  +- NotAccepted           405, 413, 415
    |  +- TooManyRequests       429
    +- ServiceError             ours; ``retryable`` is for the balancer
       +- Overloaded            503
       +- WorkerUnavailable     503
       +- TransferFailed        502
       +- BadWorkerAnswer       502
       +- DeadlineExceeded      504
       +- RankLost              500
       +- EngineFault           500
"""

from __future__ import annotations

from typing import ClassVar, Literal

Cause = Literal["client", "load", "self", "peer"]


class LongcatError(Exception):
    """Root of the tree. ``status``, ``kind`` (OpenAI ``type``) and ``codes`` belong to the class, ``code`` to the raise.

    Args:
        message: what is wrong, with the numbers.
        code: one of ``codes``; the first of them if not given.
        param: path of the culprit in the request or the configuration, such as ``messages[2].content``.
    """

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    codes: ClassVar[tuple[str, ...]] = ("engine_fault",)
    retryable_codes: ClassVar[frozenset[str]] = frozenset()
    should_retry: ClassVar[bool | None] = None  # x-should-retry of the answer; None: the header is absent
    cause: Cause = "self"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.codes[0]
        self.param = param
        self.retry_after_s: int | None = None
        assert self.code in self.codes, f"{type(self).__name__} has no code {self.code}"

    @property
    def retryable(self) -> bool:
        """Whether the balancer may try another attempt after this error."""
        return self.code in self.retryable_codes


class ConfigError(LongcatError):
    """The configuration, ports, memory or peers do not allow a start. Exit status 2."""

    codes = ("config",)


class RequestError(LongcatError):
    """The client's fault."""

    kind = "invalid_request_error"
    cause: Cause = "client"


class InvalidRequest(RequestError):
    """400: the body says something that cannot be done."""

    status = 400
    codes = (
        "invalid_value",
        "invalid_json",
        "missing_field",
        "invalid_type",
        "unsupported_parameter",
        "unsupported_content_part",
        "unsupported_combination",
        "context_length_exceeded",
        "tokenizer_missing",
    )


class AuthenticationFailed(RequestError):
    """401: no key, or not one of ours."""

    status = 401
    kind = "authentication_error"
    codes = ("missing_api_key", "invalid_api_key")


class NotFound(RequestError):
    """404: no such route, no such model."""

    status = 404
    kind = "not_found_error"
    codes = ("unknown_route", "model_not_found")


class NotAccepted(RequestError):
    """405, 413 or 415: the envelope of the request is refused."""

    codes = ("method_not_allowed", "body_too_large", "unsupported_media_type")
    _statuses: ClassVar[dict[str, int]] = {
        "method_not_allowed": 405,
        "body_too_large": 413,
        "unsupported_media_type": 415,
    }

    @property
    def status(self) -> int:  # type: ignore[override]
        """HTTP status of the code."""
        return self._statuses[self.code]


class TooManyRequests(RequestError):
    """429: the front is full; no worker was called."""

    status = 429
    kind = "rate_limit_error"
    codes = ("too_many_requests",)
    should_retry = True
    cause: Cause = "load"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.retry_after_s = 1


class ServiceError(LongcatError):
    """Ours, not the client's."""


class Overloaded(ServiceError):
    """503: no room in the queue, or none of the wanted room within ``queue_timeout_s``."""

    status = 503
    codes = ("overloaded",)
    retryable_codes = frozenset({"overloaded"})
    should_retry = True
    cause: Cause = "load"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = min(max(retry_after_s, 1), 30)


class WorkerUnavailable(ServiceError):
    """503: no usable pair, a worker that refused, is starting or is draining."""

    status = 503
    codes = ("worker_unavailable", "starting", "draining")
    retryable_codes = frozenset({"worker_unavailable", "starting", "draining"})
    should_retry = True

    def __init__(self, message: str, *, code: str = "worker_unavailable", param: str | None = None) -> None:
        super().__init__(message, code=code, param=param)
        self.retry_after_s = 5
        if code in ("starting", "draining"):
            self.cause = "load"


class TransferFailed(ServiceError):
    """502: the hand-over of the cache broke. ``peer_gone`` marks the echo of the other side's failure."""

    status = 502
    codes = ("transfer_failed",)
    retryable_codes = frozenset({"transfer_failed"})
    should_retry = True

    def __init__(self, message: str, *, peer_gone: bool = False) -> None:
        super().__init__(message)
        if peer_gone:
            self.cause = "peer"


class BadWorkerAnswer(ServiceError):
    """502: a worker answered nonsense."""

    status = 502
    codes = ("bad_worker_answer",)
    should_retry = True


class DeadlineExceeded(ServiceError):
    """504: the request's own time is over."""

    status = 504
    codes = ("deadline_exceeded",)
    should_retry = False


class RankLost(ServiceError):
    """500: a rank process of the instance ended or went silent; the instance ends."""

    codes = ("rank_lost",)
    should_retry = True


class EngineFault(ServiceError):
    """500: a defect of ours."""

    codes = ("engine_fault",)
    should_retry = False
