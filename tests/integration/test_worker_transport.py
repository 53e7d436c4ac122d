"""The balancer's connections to workers, against a socket that says what a test wants."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from longcat_pd.load_balancer import transport
from longcat_pd.load_balancer.transport import WorkerTransport
from longcat_pd.load_balancer.transport import _watch as watch

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Worker:
    """Runs ``script`` for each connection; ``ended`` counts those that the other side has closed."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.num_connections = 0
        self.ended: asyncio.Queue[bytes] = asyncio.Queue()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            await self._script(reader, writer)
            self.ended.put_nowait(await reader.read())
        except ConnectionError:
            self.ended.put_nowait(b"")
        finally:
            writer.close()


@asynccontextmanager
async def talk(script: Script, *, idle_s: float = 60.0) -> AsyncIterator[tuple[Worker, httpx.AsyncClient]]:
    worker = Worker(script)
    server = await asyncio.start_server(worker.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with httpx.AsyncClient(transport=WorkerTransport(idle_s), base_url=url) as client:
            yield worker, client
    finally:
        server.close()


async def request_of(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
    return head + await reader.readexactly(length)


def answering(answer: bytes) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                await request_of(reader)
            except asyncio.IncompleteReadError:
                return
            writer.write(answer)

    return script


async def test_a_connection_serves_one_call_after_the_other() -> None:
    async with talk(answering(OK)) as (worker, client):
        for _ in range(3):
            response = await client.post("/x", content=b"body", headers={"x-request-id": "r"})
            assert (response.status_code, response.text) == (200, "hi")
        assert worker.num_connections == 1


async def test_the_kernel_ends_a_connection_whose_machine_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[socket.socket] = []
    monkeypatch.setattr(transport, "_watch", lambda given: (watch(given), watched.append(given)))
    async with talk(answering(OK)) as (_, client):
        await client.get("/x")
        (connection,) = watched
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle_s, probe_s, probes = (connection.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        assert 5 <= idle_s + probes * probe_s <= 15
        # a machine that is merely slow to read is not gone
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


async def test_what_is_sent() -> None:
    seen: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await request_of(reader))
        writer.write(OK)

    async with talk(script) as (_, client):
        await client.post("/v1/x?y=1", content=b"body", headers={"X-A": "b"})
    head, _, body = seen[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /v1/x?y=1 HTTP/1.1" and b"X-A: b" in lines and b"Content-Length: 4" in lines
    assert any(line.startswith(b"Host: 127.0.0.1:") for line in lines) and body == b"body"


async def test_calls_at_once_have_connections_of_their_own() -> None:
    async with talk(answering(OK)) as (worker, client):
        await asyncio.gather(*(client.get("/") for _ in range(3)))
        assert worker.num_connections == 3
        await asyncio.gather(*(client.get("/") for _ in range(3)))
        assert worker.num_connections == 3


async def test_an_idle_connection_is_given_up() -> None:
    async with talk(answering(OK), idle_s=-1.0) as (worker, client):
        await client.get("/")
        await client.get("/")
        assert worker.num_connections == 2
        assert await worker.ended.get() == b""


@pytest.mark.parametrize("answer", [OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), OK + b"HTTP/1.1 200 OK\r\n"])
async def test_a_connection_that_cannot_be_trusted_is_not_kept(answer: bytes) -> None:
    async with talk(answering(answer)) as (worker, client):
        assert (await client.get("/")).text == "hi"
        assert (await client.get("/")).text == "hi"
        assert worker.num_connections == 2


async def test_a_worker_that_closed_between_calls_is_called_anew() -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(OK)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with talk(once) as (worker, client):
        for number in (1, 2):
            assert (await client.get("/")).text == "hi"
            await worker.ended.get()
            await asyncio.sleep(0.01)  # the end has reached this side too
            assert worker.num_connections == number


async def test_pieces_come_as_they_are_sent() -> None:
    go = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(CHUNKED + b"1\r\na\r\n")
        await go.wait()
        writer.write(b"2\r\nbc\r\n0\r\n\r\n")

    async with talk(script) as (_, client), client.stream("GET", "/") as response:
        pieces = response.aiter_raw()
        assert await anext(pieces) == b"a"
        go.set()
        assert [piece async for piece in pieces] == [b"bc"]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", httpx.ReadError),
        (OK[:-1], httpx.ReadError),
        (CHUNKED + b"5\r\nab", httpx.ReadError),
        (b"nonsense\r\n\r\n", httpx.RemoteProtocolError),
        (CHUNKED + b"zz\r\n", httpx.RemoteProtocolError),
    ],
)
async def test_an_answer_that_breaks_is_an_error(answer: bytes, error: type[Exception]) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with talk(script) as (_, client):
        with pytest.raises(error):
            await client.get("/")


