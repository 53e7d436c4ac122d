"""An event stream whose client leaves in any turn of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from longcat_pd.server.errors import ClientGone
from longcat_pd.server.sse import KEEP_ALIVE, EventStream


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
    done, _ = await asyncio.wait({answering}, timeout=30.0)
    assert done and isinstance(answering.exception(), ClientGone) and closed.is_set()


@pytest.mark.parametrize("keepalive_s", [0.0, 60.0, 0.001], ids=["silent", "with comments", "with many comments"])
async def test_little_is_made_ahead_for_a_client_that_does_not_read(keepalive_s: float) -> None:
    made, sent = list[int](), list[bytes]()
    waits, reads = asyncio.Event(), asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        for number in range(1000):
            made.append(number)
            yield b"%d " % number

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        if "body" in message:
            waits.set()
            await reads.wait()
            sent.append(message["body"])

    stream = EventStream(
        events(), "r", on_error=lambda _: None, time_left_s=60.0, cut=asyncio.Event(), keepalive_s=keepalive_s
    )
    answering = asyncio.ensure_future(stream({}, receive, send))  # type: ignore[arg-type]
    await waits.wait()
    await asyncio.sleep(0.05)
    assert 1 <= len(made) <= 2
    reads.set()
    await asyncio.wait_for(answering, 30.0)
    text = b"".join(piece for piece in sent if piece != KEEP_ALIVE)
    assert text == b"".join(b"%d " % number for number in range(1000))
