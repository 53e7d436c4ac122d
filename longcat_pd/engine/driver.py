"""The engine: one loop that turns requests into plans, and the verbs that a role is written with.

    async with engine.reserve(request, num_tokens) as seq:      # blocks and a slot, first come first served
        first = await engine.prefill(seq)                       # or: engine.announce(seq, arrival), transfer_closed, attach
        async for delta in engine.decode(seq, first): ...       # the first delta holds ``first``

Skeleton: signatures are final.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from longcat_pd.clock import Clock
from longcat_pd.config.schema import EngineConfig, ParallelConfig
from longcat_pd.engine.executor import Executor
from longcat_pd.engine.plan import RankReady
from longcat_pd.engine.request import Delta, Event, Request, TokenOutput
from longcat_pd.engine.sequence import Sequence
from longcat_pd.errors import LongcatError
from longcat_pd.kv_transfer.messages import Arrival, Push, TransferClosed
from longcat_pd.metrics import Metrics


class Engine:
    """One instance's queue, memory and step loop. All methods belong to one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        parallel: ParallelConfig,
        *,
        executor: Executor,
        eos_token_ids: frozenset[int],
        clock: Clock,
        metrics: Metrics,
    ) -> None: ...

    async def start(self) -> tuple[RankReady, ...]:
        """Start the ranks and the loop. Raises ConfigError, RankLost or EngineFault when they do not come up."""
        ...

    async def close(self) -> None:
        """End the loop and the ranks; whatever is open gets WorkerUnavailable (draining)."""
        ...

    async def failed(self) -> LongcatError:
        """Wait until the instance cannot go on; the reason."""
        ...

    @property
    def failure(self) -> LongcatError | None:
        """The reason if the instance cannot go on."""
        ...

    @asynccontextmanager
    async def reserve(self, request: Request, num_tokens: int) -> AsyncIterator[Sequence]:
        """Blocks for ``num_tokens`` positions and a slot; leaving gives everything back, whatever was going on.

        Raises:
            InvalidRequest: an empty instance has no room for so much.
            Overloaded: max_queued_requests wait already, or no room within queue_timeout_s.
            DeadlineExceeded, RankLost, EngineFault.
        """
        ...

    async def prefill(self, seq: Sequence, push: Push | None = None) -> TokenOutput:
        """Compute the whole prompt; the first token. ``push``: where its cache goes, layer by layer."""
        ...

    def announce(self, seq: Sequence, arrival: Arrival) -> None:
        """Tell the ranks (next plan) that a transfer will fill the blocks of ``seq``."""
        ...

    async def transfer_closed(self, transfer_id: str) -> list[TransferClosed]:
        """Reports of all ranks about their part of an announced or pushed transfer.

        Returns as soon as all ranks have reported, or one of them with ``ok`` false (then only those that have so far).
        No limit of its own: the caller's. Raises RankLost, EngineFault.
        """
        ...

    def attach(self, seq: Sequence, request: Request) -> None:
        """Replace the provisional request of an offer by that of the leg that has come (equal prompt)."""
        ...

    def decode(self, seq: Sequence, first: TokenOutput) -> AsyncIterator[Delta]:
        """Generate behind ``first``, which is the first delta; ends with the delta that has ``finish``.

        A sequence with an announced arrival is admitted here, with its prompt computed.
        """
        ...

    def stamp(self, seq: Sequence, event: Event) -> None:
        """Note a life event of the hand-over."""
        ...

    async def accounting(self, *, transfers: int = 0, request_sockets: int = 0) -> dict[str, Any]:
        """``driver``, ``ranks``, ``mismatch``, ``idle``, ``outstanding`` of /debug/accounting, fresh within 2 s."""
        ...
