"""Connections whose head does not end: in bytes, in time, and behind a body."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from longcat_pd.server import http_heads
from longcat_pd.server.http_heads import HEAD_BYTES, BoundedHeads

HEAD = b"POST / HTTP/1.1\r\nhost: h\r\n"


async def app(_scope: Any, receive: Any, send: Any) -> None:
    """Answers with the number of bytes of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
    await send({"type": "http.response.body", "body": b"%8d" % size})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    config = uvicorn.Config(app, http=BoundedHeads, ws="none", log_config=None, lifespan="off", access_log=False)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.ensure_future(server._serve([listener]))
    yield listener.getsockname()[1]
    server.should_exit = True
    await serving


async def pour(port: int, beginning: bytes, endless: bytes) -> tuple[int, bytes]:
    """How many bytes went before the end, and what was answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = 0
    try:
        writer.write(beginning)
        async with asyncio.timeout(20.0):
            while sent < 64 * HEAD_BYTES:
                writer.write(endless)
                await writer.drain()
                sent += len(endless)
                await asyncio.sleep(0)
    except ConnectionError:
        pass
    try:
        answer = await asyncio.wait_for(reader.read(1 << 16), 20.0)
    except ConnectionError:
        answer = b""
    writer.close()
    return sent, answer


@pytest.mark.parametrize(
    ("beginning", "endless"),
    [
        (HEAD + b"x: ", b"a" * 4096),
        (HEAD, b"y: " + b"b" * 4096 + b"\r\n"),
        (b"GET /", b"c" * 4096),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nx: ", b"d" * 4096),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"e: " + b"f" * 4096 + b"\r\n"),
        (b"", b"\r\n" * 2048),
    ],
    ids=["value", "fields", "path", "trailer", "trailers", "nothing"],
)
async def test_what_never_ends_is_not_kept(port: int, beginning: bytes, endless: bytes) -> None:
    sent, _ = await pour(port, beginning, endless)
    assert sent < 64 * HEAD_BYTES


async def test_a_head_that_is_too_long_is_told_so(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + b"x: ")
    for _ in range(3):
        await asyncio.sleep(0.05)
        writer.write(b"a" * (HEAD_BYTES // 2))
    assert (await asyncio.wait_for(reader.read(1 << 16), 20.0)).startswith(b"HTTP/1.1 400 ")
    writer.close()


async def test_long_bodies_and_many_requests_of_a_connection_are_no_concern_of_this(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for size in (3 * HEAD_BYTES, 0, 40 * HEAD_BYTES):
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % size + b"z" * size)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20.0)
        assert head.startswith(b"HTTP/1.1 200 ")
        assert int(await reader.readexactly(8)) == size
    writer.close()


@pytest.mark.parametrize("beginning", [b"", HEAD + b"x: "], ids=["silent", "slow"])
async def test_a_head_that_does_not_come(port: int, beginning: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_heads, "HEAD_S", 0.3)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(beginning)
    assert await asyncio.wait_for(reader.read(1), 20.0) == b""
    writer.close()
