"""An event stream whose client leaves in any turn of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from longcat_pd.server.errors import ClientGone
from longcat_pd.server.sse import EventStream


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("keepalive_s", [0.0, 60.0], ids=["silent", "with comments"])
async def test_a_client_that_leaves_while_an_event_is_made(keepalive_s: float, turns: int) -> None:
    begun, go, gone, closed = (asyncio.Event() for _ in range(4))

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"first"
            await go.wait()
            yield b"second"
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        begun.set()

    stream = EventStream(
        events(), "r", on_error=lambda _: None, time_left_s=60.0, cut=asyncio.Event(), keepalive_s=keepalive_s
    )
    answering = asyncio.ensure_future(stream({}, receive, send))  # type: ignore[arg-type]
    await begun.wait()
    await asyncio.sleep(0.01)
    go.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    gone.set()
    done, _ = await asyncio.wait({answering}, timeout=5.0)
    assert done and isinstance(answering.exception(), ClientGone) and closed.is_set()
