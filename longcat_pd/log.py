"""The log: one line for each event, ``time level event key=value ...``.

Owns the form of a line, its level and where it goes, and the request id that stands on every line about a request.
Does not know which events there are. Callers never pass prompts, texts, token ids or keys.
"""

from __future__ import annotations

import contextvars
import json
import sys
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Literal, TextIO, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger

Level = Literal["debug", "info", "warning", "error"]

_LEVELS: dict[Level, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_MOST_SHOWN = 200  # characters of what a stranger said
_request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)


def set_up(
    *, level: Level = "info", path: str | None = None, stream: TextIO | None = None, rank: int | None = None
) -> TextIO:
    """Say once, at the start of a process, from which level on lines are written and where; that stream is returned.

    Args:
        path: a file that lines are appended to; its folder is made. Wins over ``stream``.
        stream: an open text stream; standard error if neither is given.
        rank: of a process that writes into the log of its instance; stands on every line.
    """
    target = stream or sys.stderr
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        target = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open as long as the process
    structlog.configure(
        processors=[partial(_add_facts, rank), structlog.processors.format_exc_info, _render],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(target),
        cache_logger_on_first_use=False,
    )
    return target


def logger() -> FilteringBoundLogger:
    """A logger: ``logger().info("ready", seconds=3.2)``. Follows ``set_up`` also when it was made before."""
    return cast(FilteringBoundLogger, structlog.get_logger())


def as_written(time: datetime) -> str:
    """A time as lines begin with it: UTC with milliseconds, so that the order of texts is the order of times."""
    return time.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def bind_request(request_id: str) -> None:
    """Put the request id on all further lines of the calling task and of the tasks that it starts."""
    _request_id.set(request_id)


def request_id() -> str | None:
    """The request that the calling task is about."""
    return _request_id.get()


class Refusals:
    """Records that are refused: the first is told of, then the 2nd, 4th, 8th ..., so that nobody fills the log."""

    def __init__(self) -> None:
        self._count = 0

    def tell(self, peer: str, reason: str) -> None:
        """One more. ``peer``: its name, or under which name it connected."""
        self._count += 1
        if self._count & (self._count - 1) == 0:
            logger().warning("malformed_record", peer=peer[:_MOST_SHOWN], reason=reason[:_MOST_SHOWN], count=self._count)


def _add_facts(rank: int | None, _logger: Any, _method: str, event: EventDict) -> EventDict:
    """What stands on a line though nobody who writes one says it."""
    if rank is not None:
        event.setdefault("rank", rank)
    current = _request_id.get()
    if current is not None and "request" not in event:
        event["request"] = current
    return event


def _render(_logger: Any, method: str, event: EventDict) -> str:
    name = event.pop("event")
    trace = event.pop("exception", None)
    # "The server is fired up ..." is an event name that scripts look for verbatim, so names are never quoted
    line = " ".join(
        [
            as_written(datetime.now(timezone.utc)),
            method,
            str(name),
            *(f"{key}={_value(value)}" for key, value in event.items()),
        ]
    )
    return f"{line}\n{trace}" if trace else line


def _value(value: object) -> str:
    """One value without a line break: bare where that reads back, else quoted like JSON."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, (list, tuple)):
        return ",".join(_value(v) for v in value) or "none"
    text = str(value)
    if text and text.isprintable() and not any(c in text for c in ' "='):
        return text
    return json.dumps(text, ensure_ascii=False)
