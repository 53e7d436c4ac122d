"""The end-to-end proof of a standalone server: a small greedy request through prefill and several steps of decode."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

from fastapi import Request, Response

from longcat_pd.clock import PROBE_FRESH_S, PROBE_TIMEOUT_S
from longcat_pd.errors import LongcatError, WorkerUnavailable
from longcat_pd.server.about_routes import Routes
from longcat_pd.server.errors import json_response
from longcat_pd.server.face import Face
from longcat_pd.server.openai import COMPLETIONS_ROUTE
from longcat_pd.server.sse import while_connected

# ids in and ids out, so that a checkpoint without tokenizer is proved as well
_PROBE = {"prompt": [5, 6, 7, 8], "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


class Probe:
    """Shared by all who ask at the same time.

    Args:
        face: one whose requests are not in the metrics.
        last_token: when any request of a client got a token, on the service's clock.
        now: that clock.
        name: of the instance.
    """

    def __init__(self, face: Face, *, last_token: Callable[[], float | None], now: Callable[[], float], name: str) -> None:
        self._face = face
        self._last_token = last_token
        self._now = now
        self._name = name
        self._running: asyncio.Task[dict[str, Any]] | None = None

    async def prove(self) -> dict[str, Any]:
        """What ``/health_generate`` answers with 200. Raises WorkerUnavailable: starting, or what failed."""
        last, now = self._last_token(), self._now()
        if last is not None and now - last <= PROBE_FRESH_S:
            return self._proof("traffic", now - last)
        self._face.admit()
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._run())
            self._running.add_done_callback(_retrieve)
        return await asyncio.shield(self._running)  # who leaves early does not take the probe from the others

    async def _run(self) -> dict[str, Any]:
        started = self._now()
        call = self._face.call(f"probe-{secrets.token_hex(8)}", PROBE_TIMEOUT_S)
        try:
            await self._face.answer(self._face.read(COMPLETIONS_ROUTE, dict(_PROBE)), call)
        except LongcatError as error:
            raise WorkerUnavailable(f"the probe failed at {self._name}: {error.code}") from error
        return self._proof("probe", self._now() - started)

    def _proof(self, by: str, seconds: float) -> dict[str, Any]:
        return {"status": "ok", "by": by, "ms": round(seconds * 1000), "pair": [self._name, self._name]}


def _retrieve(task: asyncio.Task[dict[str, Any]]) -> None:
    """Everybody may have left before the probe failed."""
    if not task.cancelled():
        task.exception()


def probe_route(probe: Probe) -> Routes:
    """The proof as a GET route."""

    async def health_generate(request: Request) -> Response:
        return json_response(await while_connected(request.receive, probe.prove()))

    return {"/health_generate": health_generate}
