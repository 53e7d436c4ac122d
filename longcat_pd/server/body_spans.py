"""The spans of a body at an instance, from how it went: one of the whole, and one of each stage of its requests' lives.

Owns which events bound which stage, by role. Adds no fact to those of the journal and of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from longcat_pd.config.schema import Role
from longcat_pd.engine.request import Event, Life
from longcat_pd.server.service import EndedBody
from longcat_pd.server.tracing import Mark, Span, Trace, Tracer, new_span_id

MOST_LIVES = 8  # of a body with more choices the first ones


class Stage(NamedTuple):
    """A part of a life, from one event to another."""

    name: str
    begins: Event
    ends: Event


_QUEUE = Stage("queue", Event.ARRIVED, Event.PREFILL_STARTED)
_PREFILL = Stage("prefill chunks", Event.PREFILL_STARTED, Event.PREFILL_ENDED)
_STAGES: Mapping[Role, tuple[Stage, ...]] = MappingProxyType(
    {  # layers of a prompt travel while the next ones are computed
        "prefill": (_QUEUE, _PREFILL, Stage("transfer of layers", Event.PREFILL_STARTED, Event.COMMITTED)),
        "decode": (
            Stage("queue", Event.ARRIVED, Event.GRANTED),
            Stage("transfer of layers", Event.GRANTED, Event.COMMITTED),
            Stage("decode steps", Event.COMMITTED, Event.FINISHED),
        ),
        "standalone": (_QUEUE, _PREFILL, Stage("decode steps", Event.PREFILL_ENDED, Event.FINISHED)),
    }
)


class BodySpans:
    """Tells of bodies as spans, where they have a trace.

    Args:
        role: of the instance.
    """

    def __init__(self, tracer: Tracer, role: Role) -> None:
        self._tracer = tracer
        self._role = role

    def ended(self, body: EndedBody) -> None:
        """As ``Bodies``."""
        trace = self._tracer.begin(body.traceparent)
        if trace.is_sampled:
            self._tracer.keep([*_spans(trace, self._role, body)])


def _spans(trace: Trace, role: Role, body: EndedBody) -> Iterator[Span]:
    """The whole first. Every span lies within it."""
    lives = body.lives[:MOST_LIVES]
    yield Span(
        name=role,
        trace_id=trace.trace_id,
        span_id=trace.span_id,
        parent_id=trace.parent_id,
        began=body.began,
        ended=body.ended,
        kind="server",
        attributes=_facts(body),
        marks=tuple(Mark(event.value, _within(body, at)) for life in lives for event, at in life.events),
        error=body.error,
    )
    for choice, life in enumerate(lives):
        for stage, began, ended, facts in _stages(role, life, body):
            yield Span(
                name=stage,
                trace_id=trace.trace_id,
                span_id=new_span_id(),
                parent_id=trace.span_id,
                began=began,
                ended=ended,
                attributes={"longcat.choice": choice, **facts} if len(lives) > 1 else facts,
                marks=tuple(Mark("chunk", at) for at in life.steps if stage == _PREFILL.name and began <= at <= ended),
            )


def _within(body: EndedBody, at: float) -> float:
    return min(max(at, body.began), body.ended)


def _stages(role: Role, life: Life, body: EndedBody) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """Name, begin, end and facts of those that have begun; one that was cut short ends where the life does."""
    at = dict(life.events)
    was_cut = body.error is not None or body.outcome == "cancelled"
    for name, begins, ends in _STAGES[role]:
        if begins not in at:
            continue
        began = _within(body, at[begins])
        ended = max(_within(body, at.get(ends, at.get(Event.FINISHED, body.ended))), began)
        is_whole = ends in at and not (was_cut and ends is Event.FINISHED)  # which every life comes to
        yield name, began, ended, {**_facts_of(name, life), **({} if is_whole else {"longcat.unfinished": True})}


def _facts_of(stage: str, life: Life) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if stage == _PREFILL.name:
        facts["longcat.cached_tokens"] = life.num_cached_tokens
    elif stage == "decode steps":
        facts |= {"longcat.steps": life.num_steps, "longcat.accepted_tokens": life.num_accepted}
    elif stage == "transfer of layers":
        facts |= {"longcat.moved_bytes": life.moved_bytes, "longcat.early_bytes": life.early_bytes}
    return {name: value for name, value in facts.items() if value is not None}


def _facts(body: EndedBody) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "longcat.request_id": body.request_id,
        "longcat.outcome": body.outcome,
        "longcat.choices": len(body.lives),
        "longcat.prompt_tokens": body.num_prompt,
        "longcat.cached_tokens": body.num_cached,
        "longcat.output_tokens": body.num_output,
    }
    if body.transfer is not None:
        peer = {"longcat.transfer_id": body.transfer.id, "longcat.peer": body.transfer.peer}
        facts |= {**peer, "longcat.attempt": body.attempt}
    return facts
