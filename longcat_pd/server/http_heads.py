"""HTTP as uvicorn speaks it, with bounds that its parser lacks: how long a head may be, and how long it may take to come.

Knows no routes. Bodies are bounded by who reads them.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from longcat_pd.server.reads import CopiedReads

HEAD_BYTES = 64 << 10  # and what comes with one read; also of what stands behind a body and is none
HEAD_S = 30.0


class BoundedHeads(CopiedReads, HttpToolsProtocol):  # type: ignore[misc]
    """One connection. A head that is too long is answered with 400; one that does not come has its connection closed."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody has connected, and may say nothing."""
        super().connection_made(transport)
        self._num_waiting = 0  # bytes since there was a whole head or a piece of a body
        self._has_moved = False
        self._is_in_head = True
        self._too_slow = self.loop.call_later(HEAD_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side has gone, or was sent away."""
        self._too_slow.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes have come, of one read."""
        self._has_moved = False
        super().data_received(data)
        self._num_waiting = 0 if self._has_moved else self._num_waiting + len(data)
        if self._num_waiting <= HEAD_BYTES or self.transport.is_closing():
            return
        if self._is_in_head:
            self.send_400_response(f"A head has at most {HEAD_BYTES} bytes.")
        else:
            self.transport.close()

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        self._too_slow.cancel()
        self._too_slow = self.loop.call_later(HEAD_S, self.transport.close)
        self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The end of a head."""
        self._too_slow.cancel()
        self._has_moved, self._is_in_head = True, False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._has_moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of a body."""
        self._has_moved = True
        super().on_message_complete()
