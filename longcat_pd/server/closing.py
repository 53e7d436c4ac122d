"""A connection that ends once it is closed, also when nobody reads what was written last.

asyncio keeps a closed connection until all of that has gone: of a client that does not read, for ever. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from typing import Any

UNREAD_S = 30.0  # how long the last bytes of a closed connection may stand still


class ClosingTransport(asyncio.Transport):
    """``socket`` for a protocol that closes it. What is left to be sent then is given up when none of it goes for UNREAD_S.

    Whoever gets ``connection_lost`` calls ``abandon``.
    """

    def __init__(self, socket: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._socket = socket
        self._loop = loop
        self._ends: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Nothing is read any more; what was written is still sent."""
        if not self._socket.is_closing():
            self._socket.close()
            self._look_later()

    def abandon(self) -> None:
        """The connection is no more."""
        if self._ends is not None:
            self._ends.cancel()

    def _look_later(self) -> None:
        self._ends = self._loop.call_later(UNREAD_S, self._look, self._socket.get_write_buffer_size())

    def _look(self, size_before: int) -> None:
        if self._socket.get_write_buffer_size() < size_before:
            self._look_later()
        else:
            self._socket.abort()

    # -- as the socket does it -------------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        """Send it."""
        self._socket.write(data)

    def is_closing(self) -> bool:
        """Whether nothing more is read."""
        return self._socket.is_closing()

    def pause_reading(self) -> None:
        """Let who sends wait."""
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        """Let them no longer."""
        self._socket.resume_reading()

    def get_write_buffer_size(self) -> int:
        """Bytes that have not gone."""
        return self._socket.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Of the socket."""
        return self._socket.get_extra_info(name, default)
