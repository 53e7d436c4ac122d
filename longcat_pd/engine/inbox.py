"""What the step loop has for those who wait: tokens for a request's coroutine, the ranks' reports about a transfer."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from longcat_pd.engine.request import TokenOutput
from longcat_pd.kv_transfer.messages import TransferClosed


@dataclass(eq=False)
class Inbox:
    """Tokens of one request that its coroutine has not taken yet, and the bell to wake it."""

    tokens: deque[TokenOutput] = field(default_factory=deque)
    _bell: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Wake the coroutine if it waits."""
        if self._bell is not None and not self._bell.done():
            self._bell.set_result(None)

    def next_ring(self) -> asyncio.Future[None]:
        """Done when the bell rings after this call."""
        self._bell = asyncio.get_running_loop().create_future()
        return self._bell


@dataclass(eq=False)
class Reports:
    """What the ranks have said about the end of one transfer. Complete with all ranks, or with the first failure."""

    events: list[TransferClosed] = field(default_factory=list)
    is_complete: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, event: TransferClosed, num_ranks: int) -> None:
        """One rank's part is over."""
        self.events.append(event)
        if not event.ok or len(self.events) == num_ranks:
            self.is_complete.set()
