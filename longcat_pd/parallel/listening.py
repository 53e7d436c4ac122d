"""Where torch.distributed listens: at one address, and for those alone who are wanted there.

Left to itself a store listens at all of the machine's addresses, and gloo takes connections as long as a group lives,
though it waits for nobody once the group's pairs are joined. Each costs a file then, and gloo ends the process when none
is left; one that comes while a pair is waited for may take its place. So what has served is deafened: a packet filter that
lets nothing through, which any process may give a socket of its own (Linux). Whoever calls there gets no answer;
connections that were taken before go on.

gloo does not give its listener away, but it tells peers the address, as the system writes it. By that the listener is found
among the files of the process, whatever else listens there.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from longcat_pd.log import logger

_BACKLOG = 2048
_FILES = Path("/proc/self/fd")
_SO_ATTACH_FILTER = 26  # Linux; Python has no name for it
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)  # one instruction: let zero bytes of a packet through


class StoreServer(TypedDict):
    """What TCPStore is told of its own listener. The file is the store's from then on."""

    host_name: str
    port: int
    master_listen_fd: int


def store_server(host: str, port: int) -> StoreServer:
    """Listen there; port 0 takes a free one. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    taken: int = listener.getsockname()[1]
    return StoreServer(host_name=host, port=taken, master_listen_fd=listener.detach())


def address_of(number: int) -> bytes:
    """Where the socket of that file listens, as the system writes it and gloo after it. Raises OSError."""
    with _opened(number) as same:
        return _written(same)


def deafen(words: Iterable[bytes], purpose: str) -> None:
    """What listens in this process at an address that stands in one of the words hears nobody from now on.

    A word without such an address, and what cannot be done, is logged. ``purpose``: what they listened for.
    """
    unknown = set(words)
    for listener in _listening():
        address = _written(listener)
        served = {word for word in unknown if address in word}
        unknown -= served
        try:
            if served:
                _let_nothing_through(listener)
        except OSError as error:
            logger().error("listener_stays_open", purpose=purpose, reason=str(error))
    if unknown:
        logger().error("listener_stays_open", purpose=purpose, reason=f"{len(unknown)} of them are not in {_FILES}")


def _listening() -> Iterator[socket.socket]:
    """Each socket of this process that takes connections, open until the next is asked for. Without /proc: none."""
    for file in list(_FILES.iterdir()) if _FILES.is_dir() else ():
        with suppress(OSError):  # it was closed meanwhile
            number = int(file.name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):  # to close a copy of another file would end its locks
                continue
            with _opened(number) as same:
                if _takes_connections(same):
                    yield same


def _takes_connections(found: socket.socket) -> bool:
    is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
    return is_tcp and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _written(listener: socket.socket) -> bytes:
    """The first fields of struct sockaddr_in or sockaddr_in6."""
    host, port, *rest = listener.getsockname()
    flow = struct.pack("!I", rest[0]) if rest else b""
    packed = socket.inet_pton(listener.family, host.partition("%")[0])
    return struct.pack("=H", listener.family) + struct.pack("!H", port) + flow + packed


def _let_nothing_through(listener: socket.socket) -> None:
    """Raises OSError."""
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    told = struct.pack("@HP", 1, ctypes.addressof(program))  # struct sock_fprog: count, padding, address
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, told)


def _opened(number: int) -> socket.socket:
    """The same socket as a file of our own, to be closed soon. Raises OSError: it is none, or closed."""
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
