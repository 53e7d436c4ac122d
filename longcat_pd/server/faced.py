"""The face of an instance that a process serves, put together from its parts, with what it records.

Owns when a recorder begins and ends. The routes are ``app.py``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from longcat_pd.config.schema import LoadBalancerConfig
from longcat_pd.server.app import create_app
from longcat_pd.server.gate import Gate
from longcat_pd.server.parts import Parts
from longcat_pd.server.record import Recorder
from longcat_pd.server.service import Service
from longcat_pd.server.text import TextProcessor


@asynccontextmanager
async def faced(service: Service, parts: Parts, *, gate: Gate, front: LoadBalancerConfig) -> AsyncIterator[FastAPI]:
    """The app; leaving the block, when nobody is served any more, waits for what is still being recorded.

    Raises ConfigError. ``gate`` and ``front`` as in ``create_app``.
    """
    spec = parts.spec
    text = TextProcessor.load(spec.model.path)
    recorder = _recorder(service, parts, text)
    faults = parts.faults.routes() if parts.faults is not None else {}
    app = create_app(service, text, parts.metrics, gate=gate, front=front, faults=faults, recorder=recorder)
    try:
        yield app
    finally:
        if recorder is not None:
            await recorder.close()


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
