"""What is told of each generation request: one log line at its end, and its part of the metrics.

Owns outcomes and durations of requests. Times come from the engine's own life events where it gives them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from longcat_pd import log
from longcat_pd.errors import LongcatError
from longcat_pd.metrics import RequestMetrics
from longcat_pd.server.requests import Call


@dataclass(kw_only=True)
class Record:
    """One request as it goes; written by the face."""

    started: float
    num_prompt: int = 0
    num_output: int = 0
    finish: str = "engine_fault"
    first_token: float | None = None
    timings_ms: dict[str, float] = field(default_factory=dict)


class Journal:
    """Tells of requests.

    Args:
        metrics: of this process; None where nobody reads them.
        now: the service's clock.
    """

    def __init__(self, metrics: RequestMetrics | None, now: Callable[[], float]) -> None:
        self._metrics = metrics
        self._now = now
        self.last_token: float | None = None  # when any request got a token
        self._log = log.logger()

    @contextmanager
    def request(self, call: Call) -> Iterator[Record]:
        """The life of one request, whatever its end."""
        record = Record(started=self._now())
        try:
            yield record
        except LongcatError as error:
            self._failed(record, error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self._cancelled(record)
            raise
        self._finished(record, call)

    def token(self, record: Record) -> None:
        """The request has got tokens."""
        self.last_token = self._now()
        if record.first_token is None:
            record.first_token = self.last_token

    def _finished(self, record: Record, call: Call) -> None:
        spans = {f"{name}_ms": round(value, 3) for name, value in record.timings_ms.items()}
        seconds = self._now() - record.started
        first = None if record.first_token is None else record.first_token - record.started
        self._log.info(
            "request_finished",
            transfer=None if call.transfer is None else call.transfer.id,
            peer=None if call.transfer is None else call.transfer.peer,
            attempt=call.attempt,
            prompt=record.num_prompt,
            output=record.num_output,
            finish=record.finish,
            ttft_ms=None if first is None else round(1000 * first, 3),
            tpot_ms=None if first is None else round(1000 * _per_token(record, seconds - first), 3),
            **spans,
        )
        if self._metrics is None:
            return
        self._count(record.finish)
        self._metrics.prompt_tokens_total.inc(record.num_prompt)
        self._metrics.output_tokens_total.inc(record.num_output)
        self._metrics.request_seconds.observe(seconds)
        if first is not None:
            self._metrics.first_token_seconds.observe(first)
        if first is not None and record.num_output > 1:
            self._metrics.per_token_seconds.observe(_per_token(record, seconds - first))
        histograms = {
            "queue": self._metrics.queue_seconds,
            "prefill": self._metrics.prefill_seconds,
            "transfer": self._metrics.transfer_seconds,
        }
        for name, histogram in histograms.items():
            if name in record.timings_ms:
                histogram.observe(record.timings_ms[name] / 1000)

    def _failed(self, record: Record, error: LongcatError) -> None:
        self._count(error.code)
        if self._metrics is not None and error.code in ("deadline_exceeded", "draining"):
            self._metrics.cancels_total("deadline" if error.code == "deadline_exceeded" else "drain").inc()
        write = self._log.error if error.status >= 500 and error.cause == "self" else self._log.warning
        write(
            "request_failed",
            status=error.status,
            code=error.code,
            cause=error.cause,
            reason=error.message if error.status >= 500 else None,  # a client's error quotes the client
            ms=round(1000 * (self._now() - record.started), 3),
        )

    def _cancelled(self, record: Record) -> None:
        self._count("cancelled")
        if self._metrics is not None:
            self._metrics.cancels_total("client").inc()
        hop = "waiting" if record.first_token is None else "decoding"
        self._log.info("request_cancelled", by="client", hop=hop)

    def _count(self, outcome: str) -> None:
        if self._metrics is not None:
            self._metrics.requests_total(outcome).inc()


def _per_token(record: Record, seconds: float) -> float:
    return seconds / max(record.num_output - 1, 1)
