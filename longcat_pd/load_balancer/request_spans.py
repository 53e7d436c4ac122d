"""The spans of a client's request at the balancer, from its progress: the whole, and each attempt with its pair.

Adds no fact to those of the progress. The calls to the instances are parts of the attempt's span (``attempt.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from longcat_pd.load_balancer.progress import Progress, Tried
from longcat_pd.server.tracing import Mark, Span, Trace


def request_spans(trace: Trace, progress: Progress, *, route: str) -> Iterator[Span]:
    """The whole first. The request has its end."""
    assert progress.ended is not None
    yield Span(
        name=f"POST {route}",
        trace_id=trace.trace_id,
        span_id=trace.span_id,
        parent_id=trace.parent_id,
        began=progress.started,
        ended=progress.ended,
        kind="server",
        attributes=_facts(progress, route),
        marks=tuple(_marks(progress, progress.ended)),
        error=None if progress.failure is None else progress.failure.name,
    )
    for tried in progress.tries:
        yield Span(
            name="attempt",
            trace_id=trace.trace_id,
            span_id=tried.span_id,
            parent_id=trace.span_id,
            began=tried.began,
            ended=progress.ended if tried.ended is None else tried.ended,
            kind="client",
            attributes=_facts_of(tried),
            error=tried.error,
        )


def _marks(progress: Progress, ended: float) -> Iterator[Mark]:
    yield Mark("queued", progress.started)
    for place, tried in enumerate(progress.tries):
        yield Mark("failover" if tried.resumes else "retry" if place else "paired", tried.began)
    if progress.first_token is not None:
        yield Mark("first_token", progress.first_token)
    if progress.cut_by is not None:
        yield Mark(f"cut by {progress.cut_by}", ended)


def _facts(progress: Progress, route: str) -> dict[str, Any]:
    usage = progress.usage
    facts = {
        "http.request.method": "POST",
        "http.route": route,
        "longcat.request_id": progress.request_id,
        "longcat.outcome": progress.outcome,
        "longcat.attempts": len(progress.tries),
        "longcat.failover": progress.failover,
        "longcat.failed_at": progress.failed_at,
        "longcat.code": None if progress.failure is None else progress.failure.code,
        **({} if usage is None else {"longcat.prompt_tokens": usage.prompt, "longcat.cached_tokens": usage.cached}),
        **({} if usage is None else {"longcat.output_tokens": usage.output}),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _facts_of(tried: Tried) -> dict[str, Any]:
    prefill, decode = tried.pair
    facts = {
        "longcat.attempt": tried.number,
        "longcat.prefill": prefill,
        "longcat.decode": decode,
        "longcat.transfer_id": tried.transfer_id,
        "longcat.failed_at": tried.failed_at,
    }
    return {name: value for name, value in facts.items() if value is not None}