async def test_giving_a_call_up_closes_its_connection() -> None:
    has_asked = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        has_asked.set()

    async with talk(silent) as (worker, client):
        call = asyncio.ensure_future(client.get("/"))
        await has_asked.wait()
        call.cancel()
        assert await asyncio.wait_for(worker.ended.get(), 5.0) == b""


@pytest.mark.parametrize("turns", range(12))
async def test_giving_a_call_up_leaves_no_socket_at_any_moment(turns: int) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with talk(silent) as (worker, client):
        call = asyncio.ensure_future(client.get("/"))
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        for _ in range(200):  # on a busy machine the other side hears of it later
            await asyncio.sleep(0.01)
            if worker.ended.qsize() == worker.num_connections:
                break
        assert worker.ended.qsize() == worker.num_connections


@pytest.mark.parametrize("turns", range(6))
async def test_giving_a_call_up_as_its_head_comes(monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    """``turns`` of the loop after the head is here, of which the call learns one turn later."""
    head_came = transport._Connection.on_headers_complete

    def leave(after: int) -> None:
        if after:
            asyncio.get_running_loop().call_soon(leave, after - 1)
        else:
            call.cancel()

    def coming(connection: transport._Connection) -> None:
        head_came(connection)
        leave(turns)

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(CHUNKED + b"1\r\na\r\n")

    monkeypatch.setattr(transport._Connection, "on_headers_complete", coming)
    async with talk(endless) as (worker, client):
        call = asyncio.ensure_future(client.get("/"))
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await asyncio.wait_for(worker.ended.get(), 5.0) == b""


async def test_leaving_a_stream_closes_its_connection() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(CHUNKED + b"1\r\na\r\n")

    async with talk(endless) as (worker, client):
        async with client.stream("GET", "/") as response:
            assert await anext(response.aiter_raw()) == b"a"
        assert await asyncio.wait_for(worker.ended.get(), 5.0) == b""


async def test_a_slow_reader_holds_the_worker_up() -> None:
    written = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await request_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 67108864\r\n\r\n")
        for _ in range(1024):
            writer.write(bytes(65536))
            await writer.drain()
            written += 65536

    async with talk(flood) as (_, client), client.stream("GET", "/") as response:
        while True:
            before = written
            await asyncio.sleep(0.1)
            if written == before:
                break
        assert written < 1 << 25
        assert sum([len(piece) async for piece in response.aiter_raw()]) == 67108864


async def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with httpx.AsyncClient(transport=WorkerTransport(1.0)) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"http://127.0.0.1:{taken.getsockname()[1]}/")


async def test_a_header_cannot_end_its_line() -> None:
    async with talk(answering(OK)) as (worker, client):
        await client.get("/")
        with pytest.raises(httpx.LocalProtocolError):
            await client.get("/", headers={"x-request-id": "a\r\nX-Forged: 1"})
        assert await asyncio.wait_for(worker.ended.get(), 5.0) == b""  # nor leave behind what it would have gone over
