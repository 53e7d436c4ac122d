"""Where a store of torch.distributed listens: at one address. Left to itself it does at all of the machine's."""

from __future__ import annotations

import socket
from typing import TypedDict

_BACKLOG = 2048


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
