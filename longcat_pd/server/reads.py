"""How bytes of a connection are read: into a buffer that lives for one read, and out of it into as many bytes as came.

asyncio's own way asks the heap for 256 KiB and gives back what was not needed. What stays is a small piece in front of a
hole; it is used again for other things of its size, so that it stays for long, and the next read does not fit into the
hole. A process that reads small messages grows so by some 200 bytes a request, for ever.
"""

from __future__ import annotations

import asyncio

READ_BYTES = 64 << 10  # of one read at most


class CopiedReads(asyncio.BufferedProtocol, asyncio.Protocol):
    """What a protocol inherits from, first of all, to have its ``data_received`` called with bytes of their own."""

    _buffer: bytearray | None = None

    def get_buffer(self, sizehint: int) -> bytearray:
        """Where the next bytes go."""
        self._buffer = bytearray(READ_BYTES)
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """So many have come."""
        assert self._buffer is not None, "it has been asked for"
        data = bytes(memoryview(self._buffer)[:nbytes])
        self._buffer = None
        self.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more comes. The last read found the end: its buffer must not last as long as what is told of it."""
        self._buffer = None
        super().connection_lost(exc)
