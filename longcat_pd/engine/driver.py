"""The engine: the verbs that a role is written with. They wait; the step loop works.

    async with engine.reserve(request, num_tokens) as seq:      # blocks and a slot, first come first served
        first = await engine.prefill(seq)                       # or: announce, transfer_closed
        async for delta in engine.decode(seq, first): ...       # the first delta holds ``first``

Every wait ends with what it waits for, the request's deadline or the failure of the instance. Knows no role.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from longcat_pd.clock import Clock
from longcat_pd.config.schema import EngineConfig, ParallelConfig
from longcat_pd.engine import accounting
from longcat_pd.engine.executor import Executor, Ready
from longcat_pd.engine.loop import StepLoop
from longcat_pd.engine.request import Delta, Event, Request, TokenOutput
from longcat_pd.engine.scheduler import DECODE_PLANS, Scheduler
from longcat_pd.engine.sequence import Sequence, Stage
from longcat_pd.kv_transfer.messages import Arrival, DraftState, Push, TransferClosed
from longcat_pd.metrics import Metrics


class Engine:
    """One instance's queue, memory and step loop. All methods belong to one event loop.

    Args:
        executor: its ranks; the engine starts and closes them.
        eos_token_ids: tokens that end an answer.
        decode_plans: decode steps in flight at once (see ``Scheduler``).
    """

    def __init__(
        self,
        config: EngineConfig,
        parallel: ParallelConfig,
        *,
        executor: Executor,
        eos_token_ids: frozenset[int],
        clock: Clock,
        metrics: Metrics,
        decode_plans: int = DECODE_PLANS,
    ) -> None:
        self._queue_timeout_s = config.queue_timeout_s
        self._clock = clock
        self._parallel = parallel
        self._scheduler = Scheduler(config, parallel, eos_token_ids=eos_token_ids, decode_plans=decode_plans)
        self.ready: Ready = ()  # what the ranks told at start
        self.prefixes = self._scheduler.room.prefixes
        self.acceptance = accounting.Acceptance(metrics.engine)
        self._loop = StepLoop(
            self._scheduler, executor=executor, clock=clock, metrics=metrics.engine, on_decoded=self.acceptance.add
        )
        self.glance = accounting.Glance(self._loop, self.acceptance)
        metrics.refresh_with(lambda: accounting.set_gauges(self._loop, metrics.engine))

    async def start(self) -> Ready:
        """Start the ranks and the loop. Raises ConfigError, RankLost or EngineFault when they do not come up."""
        self.ready = await self._loop.start()
        return self.ready

    async def close(self) -> None:
        """End the loop and the ranks; whatever is open gets WorkerUnavailable (draining)."""
        await self._loop.close()

    async def failed(self) -> NoReturn:
        """Wait until the instance cannot go on; raises the reason."""
        await self._loop.failed()

    def health(self) -> accounting.Health:
        """For readiness; never waits."""
        return accounting.health(self._loop)

    @asynccontextmanager
    async def reserve(self, request: Request, num_tokens: int) -> AsyncIterator[Sequence]:
        """Blocks for ``num_tokens`` positions and a slot; leaving gives everything back, whatever was going on.

        Raises:
            InvalidRequest: an empty instance has no room for so much.
            Overloaded: max_queued_requests wait already, or no room within queue_timeout_s.
            DeadlineExceeded, RankLost, EngineFault, WorkerUnavailable.
        """
        self._loop.raise_failure()
        seq = self._scheduler.room.enqueue(request, num_tokens)
        seq.stamp(Event.ARRIVED, self._clock.now())
        self._loop.enter(seq)
        try:
            await self._wait_for_room(seq)
            yield seq
        finally:
            seq.stamp(Event.FINISHED, self._clock.now())
            self._loop.leave(seq)

    async def prefill(self, seq: Sequence, push: Push | None = None) -> TokenOutput:
        """Compute the whole prompt; the first token. ``push``: where its cache goes, layer by layer."""
        self._loop.raise_failure()
        if push is not None:
            self._loop.expect(push.transfer_id)
        self._scheduler.start_prefill(seq, push)
        self._loop.wake()
        inbox = self._loop.inboxes[seq]
        while not inbox.tokens:
            await self._loop.next_ring(seq)
        return inbox.tokens.popleft()

    def announce(self, seq: Sequence, arrival: Arrival) -> None:
        """Tell the ranks (next plan) that a transfer will fill the blocks of ``seq``."""
        self._loop.raise_failure()
        self._loop.expect(arrival.transfer_id)
        self._scheduler.announce(seq, arrival)
        self._loop.wake()

    async def transfer_closed(self, transfer_id: str) -> list[TransferClosed]:
        """Reports of all ranks about their part of an announced or pushed transfer.

        Returns as soon as all ranks have reported, or one of them with ``ok`` false (then only those that have so far).
        No limit of its own: the caller's. Raises RankLost, EngineFault.
        """
        reports = self._loop.reports[transfer_id]
        self._loop.raise_failure()
        await reports.is_complete.wait()
        self._loop.raise_failure()
        return list(reports.events)

    def reported(self, transfer_id: str) -> list[TransferClosed]:
        """Reports about an announced or pushed transfer that have come so far."""
        return list(self._loop.reports[transfer_id].events)

    async def decode(
        self, seq: Sequence, first: TokenOutput, draft_state: DraftState | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Generate behind ``first``, which is the first delta; ends with the delta that has ``finish``.

        A sequence with an announced arrival is admitted here, with its prompt computed and the ``draft_state`` that came.
        """
        self._loop.raise_failure()
        self._scheduler.start_decode(seq, first, draft_state)
        seq.stamp(Event.FIRST_TOKEN, self._clock.now())
        self._loop.wake()
        inbox = self._loop.inboxes[seq]
        inbox.tokens.append(first)
        num_sent = 0
        while not (seq.finish and num_sent == len(seq.outputs)):
            while not inbox.tokens:
                await self._loop.next_ring(seq)
            tokens = tuple(inbox.tokens)
            inbox.tokens.clear()
            num_sent += len(tokens)
            if seq.finish and num_sent == len(seq.outputs):
                seq.stamp(Event.FINISHED, self._clock.now())
                yield Delta(tokens, seq.finish, seq.matched_stop_token)
            else:
                yield Delta(tokens)

    def stamp(self, seq: Sequence, event: Event) -> None:
        """Note a life event of the hand-over."""
        seq.stamp(event, self._clock.now())

    async def accounting(self, *, transfers: int = 0, request_sockets: int = 0) -> dict[str, Any]:
        """``driver``, ``ranks``, ``mismatch``, ``idle``, ``outstanding`` of /debug/accounting, fresh within 2 s."""
        return await accounting.account(
            self._loop, self._clock, parallel=self._parallel, transfers=transfers, request_sockets=request_sockets
        )

    async def _wait_for_room(self, seq: Sequence) -> None:
        until = math.inf if seq.request.is_patient else self._clock.now() + self._queue_timeout_s
        while seq.stage is Stage.WAITING:
            if self._clock.now() >= until:
                raise self._scheduler.room.overloaded(f"no room within {self._queue_timeout_s:g} s")
            await self._loop.next_ring(seq, until)
        self._loop.raise_failure()
