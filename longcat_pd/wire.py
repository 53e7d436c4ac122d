"""Small records on ZeroMQ: sockets by the name of their pattern, and the form of a record on the wire.

A record is a frozen dataclass; on the wire it is two frames, its class name and its fields as MessagePack. Lists of token
or block ids are little-endian int32 bytes inside a record. This file alone knows msgspec, and with ``curve.py``, which says
who may connect, ZeroMQ; it knows no record.
"""

from __future__ import annotations

import asyncio
import socket as sockets
import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec
import zmq

from longcat_pd.curve import Admission, Door

R = TypeVar("R")

WIRE_VERSION = 4  # raised whenever a record changes its meaning; must be equal in both pools

Pattern = Literal["router", "dealer", "push", "pull"]

_Socket = zmq.Socket[bytes]

_KINDS: dict[Pattern, int] = {"router": zmq.ROUTER, "dealer": zmq.DEALER, "push": zmq.PUSH, "pull": zmq.PULL}
_HIGH_WATER_MARK = 4096  # messages; far above what is ever in flight, so that reaching it means a dead reader
_MAX_FRAME_BYTES = 256 << 20  # a plan with a million-token prompt takes 4 MiB
_MAX_TAG_BYTES = 64
_DIAL_AGAIN_S = 0.2  # after a handshake that failed


class MalformedRecord(ValueError):
    """Frames that are not a record of the expected kinds: unknown tag, wrong types, too long."""


class Unsendable(ConnectionError):
    """The message cannot leave now: no such peer is connected, or it has stopped reading."""


def tcp(host: str, port: int | str) -> str:
    """The ZeroMQ address of a port. ``host``: a name, or an IPv4 or IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _numeric(endpoint: str) -> str:
    """An address to bind, its name replaced by an address of IPv4 where it has one.

    ZeroMQ takes a name for that of an interface first, and knows none that has an address of IPv6 alone.

    Raises OSError for a name that nobody knows.
    """
    scheme, _, place = endpoint.partition("://")
    host, _, port = place.rpartition(":")
    if scheme != "tcp" or host == "*" or host.startswith("["):
        return endpoint
    try:
        found = sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)
    except sockets.gaierror as error:
        raise OSError(error.errno, f"{endpoint}: {error.strerror}") from error
    first = min(found, key=lambda entry: entry[0] != sockets.AF_INET)
    return tcp(str(first[4][0]), port)


class _Open(NamedTuple):
    """A socket that is open. ``context``: of its own; it ends when nobody holds it."""

    context: zmq.Context[_Socket]
    socket: _Socket
    door: Door


def _opened(
    pattern: Pattern, endpoint: str, *, bind: bool, identity: bytes, admission: Admission, is_attended: bool
) -> _Open:
    """A socket with a context of its own, and its door. Raises OSError when the address cannot be had."""
    address = _numeric(endpoint) if bind else endpoint
    context: zmq.Context[_Socket] = zmq.Context()
    socket = context.socket(_KINDS[pattern])
    if admission.seal is not None:
        admission.seal.put_on(socket, listens=bind)
    door = Door(socket, admission, listens=bind)
    try:
        if is_attended:
            door.hear()
        _set_up(socket, pattern, address, bind=bind, identity=identity)
    except zmq.ZMQError as error:
        door.close()
        context.destroy(linger=0)
        raise OSError(error.errno, f"{endpoint}: {error.strerror}") from error
    return _Open(context, socket, door)


def _set_up(socket: _Socket, pattern: Pattern, endpoint: str, *, bind: bool, identity: bytes) -> None:
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)  # a peer that starts is greeted before it loads weights
    if pattern == "router":
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else a message to an absent peer vanishes in silence
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted peer takes over its name
    if identity:
        socket.setsockopt(zmq.IDENTITY, identity)
    if "[" in endpoint:  # else names would be looked for among addresses of IPv6 too
        socket.setsockopt(zmq.IPV6, 1)
    if bind:
        socket.bind(endpoint)
    else:
        socket.connect(endpoint)


def _send(socket: _Socket, frames: Sequence[bytes]) -> None:
    try:
        socket.send_multipart(frames, flags=zmq.NOBLOCK)
    except zmq.ZMQError as error:
        raise Unsendable(str(error)) from error


def _last_endpoint(socket: _Socket) -> str:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode()


class AsyncSocket:
    """A socket of an event loop. ``send`` never waits; ``recv`` is cancellable.

    A ROUTER's messages begin with the identity of the peer, both ways. One task receives. Not ``zmq.asyncio``: its futures
    cost a message three times as long as the message itself.

    Args:
        pattern: router, dealer, push or pull.
        endpoint: ZeroMQ address; port ``*`` or 0 takes a free one when bound.
        bind: listen (else connect, now and again after every break).
        identity: name under which a ROUTER knows this socket.
        admission: who may connect.
        linger_s: how long ``close`` lets unsent messages leave.

    Raises:
        OSError: the address cannot be bound (zmq.ZMQError is one).
    """

    def __init__(
        self,
        pattern: Pattern,
        endpoint: str,
        *,
        bind: bool,
        admission: Admission,
        identity: bytes = b"",
        linger_s: float = 0.0,
    ) -> None:
        self._open = partial(
            _opened, pattern, endpoint, bind=bind, identity=identity, admission=admission, is_attended=True
        )
        self._context, self._socket, self._door = self._open()
        self._is_dialler = not bind
        self._watched: list[int] = []  # files
        self._waiting: asyncio.Future[None] | None = None  # of the task in ``recv``
        self._loop: asyncio.AbstractEventLoop | None = None  # that watches the socket and its door
        self._linger_ms = int(linger_s * 1000)

    @property
    def endpoint(self) -> str:
        """Address that was last bound or connected, with the port that was taken."""
        return _last_endpoint(self._socket)

    def send(self, frames: Sequence[bytes]) -> None:
        """Hand one message to ZeroMQ. Raises Unsendable."""
        try:
            _send(self._socket, frames)
        finally:
            if self._waiting is not None:  # sending may have taken the signal that something has come
                self._look()

    async def recv(self) -> list[bytes]:
        """Wait for the next message."""
        assert self._waiting is None, "one task receives"
        loop = self._loop or self._watch(asyncio.get_running_loop())
        while True:
            try:
                return self._socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                self._waiting = loop.create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None

    def close(self) -> None:
        """Close; a waiting ``recv`` is cancelled."""
        self._unwatch()
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        self._context.destroy(linger=self._linger_ms)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
        self._loop = loop
        self._watched = [self._socket.fileno(), *self._door.attend()]
        loop.add_reader(self._watched[0], self._look)
        for file in self._watched[1:]:
            loop.add_reader(file, self._look_at_the_door)
        self._look_at_the_door()
        return loop

    def _unwatch(self) -> None:
        if self._loop is not None:
            for file in self._watched:
                self._loop.remove_reader(file)
        self._watched = []
        self._door.close()

    def _look_at_the_door(self) -> None:
        if self._door.look() and self._loop is not None and self._is_dialler:
            self._loop.call_later(_DIAL_AGAIN_S, self._dial_again, self._socket)

    def _dial_again(self, socket: _Socket) -> None:
        """With another socket: one that is told to let go and to connect again may not end any more (libzmq 4.3.5)."""
        if self._loop is None or socket is not self._socket or socket.closed:
            return
        self._unwatch()
        self._context.destroy(linger=0)
        self._context, self._socket, self._door = self._open()
        self._watch(self._loop)

    def _look(self) -> None:
        """Wake the receiver if something has come. ZeroMQ signals changes only; asking for the state takes the signal."""
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        if events & zmq.POLLIN and self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class BlockingSocket:
    """The same for a thread of a rank. Owned by one thread at a time. With a seal it dials: nobody attends its door."""

    def __init__(
        self,
        pattern: Pattern,
        endpoint: str,
        *,
        bind: bool,
        admission: Admission,
        identity: bytes = b"",
        linger_s: float = 1.0,
    ) -> None:
        assert admission.seal is None or not bind
        self._context, self._socket, _ = _opened(
            pattern, endpoint, bind=bind, identity=identity, admission=admission, is_attended=False
        )
        self._linger_ms = int(linger_s * 1000)

    @property
    def endpoint(self) -> str:
        """Address that was last bound or connected, with the port that was taken."""
        return _last_endpoint(self._socket)

    def send(self, frames: Sequence[bytes]) -> None:
        """Hand one message to ZeroMQ. Raises Unsendable."""
        _send(self._socket, frames)

    def recv(self, timeout_s: float) -> list[bytes] | None:
        """The next message, or None when ``timeout_s`` are over first."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        return self._socket.recv_multipart()

    def close(self) -> None:
        """Close, after at most ``linger_s``."""
        self._context.destroy(linger=self._linger_ms)


