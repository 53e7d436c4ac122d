"""The face of an instance that a process serves, put together from its parts, with what it records and traces.

Owns when a recorder and a tracer begin and end. The routes are ``app.py``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from longcat_pd.config.schema import LoadBalancerConfig
from longcat_pd.server.app import create_app
from longcat_pd.server.body_spans import BodySpans
from longcat_pd.server.gate import Gate
from longcat_pd.server.parts import Parts
from longcat_pd.server.record import Recorder
from longcat_pd.server.service import Kept, Service
from longcat_pd.server.text import TextProcessor
from longcat_pd.server.tracing import make_tracer


@asynccontextmanager
async def faced(service: Service, parts: Parts, *, gate: Gate, front: LoadBalancerConfig) -> AsyncIterator[FastAPI]:
    """The app; leaving the block, when nobody is served any more, waits for what is still being recorded or sent.

    Raises ConfigError. ``gate`` and ``front`` as in ``create_app``.
    """
    spec = parts.spec
    text = TextProcessor.load(spec.model.path)
    recorder = _recorder(service, parts, text)
    tracer = make_tracer(spec.tracing, role=spec.role, instance=spec.name, metrics=parts.metrics, clock=parts.clock)
    kept = Kept(recorder=recorder, bodies=None if tracer is None else BodySpans(tracer, spec.role))
    faults = parts.faults.routes() if parts.faults is not None else {}
    app = create_app(service, text, parts.metrics, gate=gate, front=front, faults=faults, kept=kept)
    try:
        yield app
    finally:
        if recorder is not None:
            await recorder.close()
        if tracer is not None:
            await tracer.close()


def _recorder(service: Service, parts: Parts, text: TextProcessor) -> Recorder | None:
    spec, engine = parts.spec, parts.engine
    if spec.record is None:
        return None
    return Recorder(
        spec,
        spec.record,
        computed_by=service.computed_by,
        torch=lambda: next((rank.torch for rank in engine.ready), ""),
        text=text,
        clock=parts.clock,
    )
