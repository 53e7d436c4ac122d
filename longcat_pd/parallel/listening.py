"""Where torch.distributed listens: at one address, and for those alone who are wanted there.

Left to itself a store listens at all of the machine's addresses, and gloo takes connections as long as a group lives,
though it waits for nobody once the group's pairs are joined. Each costs a file then, and gloo ends the process when none
is left; one that comes while a pair is waited for may take its place. So what has served is deafened: a packet filter that
lets nothing through, which any process may give a socket of its own (Linux). Whoever calls there gets no answer;
connections that were taken before go on.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import threading
from pathlib import Path
from typing import TypedDict

from longcat_pd.log import logger

_BACKLOG = 2048
_FILES = Path("/proc/self/fd")
_SO_ATTACH_FILTER = 26  # Linux; Python has no name for it
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)  # one instruction: let zero bytes of a packet through
_BEGINNING = threading.RLock()  # held where something begins to listen, so that who looks knows what is whose


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
        with _BEGINNING:
            listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    taken: int = listener.getsockname()[1]
    return StoreServer(host_name=host, port=taken, master_listen_fd=listener.detach())


class Listeners:
    """What begins to listen in this process between ``begin`` and ``note``, to be deafened when it has served.

    One thread calls both, and others that begin or serve a store wait meanwhile: where a process makes several groups
    beside each other, nothing between the two may wait for another process.
    """

    def __init__(self) -> None:
        self._before: frozenset[tuple[int, int]] = frozenset()
        self._noted: frozenset[tuple[int, int]] = frozenset()
        self._is_looking = False

    def begin(self) -> None:
        """From here on."""
        _BEGINNING.acquire()
        self._is_looking = True
        self._before = _listening()

    def note(self) -> None:
        """Up to here. Again: nothing."""
        if self._is_looking:
            self._noted = _listening() - self._before
            self._is_looking = False
            _BEGINNING.release()

    def deafen(self, purpose: str) -> None:
        """Nobody else is heard there. What cannot be done is logged. ``purpose``: what they listened for."""
        if not self._noted:
            logger().error("listener_stays_open", purpose=purpose, reason=f"nothing new that listens is in {_FILES}")
        for number, inode in self._noted:
            try:
                _deafen(number, inode)
            except OSError as error:
                logger().error("listener_stays_open", purpose=purpose, reason=str(error))


def _listening() -> frozenset[tuple[int, int]]:
    """(file, inode) of each socket of this process that takes connections. Empty where there is no /proc."""
    found = set()
    for file in list(_FILES.iterdir()) if _FILES.is_dir() else ():
        number = int(file.name)
        try:
            state = os.fstat(number)
            if stat.S_ISSOCK(state.st_mode) and _takes_connections(number):
                found.add((number, state.st_ino))
        except OSError:  # it was closed meanwhile
            continue
    return frozenset(found)


def _takes_connections(number: int) -> bool:
    with _opened(number) as same:
        is_tcp = same.family in (socket.AF_INET, socket.AF_INET6) and same.type == socket.SOCK_STREAM
        return is_tcp and bool(same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _deafen(number: int, inode: int) -> None:
    """Raises OSError."""
    with _opened(number) as same:
        if os.fstat(same.fileno()).st_ino != inode:
            return  # it is closed, and the number another file's
        program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
        told = struct.pack("@HP", 1, ctypes.addressof(program))  # struct sock_fprog: count, padding, address
        same.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, told)


def _opened(number: int) -> socket.socket:
    """The same socket as a file of our own, to be closed soon. Raises OSError: it is none, or closed."""
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
