"""A control socket that has faults (``faults.py``): what a driver says to its peers is lost, or late.

Knows records by their names alone.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from longcat_pd.faults import Switches
from longcat_pd.kv_transfer.control import ControlSocket
from longcat_pd.wire import Unsendable


class FaultySocket:
    """``ControlSocket`` in front of another. What is lost was sent, as far as the sender knows."""

    def __init__(self, inner: ControlSocket, switches: Switches) -> None:
        self._inner = inner
        self._switches = switches
        self._is_closed = False

    def send(self, frames: list[bytes]) -> None:
        """Hand over one message, unless it is lost or late. The last two frames are a record."""
        record = frames[-2].decode()
        if self._switches.is_on("mute_control") or self._switches.strike("drop_record", record=record) is not None:
            return
        late = self._switches.strike("late_record", record=record)
        if late is not None:
            asyncio.get_running_loop().call_later(late.seconds, self._send_late, frames)
            return
        self._inner.send(frames)

    async def recv(self) -> list[bytes]:
        """As it is."""
        return await self._inner.recv()

    def close(self) -> None:
        """As it is; what is late is lost."""
        self._is_closed = True
        self._inner.close()

    def _send_late(self, frames: list[bytes]) -> None:
        if not self._is_closed:
            with suppress(Unsendable):  # to a peer that has gone meanwhile
                self._inner.send(frames)


def exposed(socket: ControlSocket, switches: Switches | None) -> ControlSocket:
    """The same socket, which can fail if there are switches for it."""
    return socket if switches is None else FaultySocket(socket, switches)
