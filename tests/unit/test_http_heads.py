"""Connections whose head does not end: in bytes, in time, and behind a body; whose requests come too early; unread ones."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn

from longcat_pd.clock import MonotonicClock
from longcat_pd.server import closing, http_heads
from longcat_pd.server.closing import ClosingTransport
from longcat_pd.server.errors import ClientGone
from longcat_pd.server.http_heads import HEAD_BYTES, BoundedHeads
from longcat_pd.server.run import listen
from longcat_pd.server.sse import while_connected

HEAD = b"POST / HTTP/1.1\r\nhost: h\r\n"
EARLY = b"POST /early HTTP/1.1\r\nhost: h\r\ncontent-length: 10\r\n\r\n"
SLOW = b"GET /slow HTTP/1.1\r\nhost: h\r\n\r\n"
GOOD = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"


class Slow:
    """Requests that are answered when they may be."""

    def __init__(self) -> None:
        self.has_come, self.may_end, self.is_left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.count = 0

    async def __call__(self, receive: Any) -> None:
        self.count += 1
        self.has_come.set()
        try:
            await while_connected(receive, self.may_end.wait())
        except ClientGone:
            self.is_left.set()
            raise


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the number of bytes of the body; early without it, or more than is ever read."""
    size, more = 0, scope["path"] != "/early"
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    if scope["path"] == "/slow":
        await scope["state"]["slow"](receive)
    if scope["path"] == "/large":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(32 << 20)})
        return
    if scope["path"] == "/endless":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with suppress(TimeoutError):
            await MonotonicClock().within(0.2, pour_out(send))
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
    await send({"type": "http.response.body", "body": b"%8d" % size})


async def pour_out(send: Any) -> None:
    while True:
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})


@pytest.fixture
async def server() -> AsyncIterator[uvicorn.Server]:
    config = uvicorn.Config(app, http=BoundedHeads, ws="none", log_config=None, lifespan="off", access_log=False)
    server = uvicorn.Server(config)
    listener = listen("127.0.0.1", 0)
    serving = asyncio.ensure_future(server._serve([listener]))
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    yield server
    server.should_exit = True
    await serving


@pytest.fixture
def port(server: uvicorn.Server) -> int:
    found: int = server.servers[0].sockets[0].getsockname()[1]
    return found


@pytest.fixture
def slow(server: uvicorn.Server) -> Slow:
    server.lifespan.state["slow"] = Slow()
    found: Slow = server.lifespan.state["slow"]
    return found


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


@pytest.mark.parametrize(
    ("answered", "beginning"),
    [
        (b"", b""),
        (b"", HEAD + b"x: "),
        (GOOD, b"\r\n"),
        (GOOD, b"\r"),
        (GOOD, b"GET / HT"),
        (EARLY, b"x"),
        (EARLY, b"x" * 10),
    ],
    ids=["silent", "slow", "empty line", "half an empty line", "another", "body", "whole body"],
)
async def test_a_head_that_does_not_come(
    port: int, answered: bytes, beginning: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind a request that has its answer, whose body may still come."""
    monkeypatch.setattr(http_heads, "HEAD_S", 0.3)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    if answered:
        writer.write(answered)
        await asyncio.wait_for(reader.readuntil(b"%8d" % 0), 20.0)
    writer.write(beginning)
    assert await asyncio.wait_for(reader.read(1), 20.0) == b""
    writer.close()


@pytest.mark.parametrize("behind", [GOOD, b"G", GOOD + b"\0", SLOW * 9], ids=["whole", "begun", "nonsense", "many"])
async def test_a_request_before_the_answer_to_the_one_in_front(port: int, slow: Slow, behind: bytes) -> None:
    """The first is answered, whatever comes behind it, and the connection closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(SLOW + behind)
    await asyncio.wait_for(slow.has_come.wait(), 20.0)
    for _ in range(4):
        writer.write(GOOD * 3000)
        await writer.drain()
        await asyncio.sleep(0.02)
    slow.may_end.set()
    answer = await asyncio.wait_for(reader.read(), 20.0)
    assert answer.count(b"HTTP/1.1 ") == 1 and answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"%8d" % 0)
    assert b"connection: close\r\n" in answer and slow.count == 1
    writer.close()


@pytest.mark.parametrize("behind", [b"", GOOD, b"G", GOOD * 50], ids=["nothing", "whole", "begun", "many"])
@pytest.mark.parametrize("is_at_once", [True, False])
async def test_who_leaves_is_missed_at_once_whatever_it_has_sent(
    port: int, slow: Slow, behind: bytes, is_at_once: bool
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(SLOW + behind if is_at_once else SLOW)
    await asyncio.wait_for(slow.has_come.wait(), 20.0)
    writer.write(b"" if is_at_once else behind)
    await asyncio.sleep(0.05)
    assert not slow.is_left.is_set()
    writer.close()
    await asyncio.wait_for(slow.is_left.wait(), 20.0)


async def test_a_request_that_follows_the_last_byte_of_an_answer_is_not_too_early(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(200):
        writer.write(GOOD)
        await asyncio.wait_for(reader.readuntil(b"%8d" % 0), 20.0)
    writer.close()


@asynccontextmanager
async def unread(server: uvicorn.Server, port: int, path: str) -> AsyncIterator[socket.socket]:
    """A client that has asked for more than its buffers hold, and reads nothing. In the end its connection goes."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        client.send(f"GET {path} HTTP/1.1\r\nhost: h\r\n\r\n".encode())
        await asyncio.sleep(0.3)
        assert server.server_state.connections
        yield client
        async with asyncio.timeout(30.0):
            while server.server_state.connections:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "sends no more"])
async def test_a_closed_connection_whose_client_does_not_read(
    server: uvicorn.Server, port: int, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing, "UNREAD_S", 2.0)
    async with unread(server, port, "/endless") as client:
        if leaves:
            client.shutdown(socket.SHUT_WR)


async def test_a_request_before_the_answer_to_the_one_in_front_is_read(
    server: uvicorn.Server, port: int, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing, "UNREAD_S", 0.3)
    async with unread(server, port, "/large") as client:
        client.send(SLOW)
    assert slow.count == 0


class Stub(asyncio.Transport):
    """A socket of which a test says what is unsent, and a loop that remembers when it is to be called."""

    def __init__(self) -> None:
        self.unsent, self.is_closed, self.is_aborted = 0, False, False
        self.later: list[Any] = []

    def call_later(self, seconds: float, call: Any, *given: Any) -> asyncio.TimerHandle:
        self.later.append(lambda: call(*given))
        return asyncio.TimerHandle(seconds, call, given, asyncio.get_running_loop())

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True


async def test_who_reads_slowly_gets_all_of_what_was_sent_before_the_close() -> None:
    stub = Stub()
    transport = ClosingTransport(stub, stub)  # type: ignore[arg-type]
    stub.unsent = 9
    transport.close()
    transport.close()
    assert stub.is_closed and len(stub.later) == 1
    for stub.unsent in (8, 4, 3):
        stub.later.pop()()
        assert not stub.is_aborted and len(stub.later) == 1
    stub.later.pop()()
    assert stub.is_aborted and not stub.later
