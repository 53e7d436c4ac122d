"""A TCP relay that can be slow, stand still, cut or reset: put between any two processes. On loopback alone.

Knows bytes, no protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

from longcat_pd.errors import ConfigError

HERE = "127.0.0.1"
_PIECE_BYTES = 65536
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: what was not sent is thrown away, and the peer told so

Direction = Literal["to", "from", "both"]


@dataclass(frozen=True, kw_only=True)
class RelayFaults:
    """What happens to bytes on their way ``to`` the target, ``from`` it, or on ``both`` ways; of each way by itself.

    ``delay_s``: each piece waits so long. ``stall_after``, ``cut_after``: bytes of a connection that pass before nothing
    does, or before it ends; None: never. ``resets``: a cut is a reset, not a close.
    """

    direction: Direction = "both"
    delay_s: float = 0.0
    stall_after: int | None = None
    cut_after: int | None = None
    resets: bool = False


@dataclass(eq=False)
class _Connection:
    """Both ends of one, and what has passed each way."""

    client: asyncio.StreamWriter
    target: asyncio.StreamWriter

    def cut(self, *, resets: bool) -> None:
        for writer in (self.client, self.target):
            if resets:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
            writer.transport.abort() if resets else writer.close()

    def abort(self) -> None:
        """Without waiting for anybody to take what is on its way."""
        for writer in (self.client, self.target):
            writer.transport.abort()


class Relay:
    """Listens on loopback and passes on what comes. Belongs to one event loop.

    Args:
        to: address of the target.
        port: where to listen; 0 is a free one.

    Raises ConfigError for a target that is not on loopback.
    """

    def __init__(self, to: tuple[str, int], *, port: int = 0, faults: RelayFaults | None = None) -> None:
        if not _is_loopback(to[0]):
            raise ConfigError(f"to={to[0]}: a relay passes on to loopback addresses alone", param="to")
        self.port = port
        self._to = to
        self._faults = faults or RelayFaults()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def num_open(self) -> int:
        """Connections that have not ended."""
        return len(self._connections)

    async def start(self) -> None:
        """Listen; ``port`` is known then. Raises OSError."""
        self._server = await asyncio.start_server(self._accept, HERE, self.port)
        self.port = int(self._server.sockets[0].getsockname()[1])

    def become(self, faults: RelayFaults) -> None:
        """From the next piece on."""
        self._faults = faults

    def stall(self) -> None:
        """Nothing passes in the direction that has faults, until ``flow``."""
        self._flowing.clear()

    def flow(self) -> None:
        """What was held up passes, and all that follows."""
        self._flowing.set()

    def cut(self, *, resets: bool = False) -> None:
        """End every connection; the next ones are served."""
        for connection in list(self._connections):
            connection.cut(resets=resets)

    async def close(self) -> None:
        """End everything."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            target_reader, target = await asyncio.open_connection(*self._to)
        except OSError:  # nobody listens there: the client sees an end
            writer.close()
            return
        connection = _Connection(writer, target)
        self._connections.add(connection)
        try:
            ways = (self._pass(reader, target, "to", connection), self._pass(target_reader, writer, "from", connection))
            await asyncio.gather(*ways)
        finally:
            self._connections.discard(connection)
            connection.cut(resets=False)
            for end in (writer, target):
                with contextlib.suppress(ConnectionError):
                    await end.wait_closed()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Direction, connection: _Connection
    ) -> None:
        passed, has_stalled = 0, False
        with contextlib.suppress(ConnectionError):  # of either side: the other one sees its end
            while data := await reader.read(_PIECE_BYTES):
                faults = self._faults
                if faults.direction not in (way, "both"):
                    writer.write(data)
                    await writer.drain()
                    continue
                await self._flowing.wait()
                await asyncio.sleep(faults.delay_s)
                if faults.cut_after is not None and passed + len(data) >= faults.cut_after:
                    writer.write(data[: max(faults.cut_after - passed, 0)])
                    await writer.drain()
                    connection.cut(resets=faults.resets)
                    return
                if faults.stall_after is not None and passed + len(data) > faults.stall_after and not has_stalled:
                    has_stalled = True
                    self.stall()
                    await self._flowing.wait()
                passed += len(data)
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()


@contextlib.asynccontextmanager
async def relaying(to: tuple[str, int], *, port: int = 0, faults: RelayFaults | None = None) -> AsyncIterator[Relay]:
    """A relay that listens, until the end of the block."""
    relay = Relay(to, port=port, faults=faults)
    await relay.start()
    try:
        yield relay
    finally:
        await relay.close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
