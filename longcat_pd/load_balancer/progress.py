"""How far a request has come, and what the log and the metrics tell of it in the end.

Owns the lines ``request_finished``, ``request_failed``, ``request_cancelled`` and ``leg_failed``. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from longcat_pd import log
from longcat_pd.load_balancer.attempt import LegFailed
from longcat_pd.load_balancer.pool import Pair
from longcat_pd.load_balancer.replies import Failure, Usage
from longcat_pd.metrics import Metrics, RequestMetrics


@dataclass(kw_only=True)
class Tried:
    """One attempt; written by the request's coroutine. ``resumes``: it goes on with an answer that another pair began.

    ``ended``: when both of its calls were closed. ``error``: the name of the typed error at ``failed_at``.
    """

    number: int
    pair: tuple[str, str]
    transfer_id: str
    span_id: str
    resumes: bool
    began: float
    ended: float | None = None
    error: str | None = None
    failed_at: str | None = None


@dataclass(kw_only=True)
class Progress:
    """How far a request has come; written by its own coroutine, read for its log line."""

    started: float
    request_id: str = ""
    counts: bool = True  # false for probes, which request metrics and the log leave out
    pair: Pair | None = None
    transfer_id: str = ""
    attempt: int = 0
    tries: list[Tried] = field(default_factory=list)
    failover: Literal["no_pair", "resumed"] | None = None  # how far the one failover has come
    first_token: float | None = None
    finish: str | None = None
    prefilled: Mapping[str, Any] | None = None
    usage: Usage | None = None  # as the decode instance has told it
    failure: Failure | None = None
    failed_at: str | None = None
    told_at: float | None = None  # when the client had the whole answer
    cut_by: str | None = None  # client, deadline, drain
    last_sent: float = 0.0
    outcome: str | None = None  # how it ended, in the words of the metrics, and when
    ended: float | None = None

    @property
    def pair_names(self) -> tuple[str, ...]:
        """For the log."""
        return self.pair.names if self.pair is not None else ()

    def account(self, metrics: Metrics, now: float) -> None:
        """The one log line of a request, and its metrics."""
        failure, cut_by, requests = self.failure, self.cut_by, metrics.requests
        facts: dict[str, Any] = {"transfer": self.transfer_id, "pair": self.pair_names, "attempt": self.attempt}
        if self.failover == "resumed":
            facts["failovers"] = 1
        lasted_s = (now if self.told_at is None else self.told_at) - self.started
        facts["ms"] = round(lasted_s * 1000)
        self._account_failover(metrics)
        hop = "decoding" if self.first_token is not None else "prefilling"
        is_late = failure is not None and failure.code == "deadline_exceeded"  # a worker may see it before this process
        cancelled_by = "deadline" if is_late else cut_by
        if cancelled_by is not None:
            requests.cancels_total(cancelled_by).inc()
        if failure is not None:
            outcome = failure.code
            is_defect = failure.status >= 500 and failure.cause == "self"
            tell = log.logger().error if is_defect else log.logger().warning
            tell("request_failed", status=failure.status, code=failure.code, cause=failure.cause, hop=hop, **facts)
        elif cut_by is not None:
            outcome = "cancelled"
            log.logger().info("request_cancelled", by=cut_by, hop=hop, **facts)
        else:
            outcome = self.finish or "stop"
            requests.request_seconds.observe(lasted_s)
            facts |= self._prefill(requests) | self._tokens(requests)
            log.logger().info("request_finished", finish=self.finish, **facts)
        requests.requests_total(outcome).inc()
        self.outcome, self.ended = outcome, now

    def _tokens(self, requests: RequestMetrics) -> dict[str, Any]:
        """Count what the answer cost and how fast it came; the same for the log. When tokens came, a stream alone shows."""
        facts: dict[str, Any] = {}
        usage, first = self.usage, self.first_token
        if usage is not None:
            requests.prompt_tokens_total.inc(usage.prompt)
            requests.cached_tokens_total.inc(usage.cached)
            requests.output_tokens_total.inc(usage.output)
            facts |= {"prompt": usage.prompt, "cached": usage.cached, "output": usage.output}
        if first is not None:
            requests.first_token_seconds.observe(first - self.started)
            facts["ttft_ms"] = round((first - self.started) * 1000)
        if first is not None and usage is not None and usage.output > 1:
            per_token = (self.last_sent - first) / (usage.output - 1)
            requests.per_token_seconds.observe(per_token)
            facts["tpot_ms"] = round(per_token * 1000, 3)
        return facts

    def _prefill(self, requests: RequestMetrics) -> dict[str, Any]:
        """Count P's account of its part; the same for the log. What it does not say in numbers is left out."""
        account = self.prefilled or {}
        given = account.get("timings_ms")
        timings = given if isinstance(given, dict) else {}
        spans = {
            "queue": requests.queue_seconds,
            "prefill": requests.prefill_seconds,
            "transfer": requests.transfer_seconds,
        }
        prompt = account.get("prompt_tokens")
        facts: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, int) else {}
        for name, histogram in spans.items():
            if isinstance(timings.get(name), int | float):
                histogram.observe(timings[name] / 1000)
                facts[f"{name}_ms"] = round(timings[name], 1)
        return facts

    def _account_failover(self, metrics: Metrics) -> None:
        """What became of the failover, if there was one; a client that left before its end learns nothing of it."""
        if self.failover is None or self.cut_by == "client":
            return
        has_ended_well = self.failure is None and self.cut_by is None
        outcome = "completed" if has_ended_well else "failed" if self.failover == "resumed" else "no_pair"
        metrics.balancer.failovers_total(outcome).inc()


def log_leg(failed: LegFailed, progress: Progress) -> None:
    """A call to an instance has failed."""
    is_clients = failed.failure.cause == "client"  # such a message quotes the request
    log.logger().warning(
        "leg_failed",
        leg=failed.instance.target.role,
        target=failed.instance.name,
        cause=failed.failure.cause,
        code=failed.failure.code,
        reason=None if is_clients else failed.failure.reason,
        attempt=progress.attempt,
        transfer=progress.transfer_id,
    )
