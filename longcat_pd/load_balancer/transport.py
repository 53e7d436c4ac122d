"""HTTP/1.1 to the workers as a transport of httpx: a connection for each call, kept for the next if its answer ended well.

Owns sockets and the parser. Knows neither calls nor workers. httpx's own transport costs a call about two milliseconds of
the balancer's time, this one a tenth of it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import AsyncIterator

import httptools
import httpx

from longcat_pd import log
from longcat_pd.clock import KEEPALIVE_IDLE_S, KEEPALIVE_PROBE_S, KEEPALIVE_PROBES
from longcat_pd.server.reads import CopiedReads

_READ_AHEAD_BYTES = 1 << 16  # of an answer that nobody takes: beyond it the worker has to wait
# of this machine or process: nothing is known of who was called
_NO_ROOM = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))

Address = tuple[str, int]
_Failure = tuple[type[httpx.TransportError], str]  # an exception would hold the frames that it went through, and they it


class NoRoom(httpx.TransportError):
    """This side has no file, memory or port for another connection."""


class WorkerTransport(httpx.AsyncBaseTransport):
    """Plain HTTP with bodies of a known length. ``idle_s``: how long a connection may wait for its next call.

    A call that is given up in any way closes its connection: that is how a worker hears of it.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._num_not_made = 0
        self._idle: dict[Address, list[_Connection]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send, and wait for the head of the answer.

        Raises:
            NoRoom, httpx.ConnectError, httpx.ConnectTimeout, httpx.ReadError, httpx.RemoteProtocolError.
        """
        address = (request.url.host, request.url.port or 80)
        connection = self._kept(address) or await self._made(address, request.extensions["timeout"]["connect"])
        is_answered = False
        try:
            await connection.ask(_encoded(request))
            is_answered = True
        finally:
            if not is_answered:  # also of a call that is given up in the turn in which its head has come
                connection.close()
        body = _Body(self, address, connection)
        return httpx.Response(connection.status, headers=connection.headers, stream=body)

    async def aclose(self) -> None:
        """End what is kept; calls that are open end their own."""
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    def give_back(self, address: Address, connection: _Connection) -> None:
        """A call is over: keep its connection if its answer was read to the end, else close it."""
        if not connection.is_reusable:
            connection.close()
            return
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.setdefault(address, []).append(connection)

    async def _made(self, address: Address, limit_s: float) -> _Connection:
        """Where there is no room the log is told of the 1st, 2nd, 4th, 8th ... time: all calls fail so."""
        try:
            return await _connected(address, limit_s)
        except NoRoom as error:
            self._num_not_made += 1
            if self._num_not_made & (self._num_not_made - 1) == 0:
                log.logger().warning("connection_not_made", reason=str(error), count=self._num_not_made)
            raise

    def _kept(self, address: Address) -> _Connection | None:
        """The connection that was used last, if it is fresh enough; those that are not are closed."""
        kept = self._idle.get(address, [])
        now = asyncio.get_running_loop().time()
        while kept and (not kept[0].is_reusable or now - kept[0].idle_since > self._idle_s):
            kept.pop(0).close()
        while kept:
            connection = kept.pop()
            if connection.is_reusable:  # else the worker has closed it
                return connection
        return None


class _Body(httpx.AsyncByteStream):
    """The body of an answer, as it comes."""

    def __init__(self, owner: WorkerTransport, address: Address, connection: _Connection) -> None:
        self._owner = owner
        self._address = address
        self._connection: _Connection | None = connection

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert self._connection is not None, "the answer was closed"
        while chunk := await self._connection.next_chunk():
            yield chunk

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._owner.give_back(self._address, connection)


class _Connection(CopiedReads):
    """One socket, one call at a time. The parser calls the methods that begin with ``on_``."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.has_head = False
        self._is_complete = True
        self._keeps_alive = True
        self._failure: _Failure | None = None
        self._chunks: deque[bytes] = deque()
        self._num_waiting = 0  # bytes in ``_chunks``
        self._news = asyncio.Event()
        self._parser: httptools.HttpResponseParser | None = None  # knows this object; goes with the socket
        self._socket: asyncio.Transport | None = None

    @property
    def is_reusable(self) -> bool:
        """Whether another call can use it."""
        return self._is_complete and self._keeps_alive and self._failure is None and not self._chunks

    async def ask(self, request: bytes) -> None:
        """Send a request and wait until the head of its answer is here."""
        self.has_head = self._is_complete = False
        self.headers = []
        self._parser = httptools.HttpResponseParser(self)
        assert self._socket is not None, "not connected"
        self._socket.write(request)
        while not self.has_head:
            await self._next_news()

    async def next_chunk(self) -> bytes:
        """What has come of the body, at least a byte; nothing at its end."""
        while not self._chunks and not self._is_complete:
            await self._next_news()
        chunk = b"".join(self._chunks)
        self._chunks.clear()
        if self._num_waiting > _READ_AHEAD_BYTES and self._socket is not None:
            self._socket.resume_reading()
        self._num_waiting = 0
        return chunk

    def close(self) -> None:
        """End it, also with something unsent, and also while it is being made."""
        self._abort(httpx.ReadError, "closed by this side")

    async def _next_news(self) -> None:
        if self._failure is not None:
            kind, what = self._failure
            raise kind(what)
        await self._news.wait()
        self._news.clear()

    def _abort(self, kind: type[httpx.TransportError], what: str) -> None:
        self._fail(kind, what)
        if self._socket is not None:
            self._socket.abort()

    def _fail(self, kind: type[httpx.TransportError], what: str) -> None:
        self._failure = self._failure or (kind, what)
        self._news.set()

    # -- asyncio.Protocol ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._socket = transport
        _watch(transport.get_extra_info("socket"))
        if self._failure is not None:  # nobody waits for it any more
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_complete:
            self._abort(httpx.RemoteProtocolError, "an answer without a question")
            return
        assert self._parser is not None, "bytes come while there is a socket"
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._abort(httpx.RemoteProtocolError, f"not HTTP: {error}")
        if self._num_waiting > _READ_AHEAD_BYTES and self._socket is not None:
            self._socket.pause_reading()
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._fail(httpx.ReadError, "the connection ended" if exc is None else f"the connection broke: {exc}")
        self._parser = None

    # -- httptools -------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._is_complete:  # behind the end of the answer
            self._keeps_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None, "it is what calls"
        self.status = self._parser.get_status_code()
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._num_waiting += len(body)

    def on_message_complete(self) -> None:
        assert self._parser is not None, "it is what calls"
        self._keeps_alive = self._keeps_alive and self._parser.should_keep_alive()
        self._is_complete = True


async def _connected(address: Address, limit_s: float) -> _Connection:
    """Not with ``asyncio.wait_for``: before Python 3.12 that may swallow a cancellation, and a socket is left open."""
    connection = _Connection()
    opening = asyncio.ensure_future(asyncio.get_running_loop().create_connection(lambda: connection, *address))
    is_open = False
    try:
        await asyncio.wait({opening}, timeout=limit_s)
        if not opening.done():
            raise httpx.ConnectTimeout(f"{address[0]}:{address[1]} does not answer")
        opening.result()
        is_open = True
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise NoRoom(os.strerror(error.errno)) from error
        raise httpx.ConnectError(f"{address[0]}:{address[1]}: {error}") from error
    finally:
        if not is_open:
            opening.cancel()
            connection.close()
    return connection


def _watch(connection: socket.socket) -> None:
    """Let the kernel end a connection whose machine is gone. A process that is merely silent never ends one."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def _encoded(request: httpx.Request) -> bytes:
    """Raises httpx.LocalProtocolError for a header that would end its line."""
    lines = [b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    for name, value in request.headers.raw:
        if b"\r" in value or b"\n" in value:
            raise httpx.LocalProtocolError(f"header {name!r} holds a line end")
        lines.append(b"%s: %s" % (name, value))
    return b"\r\n".join([*lines, b"", request.content])
