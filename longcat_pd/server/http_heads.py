"""HTTP as uvicorn speaks it, with bounds that it lacks: how long a head may be, how long it may take to come, how long a
connection that is closed may stay, and that a request is not sent before the answer to the one in front is here.

Knows no routes. Bodies are bounded by who reads them.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from longcat_pd.server.closing import ClosingTransport
from longcat_pd.server.reads import CopiedReads

HEAD_BYTES = 64 << 10  # and what comes with one read; also of what stands behind a body and is none
HEAD_S = 30.0


class BoundedHeads(CopiedReads, HttpToolsProtocol):
    """One connection. A head that is too long is answered with 400; one that does not come has its connection closed.

    A request that comes before the answer to the one in front has gone (pipelining) is not answered: the connection is
    closed behind that answer, and what else comes is thrown away. uvicorn would stop reading, and not notice that the
    client leaves.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody has connected, and may say nothing."""
        self._closing = ClosingTransport(transport, self.loop)
        super().connection_made(self._closing)
        self._num_waiting = 0  # bytes since there was a whole head or a piece of a body
        self._has_moved = False
        self._is_in_head = True
        self._is_over = False  # nothing that comes is looked at
        self._too_slow: asyncio.TimerHandle | None = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side has gone, or was sent away."""
        self._forget_head()
        super().connection_lost(exc)
        self._closing.abandon()

    def eof_received(self) -> None:
        """The client sends nothing more, and may not read either: not left to asyncio, which would only close."""
        self._closing.close()

    def data_received(self, data: bytes) -> None:
        """Bytes have come, of one read."""
        if self._is_over:
            return
        self._has_moved = False
        super().data_received(data)
        if self._is_over or self.transport.is_closing():
            return
        if self._too_slow is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_head()  # for uvicorn has forgotten since when the connection is idle
        self._num_waiting = 0 if self._has_moved else self._num_waiting + len(data)
        if self._num_waiting <= HEAD_BYTES:
            return
        if self._is_in_head:
            self.send_400_response(f"A head has at most {HEAD_BYTES} bytes.")
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Not into the answer to another request."""
        if not self._is_over:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        super().on_message_begin()
        if not self._is_answering():
            self._is_in_head = True
            self._expect_head()
            return
        self._is_over = True
        self.cycle.keep_alive = False
        if self.cycle.response_complete:
            self.transport.close()

    def on_headers_complete(self) -> None:
        """The end of a head."""
        if not self._is_over:
            self._has_moved, self._is_in_head = True, False
            self._forget_head()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        if not self._is_over:
            self._has_moved = True
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of a body."""
        if not self._is_over:
            self._has_moved = True
            super().on_message_complete()

    def _is_answering(self) -> bool:
        """Whether there is an answer that has not gone to its end."""
        return self.cycle is not None and (not self.cycle.response_complete or self.transport.get_write_buffer_size() > 0)

    def _expect_head(self) -> None:
        self._forget_head()
        self._too_slow = self.loop.call_later(HEAD_S, self.transport.close)

    def _forget_head(self) -> None:
        if self._too_slow is not None:
            self._too_slow.cancel()
            self._too_slow = None
