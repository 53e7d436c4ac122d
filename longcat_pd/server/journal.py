"""What is told of each generation request: one log line at its end, its part of the metrics, and its record.

Owns outcomes and durations of requests. Times come from the engine's own life events where it gives them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from longcat_pd import log
from longcat_pd.engine.request import Hop, Life, Request
from longcat_pd.errors import EngineFault, LongcatError
from longcat_pd.metrics import RequestMetrics
from longcat_pd.server.requests import Call
from longcat_pd.server.service import NOTHING, EndedBody, Kept
from longcat_pd.server.take import Take
from longcat_pd.server.tally import PromptTally

_HOPS: tuple[Hop, ...] = get_args(Hop)
_CUT_BY = {"deadline_exceeded": "deadline", "draining": "drain"}
_SPANS = ("queue", "prefill", "transfer")
KEPT = 50  # requests whose lives can be looked at


@dataclass(kw_only=True)
class Record:
    """One body as it goes; written by the face. ``left_at``: when its requests began to be closed. ``outcome`` and
    ``ended``: None as long as it goes. ``error``: the name of the typed error that it ended with. ``unread``: an error that
    cut it, which the client did not wait for or read.
    """

    started: float
    call: Call
    outcome: str | None = None
    ended: float | None = None
    error: str | None = None
    num_output: int = 0
    finish: str = "engine_fault"
    first_token: float | None = None
    left_at: float | None = None
    unread: LongcatError | None = None
    prompts: PromptTally = field(default_factory=PromptTally)
    takes: list[Take] = field(default_factory=list)

    @property
    def hop(self) -> Hop:
        """Of the choice that has come furthest."""
        return max((life.hop for life in self.prompts.lives), key=_HOPS.index, default="queued")

    @property
    def timings_ms(self) -> dict[str, float]:
        """Of each span the longest among the choices."""
        timings: dict[str, float] = {}
        for life in self.prompts.lives:
            for name, value in life.timings_ms().items():
                timings[name] = max(value, timings.get(name, 0.0))
        return timings

    def seen(self, now: float) -> dict[str, Any]:
        """How it went so far, by ages in seconds; of several choices the events and steps of the first one that began.

        Names, counts and times only: no text, no token id and no key.
        """
        call, lives = self.call, self.prompts.lives
        life = lives[0] if lives else Life()
        return {
            "id": call.request_id,
            "transfer": call.transfer.id if call.transfer is not None else None,
            "attempt": call.attempt,
            "outcome": self.outcome,
            "began": round(now - self.started, 4),
            "ended": None if self.ended is None else round(now - self.ended, 4),
            "choices": len(lives),
            "prompt": self.prompts.num_tokens,
            "cached": self.prompts.num_cached,
            "output": self.num_output,
            "events": [[event.value, round(now - at, 4)] for event, at in life.events],
            "steps": [round(now - at, 4) for at in life.steps],
            "num_steps": life.num_steps,
            "moved_bytes": life.moved_bytes,
            "early_bytes": life.early_bytes,
        }


class Journal:
    """Tells of requests.

    Args:
        metrics: of this process; None where nobody reads them.
        now: the service's clock.
        kept: what else is kept of each request.
        pair_with: the prefill and the decode instance of a hand-over, from the name of the other one.
    """

    def __init__(
        self,
        metrics: RequestMetrics | None,
        now: Callable[[], float],
        *,
        kept: Kept = NOTHING,
        pair_with: Callable[[str], tuple[str, ...]] = lambda peer: (peer,),
    ) -> None:
        self._metrics = metrics
        self._now = now
        self._recorder = kept.recorder
        self._bodies = kept.bodies
        self._pair_with = pair_with
        self.last_token: float | None = None  # when any request got a token
        self._kept: deque[Record] = deque(maxlen=KEPT)
        self._log = log.logger()

    @contextmanager
    def request(self, call: Call) -> Iterator[Record]:
        """The life of one request, whatever its end. Of a defect, whoever answers it writes the line."""
        record, outcome = Record(started=self._now(), call=replace(call, resume=None)), "engine_fault"
        self._kept.append(record)
        try:
            yield record
            outcome = record.finish
            self._finished(record, call)
        except LongcatError as error:
            outcome, record.error = error.code, type(error).__name__
            self._failed(record, call, error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if record.unread is None:
                outcome = "cancelled"
                self._cancelled(record, call)
            else:
                outcome, record.error = record.unread.code, type(record.unread).__name__
                self._failed(record, call, record.unread)
            raise
        finally:
            record.outcome, record.ended = outcome, self._now()
            if self._metrics is not None:
                self._metrics.requests_total(outcome).inc()
            if self._recorder is not None:
                for take in record.takes:
                    self._recorder.keep(take, outcome)
            if self._bodies is not None:
                self._bodies.ended(_facts(record, call, outcome))

    def take(self, record: Record, request: Request, *, attempt: int) -> Take | None:
        """Where what comes of a request is written, if it is kept."""
        if self._recorder is None:
            return None
        record.takes.append(Take(request, attempt))
        return record.takes[-1]

    def recent(self) -> list[dict[str, Any]]:
        """The requests that began last, whether they go on or not; oldest first."""
        now = self._now()
        return [record.seen(now) for record in self._kept]

    def leaving(self, record: Record, unread: LongcatError | None = None) -> None:
        """The end of the request is known; what it holds is given back from now on."""
        record.left_at, record.unread = self._now(), unread

    def token(self, record: Record) -> None:
        """The request has got tokens."""
        self.last_token = self._now()
        if record.first_token is None:
            record.first_token = self.last_token

    def _finished(self, record: Record, call: Call) -> None:
        timings = record.timings_ms
        seconds = self._now() - record.started
        first = None if record.first_token is None else record.first_token - record.started
        self._log.info(
            "request_finished",
            **self._which(call),
            prompt=record.prompts.num_tokens,
            cached=record.prompts.num_cached,
            output=record.num_output,
            accepted=sum(life.num_accepted for life in record.prompts.lives),
            finish=record.finish,
            ttft_ms=None if first is None else round(1000 * first, 3),
            tpot_ms=None if first is None else round(1000 * _per_token(record, seconds - first), 3),
            **{f"{name}_ms": round(timings[name], 3) for name in _SPANS if name in timings},
        )
        if self._metrics is None:
            return
        self._metrics.prompt_tokens_total.inc(record.prompts.num_tokens)
        self._metrics.cached_tokens_total.inc(record.prompts.num_cached)
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
            if name in timings:
                histogram.observe(timings[name] / 1000)

    def _failed(self, record: Record, call: Call, error: LongcatError) -> None:
        cancelled_by = "peer" if error.cause == "peer" else _CUT_BY.get(error.code)
        if self._metrics is not None and cancelled_by is not None:
            self._metrics.cancels_total(cancelled_by).inc()
        write = self._log.error if error.status >= 500 and error.cause == "self" else self._log.warning
        write(
            "request_failed",
            **self._which(call),
            status=error.status,
            code=error.code,
            cause=error.cause,
            hop=record.hop,
            reason=error.message if error.status >= 500 else None,  # a client's error quotes the client
            ms=round(1000 * (self._now() - record.started), 3),
        )

    def _cancelled(self, record: Record, call: Call) -> None:
        if self._metrics is not None:
            self._metrics.cancels_total("client").inc()
        took = None if record.left_at is None else round(1000 * (self._now() - record.left_at), 3)
        self._log.info("request_cancelled", **self._which(call), by="client", hop=record.hop, ms_to_free=took)

    def _which(self, call: Call) -> dict[str, Any]:
        """The hand-over that the request belongs to."""
        if call.transfer is None:
            return {}
        return {"transfer": call.transfer.id, "pair": self._pair_with(call.transfer.peer), "attempt": call.attempt}


def _facts(record: Record, call: Call, outcome: str) -> EndedBody:
    return EndedBody(
        request_id=call.request_id,
        transfer=call.transfer,
        attempt=call.attempt,
        traceparent=call.traceparent,
        outcome=outcome,
        error=record.error or (EngineFault.__name__ if outcome == EngineFault.codes[0] else None),
        began=record.started,
        ended=record.started if record.ended is None else record.ended,
        num_prompt=record.prompts.num_tokens,
        num_cached=record.prompts.num_cached,
        num_output=record.num_output,
        lives=tuple(record.prompts.lives),
    )


def _per_token(record: Record, seconds: float) -> float:
    return seconds / max(record.num_output - 1, 1)