class Codec(Generic[R]):
    """A closed set of record classes <-> frames ``[class name, MessagePack]``."""

    def __init__(self, *classes: type[R]) -> None:
        self._decoders = {c.__name__.encode(): msgspec.msgpack.Decoder(c) for c in classes}
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, record: R) -> list[bytes]:
        """Frames of a record of this set."""
        tag = type(record).__name__.encode()
        assert tag in self._decoders, f"{tag!r} does not travel here"
        return [tag, self._encoder.encode(record)]

    def decode(self, frames: Sequence[bytes]) -> R:
        """The record in these frames (without a ROUTER's identity frame). Raises MalformedRecord."""
        if len(frames) != 2 or len(frames[0]) > _MAX_TAG_BYTES:
            raise MalformedRecord(f"{len(frames)} frames where a tag and a body were expected")
        decoder = self._decoders.get(bytes(frames[0]))
        if decoder is None:
            raise MalformedRecord(f"unknown record {bytes(frames[0])!r}")
        try:
            return decoder.decode(frames[1])
        except (msgspec.DecodeError, RecursionError) as error:
            raise MalformedRecord(f"{bytes(frames[0]).decode()}: {error}") from error


def to_json(record: object) -> str:
    """A record, or plain data, as JSON text."""
    return msgspec.json.encode(record).decode()


def from_json(cls: type[R], text: str | bytes) -> R:
    """The record of class ``cls`` in JSON text. Raises MalformedRecord."""
    try:
        return msgspec.json.decode(text, type=cls)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedRecord(f"{cls.__name__}: {error}") from error


def pack(ids: Iterable[int]) -> bytes:
    """Ids as little-endian int32 bytes."""
    numbers = array("i", ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def unpack(data: bytes) -> array[int]:
    """The ids in little-endian int32 bytes. Raises MalformedRecord when the length is no multiple of 4."""
    if len(data) % 4:
        raise MalformedRecord(f"{len(data)} bytes are no list of int32")
    numbers = array("i")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
