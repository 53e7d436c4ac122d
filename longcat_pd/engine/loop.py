"""The step loop of a driver: collects what ranks answer, makes and submits the next plans, wakes who waits.

Owns the scheduler, the room and the failure of the instance. Requests touch it through the verbs of ``driver.py`` only.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from longcat_pd.clock import Clock
from longcat_pd.engine.executor import Executor, Ready
from longcat_pd.engine.inbox import Inbox, Reports
from longcat_pd.engine.plan import Phase, SlotOutput, StepOutput, StepPlan
from longcat_pd.engine.scheduler import Scheduler
from longcat_pd.engine.sequence import Sequence
from longcat_pd.errors import DeadlineExceeded, EngineFault, LongcatError, WorkerUnavailable
from longcat_pd.kv_transfer.messages import TransferClosed
from longcat_pd.log import logger
from longcat_pd.metrics import EngineMetrics

Outputs = asyncio.Future[tuple[StepOutput, ...]]
PACE_STEPS = 32  # over so many of the latest the pace is a mean


@dataclass(frozen=True)
class _Flight:
    plan: StepPlan
    outputs: Outputs
    submitted_at: float


class StepLoop:
    """Runs from ``start`` until it fails or is closed; then every wait raises the reason.

    The verbs call ``wake`` after everything that they change. ``on_decoded`` is told what every decode step brings to
    sequences that had not ended before it. ``pace``: seconds of the latest steps.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        executor: Executor,
        clock: Clock,
        metrics: EngineMetrics,
        on_decoded: Callable[[list[SlotOutput]], None],
    ) -> None:
        self.scheduler = scheduler
        self.inboxes: dict[Sequence, Inbox] = {}
        self.reports: dict[str, Reports] = {}
        self._has_failed = asyncio.Event()
        self.executor = executor
        self._clock = clock
        self._metrics = metrics
        self._on_decoded = on_decoded
        self._flights: deque[_Flight] = deque()
        self._collected_at = 0.0
        self.pace: dict[Phase, deque[float]] = {p: deque(maxlen=PACE_STEPS) for p in ("prefill", "decode")}
        self._wake = asyncio.Event()
        self.failure: LongcatError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> Ready:
        """Start the ranks, then the loop. Raises ConfigError, RankLost or EngineFault when they do not come up."""
        ready = await self.executor.start(self._closed, self.fail)
        load_s, weight_bytes = max(r.load_s for r in ready), sum(r.weight_bytes for r in ready)
        logger().info("weights_loaded", ranks=len(ready), seconds=load_s, bytes=weight_bytes)
        _log_memory(ready)
        compilations = sum(rank.accounts.compilations for rank in ready)
        logger().info("warmed_up", ranks=len(ready), seconds=max(r.warm_s for r in ready), compilations=compilations)
        task = asyncio.get_running_loop().create_task(self._run())
        task.add_done_callback(self._ended)
        self._tasks.append(task)
        return ready

    async def close(self) -> None:
        """End the loop, then the ranks; whatever is open gets WorkerUnavailable (draining)."""
        self.fail(WorkerUnavailable("this instance is shutting down", code="draining"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.executor.close()

    def wake(self) -> None:
        """Something has changed: look at it in the next turn."""
        self._wake.set()

    def enter(self, seq: Sequence) -> None:
        """A sequence stands in line from now on."""
        self.inboxes[seq] = Inbox()
        self.wake()

    def leave(self, seq: Sequence) -> None:
        """It gives everything back."""
        self.scheduler.release(seq)
        del self.inboxes[seq]
        for transfer in (seq.push, seq.arrival):
            if transfer is not None:
                self.reports.pop(transfer.transfer_id, None)
        self.wake()

    def expect(self, transfer_id: str) -> None:
        """Collect the ranks' reports about this transfer, until its sequence leaves."""
        self.reports[transfer_id] = Reports()

    def fail(self, error: LongcatError) -> None:
        """Nothing goes on: every open request ends with this error. The first one counts."""
        if self.failure is not None:
            return
        self.failure = error
        self._has_failed.set()
        for inbox in self.inboxes.values():
            inbox.ring()
        for reports in self.reports.values():
            reports.is_complete.set()

    async def failed(self) -> NoReturn:
        """Wait until nothing goes on any more; raises the reason."""
        await self._has_failed.wait()
        assert self.failure is not None
        raise copy.copy(self.failure)

    @property
    def is_running(self) -> bool:
        """Whether plans are executed."""
        return self.failure is None and bool(self._tasks)

    def raise_failure(self) -> None:
        """Raise the reason if nothing goes on any more."""
        if self.failure is not None:
            raise copy.copy(self.failure)  # each request its own: a traceback belongs to one raise

    def checkpoint(self) -> Outputs:
        """Submit a plan that computes nothing; its answers tell what the ranks hold."""
        return self._submit(self.scheduler.checkpoint(self._clock.now()))

    async def next_ring(self, seq: Sequence, until: float = float("inf")) -> None:
        """Wait until there is news of ``seq``, at most until ``until``.

        Raises DeadlineExceeded, and the reason when it, or nothing, goes on any more.
        """
        self.raise_failure()
        if seq.failure is not None:  # who asks has taken all that came before it
            raise copy.copy(seq.failure)
        now, deadline = self._clock.now(), seq.request.deadline
        if now >= deadline:
            raise DeadlineExceeded("the deadline of this request is over")
        try:
            await self._clock.within(min(until, deadline) - now, self.inboxes[seq].next_ring())
        except TimeoutError:
            return
        self.raise_failure()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            began = self._clock.now()
            phases = self._collect()
            self._dispatch()
            for phase in phases:
                self._metrics.driver_step_seconds(phase).observe(self._clock.now() - began)

    def _collect(self) -> list[Phase]:
        """Take what has been answered; the phases of the steps that were."""
        phases = []
        while self.failure is None and self._flights and self._flights[0].outputs.done():
            flight = self._flights.popleft()
            outputs = flight.outputs.result()  # an error of the ranks ends the loop here
            now = self._clock.now()
            news = self.scheduler.apply(outputs, now)
            for seq, tokens in news:
                seq.request.life.step(now)
                if (tokens or seq.failure) and seq in self.inboxes:
                    self.inboxes[seq].tokens.extend(tokens)
                    self.inboxes[seq].ring()
            if flight.plan.segments:
                began = max(flight.submitted_at, self._collected_at)  # a plan that is ahead waits for its turn
                self._metrics.step_seconds(flight.plan.phase).observe(now - began)
                self.pace[flight.plan.phase].append(now - began)
                phases.append(flight.plan.phase)
                if flight.plan.phase == "decode":
                    self._decoded(outputs, {seq.slot for seq, _ in news})
                    for seq, tokens in news:
                        seq.request.life.num_accepted += max(len(tokens) - 1, 0)
            self._collected_at = now
        return phases

    def _decoded(self, outputs: tuple[StepOutput, ...], alive: set[int]) -> None:
        """Count a decode step. Of its ranks the one that stood still for longest says what of the driver was exposed."""
        self._on_decoded([slot for output in outputs for slot in output.slots if slot.slot in alive])
        slowest = max(outputs, key=lambda output: output.waited_ms)
        self._metrics.step_wait_seconds.observe(slowest.waited_ms / 1000.0)
        self._metrics.step_compute_seconds.observe(slowest.compute_ms / 1000.0)

    def _dispatch(self) -> None:
        while self.failure is None and (plan := self.scheduler.next_plan(self._clock.now())) is not None:
            self._submit(plan)
        for seq in self.scheduler.room.admit_waiting():
            self.inboxes[seq].ring()

    def _submit(self, plan: StepPlan) -> Outputs:
        outputs = self.executor.submit(plan)
        outputs.add_done_callback(self._answered)
        self._flights.append(_Flight(plan, outputs, self._clock.now()))
        return outputs

    def _answered(self, outputs: Outputs) -> None:
        if not outputs.cancelled():
            outputs.exception()  # looked at, so that asyncio does not complain when the loop has ended before it
        self.wake()

    def _closed(self, event: TransferClosed) -> None:
        """A rank's part of a transfer is over."""
        self.scheduler.room.closed(event)
        self.wake()
        if event.transfer_id in self.reports:
            self.reports[event.transfer_id].add(event, len(self.executor.rank_states()))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """The loop ends by itself only through an error."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, LongcatError):
            self.fail(error)
        elif error is not None:
            logger().error("engine_fault", exc_info=error)
            self.fail(EngineFault("the engine failed"))


def _log_memory(ready: Ready) -> None:
    """What the ranks allocated: that of the fullest, and each by part for who wants to know."""
    totals = {rank.rank: sum(num_bytes for _, num_bytes in rank.memory) for rank in ready}
    fullest = max(totals, key=lambda rank: totals[rank])
    logger().info("memory_allocated", max_bytes=totals[fullest], rank=fullest, all_bytes=sum(totals.values()))
    for rank in ready:
        parts = {name.replace("-", "_").replace(" ", "_"): num_bytes for name, num_bytes in rank.memory}
        logger().debug("rank_memory", rank=rank.rank, **parts)
