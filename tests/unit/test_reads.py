"""What a protocol gets of a socket when reads are copied."""

from __future__ import annotations

import asyncio

import pytest

from longcat_pd.load_balancer.transport import _Connection
from longcat_pd.server.http_heads import BoundedHeads
from longcat_pd.server.reads import READ_BYTES, CopiedReads


class Reader(CopiedReads):
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.is_over = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.is_over.set()


async def test_all_bytes_come_in_order_and_are_nobody_elses() -> None:
    reader, sent = Reader(), bytes(range(256)) * 2000
    server = await asyncio.get_running_loop().create_server(lambda: reader, "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    for first in range(0, len(sent), 70_001):
        writer.write(sent[first : first + 70_001])
        await asyncio.sleep(0)
    writer.close()
    await asyncio.wait_for(reader.is_over.wait(), 10.0)
    server.close()
    assert b"".join(reader.pieces) == sent
    assert {type(piece) for piece in reader.pieces} == {bytes}
    assert max(map(len, reader.pieces)) <= READ_BYTES


async def test_an_idle_or_ended_connection_holds_no_buffer() -> None:
    reader = Reader()
    reader.get_buffer(-1)[:2] = b"hi"
    reader.buffer_updated(2)
    assert (reader.pieces, reader._buffer) == ([b"hi"], None)
    reader.get_buffer(-1)  # in which the end is found
    reader.connection_lost(None)
    assert reader._buffer is None


@pytest.mark.parametrize("protocol", [BoundedHeads, _Connection])
def test_every_connection_of_our_servers_and_clients_is_read_so(protocol: type) -> None:
    assert issubclass(protocol, CopiedReads)
    assert protocol.get_buffer is CopiedReads.get_buffer and protocol.buffer_updated is CopiedReads.buffer_updated
