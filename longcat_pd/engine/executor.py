"""How plans reach ranks and answers come back: the protocol, and rank processes behind ZeroMQ.

Notices every way in which a rank can be gone: its process ended, it fell silent, a step does not end, or the ranks have
parted. Knows plans and messages, not what they mean; knows rank processes only as something to start, watch and stop,
wherever they run. Imports no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from longcat_pd.clock import HEARTBEAT_S, Clock
from longcat_pd.config.schema import EngineConfig, InstanceSpec, RankSpec
from longcat_pd.engine.background import Background
from longcat_pd.engine.open_steps import OpenSteps, Outputs, Overdue
from longcat_pd.engine.plan import (
    RANK_MESSAGES,
    PlanMessage,
    RankMessage,
    RankProgress,
    RankReady,
    StepOutput,
    StepPlan,
    Stop,
    plan_codec,
)
from longcat_pd.engine.roster import RankEntry, RankState, Roster, listen_for_ranks
from longcat_pd.errors import ConfigError, EngineFault, LongcatError, RankLost
from longcat_pd.kv_transfer.messages import TransferClosed
from longcat_pd.log import Refusals, logger
from longcat_pd.wire import AsyncSocket, Codec, MalformedRecord, Unsendable, tcp

CALL_LIMIT_S = 15.0  # until every rank process has called; before those that have give up to meet the others (mesh.py)
START_LIMIT_S = 1800.0  # loading the largest checkpoint from a slow disk
STOP_GRACE_S = 5.0
FAULT_GRACE_S = 1.0  # ranks that are left after a fault, or have not come up, are not listening; time for their stacks
LAST_WORDS_S = 0.2  # between the end of a rank process and the judgement: its fault may still be on the wire

_PLANS = plan_codec()
_MESSAGES = Codec[RankMessage](*RANK_MESSAGES)

Ready = tuple[RankReady, ...]
OnClosed = Callable[[TransferClosed], None]
OnFailure = Callable[[LongcatError], None]
OnExit = Callable[[int, int], None]


class Executor(Protocol):
    """The ranks of an instance as its driver sees them. Everything happens on the driver's event loop."""

    async def start(self, on_closed: OnClosed, on_failure: OnFailure) -> Ready:
        """Bring up all ranks; their reports by rank. ``on_failure`` is called at most once, and then nothing more."""
        ...

    def submit(self, plan: StepPlan) -> Outputs:
        """Hand a plan to all ranks. The future is always finished: by the answers of all, or by an exception."""
        ...

    def rank_states(self) -> tuple[RankState, ...]:
        """By rank; never waits."""
        ...

    async def close(self) -> None:
        """End the ranks. Open futures are finished with an exception."""
        ...


class RankProcesses(Protocol):
    """Rank processes as something to start, watch and stop (``server/launch.py``, ``server/nodes.py``)."""

    async def start(self, on_exit: OnExit, on_loss: OnFailure) -> None:
        """Start all; none before the others can be. After a cancel or an error: ``stop``.

        ``on_exit(rank, status)`` is called on the event loop when one ends, ``on_loss`` when ranks are gone of which no
        status tells, as with their machine. Raises ConfigError or RankLost for machines that cannot take part.
        """
        ...

    def loss(self) -> RankLost | None:
        """What would explain that ranks fail now, as far as it can be seen without waiting."""
        ...

    def absent(self) -> Mapping[int, str]:
        """Ranks that cannot be started because their machine has not come, with what people call it."""
        ...

    def dump_stacks(self) -> None:
        """Have every living rank write the stacks of its threads to its log."""
        ...

    async def stop(self, grace_s: float, *, is_faulty: bool = False) -> None:
        """Wait so long for those that were told to end, then end them by force. ``is_faulty``: something has failed."""
        ...


def rank_specs(instance: InstanceSpec, incarnation: str) -> list[RankSpec]:
    """What each rank process of an instance is told, wherever it runs. Ports: ``checks.INSTANCE_PORTS``."""
    host = instance.ranks_host
    return [
        RankSpec(
            instance=instance,
            rank=rank,
            incarnation=incarnation,
            plan_endpoint=tcp(host, instance.http_port + 2),
            output_endpoint=tcp(host, instance.http_port + 3),
            rendezvous_host=host,
            rendezvous_port=instance.http_port + 4,
        )
        for rank in range(instance.parallel.world_size)
    ]


def _ignore(_what: object) -> None:
    """Listener before anybody listens."""


class ProcessExecutor:
    """Ranks in processes of their own. Plans go out on a ROUTER, everything from the ranks comes in on one PULL.

    Args:
        specs: of all ranks; the first names the endpoints.
        processes: start and stop them.
        on_progress: called when what ``rank_states`` says of the start has changed.
    """

    def __init__(
        self,
        specs: list[RankSpec],
        processes: RankProcesses,
        *,
        config: EngineConfig,
        clock: Clock,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._specs = specs
        self._processes = processes
        self._config = config
        self._clock = clock
        self._roster = Roster(specs, clock.now())
        self._steps = OpenSteps(specs[0].instance.parallel, limit_s=config.step_timeout_s)
        self._overdue: Overdue | None = None
        self._failure: LongcatError | None = None
        self._all_called = asyncio.Event()
        self._came_up = asyncio.Event()
        self._on_progress = on_progress
        self._on_closed: OnClosed = _ignore
        self._on_failure: OnFailure = _ignore
        self._sockets: list[AsyncSocket] = []
        self._background = Background(self._defect)

    async def start(self, on_closed: OnClosed, on_failure: OnFailure) -> Ready:
        """Bind, start the processes, wait for all.

        Raises RankLost, EngineFault, or ConfigError for a taken port, a refused checkpoint or a refused machine.
        """
        try:
            for socket in listen_for_ranks(self._specs[0]):
                self._sockets.append(socket)
        except OSError as error:
            self._close_sockets()
            raise ConfigError(f"cannot listen: {error}") from error
        self._on_closed, self._on_failure = on_closed, on_failure
        self._count_processes()
        await self._processes.start(self._exited, self._fail)
        self._background.keep(self._hear_arrivals(self._sockets[0]))
        self._background.keep(self._hear_messages(self._sockets[1]))
        await self._come_up()
        if self._failure is not None:
            await self.close()
            raise self._failure
        self._background.keep(self._watch())
        return tuple(rank.ready for rank in self._roster.ranks if rank.ready is not None)

    def submit(self, plan: StepPlan) -> Outputs:
        """Send the plan to every rank."""
        outputs = self._steps.begin(plan.step_id, self._clock.now())
        if self._failure is not None:
            self._steps.end(self._failure)
            return outputs
        frames = _PLANS.encode(plan)
        for rank in self._roster.ranks:
            try:
                self._to_rank(rank, frames)
            except Unsendable:  # the end of its process, or its silence, will say why
                logger().warning("plan_not_sent", rank=rank.number, step_id=plan.step_id)
        return outputs

    def order(self, order: PlanMessage, rank: int | None) -> None:
        """Tell a rank, or all, which fault to show: before every plan that comes after. Raises Unsendable for ranks that
        cannot be told; the others have been.
        """
        untold, frames = [], _PLANS.encode(order)
        for each in self._roster.ranks:
            if rank not in (None, each.number):
                continue
            try:
                self._to_rank(each, frames)
            except Unsendable:
                untold.append(each.number)
        if untold:
            raise Unsendable(f"ranks {untold} are not there")

    def rank_states(self) -> tuple[RankState, ...]:
        """By rank; never waits."""
        return self._roster.states(self._clock.now(), self._overdue, absent=self._processes.absent())

    async def close(self) -> None:
        """Tell the ranks, wait for them, end them; then the sockets."""
        is_faulty = self._failure is not None
        grace_s = STOP_GRACE_S if not is_faulty and self._came_up.is_set() else FAULT_GRACE_S
        self._failure = self._failure or EngineFault("the ranks were stopped")
        self._steps.end(self._failure)
        for rank in self._roster.ranks:
            if rank.is_routable:
                try:
                    self._to_rank(rank, _PLANS.encode(Stop()))
                except Unsendable:
                    logger().debug("stop_not_sent", rank=rank.number)
        await self._processes.stop(grace_s, is_faulty=is_faulty)
        await self._background.cancel()
        self._close_sockets()

    async def _come_up(self) -> None:
        try:
            await self._clock.within(CALL_LIMIT_S, self._all_called.wait())
        except TimeoutError:
            self._fail(RankLost(f"ranks {self._roster.not_called()} did not come up within {CALL_LIMIT_S:g} s"))
        try:
            await self._clock.within(START_LIMIT_S, self._came_up.wait())
        except TimeoutError:
            self._fail(RankLost(f"ranks {self._roster.not_ready()} were not ready within {START_LIMIT_S:g} s"))

    def _to_rank(self, rank: RankEntry, frames: Sequence[bytes]) -> None:
        if not self._sockets:  # before the start and behind the end
            raise Unsendable(f"nothing is sent to rank {rank.number} now")
        self._sockets[0].send([rank.identity, *frames])

    def _close_sockets(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._sockets = []

    # -- listening -------------------------------------------------------------------------------------------------

    async def _hear_arrivals(self, plans: AsyncSocket) -> None:
        """The first message of a rank on the plans' socket says that plans can reach it now."""
        while True:
            rank = self._roster.known((await plans.recv())[0])
            if rank is not None:
                rank.is_routable = True
                self._count_processes()
                self._see_who_is_up()

    async def _hear_messages(self, messages: AsyncSocket) -> None:
        refusals = Refusals()
        while True:
            identity, *frames = await messages.recv()
            rank = self._roster.known(identity)
            if rank is None:  # anybody can connect here, also a rank of a former life
                refusals.tell(repr(identity), "neither a rank of this instance nor of this life")
                continue
            try:
                message = _MESSAGES.decode(frames)
            except MalformedRecord as error:
                self._fail(EngineFault(f"a message of rank {rank.number} is malformed: {error}"))
                return
            self._heard(rank, message)

    def _heard(self, rank: RankEntry, message: RankMessage) -> None:
        rank.heard_at = self._clock.now()
        if isinstance(message, TransferClosed):
            self._on_closed(message)
        elif isinstance(message, RankProgress):
            rank.progressed(message.step, done=message.done, total=message.total, now=rank.heard_at)
            self._on_progress()
        elif isinstance(message, StepOutput):
            rank.accounts = message.accounts or rank.accounts
            self._answered(message)
        else:
            rank.accounts = message.accounts
            if isinstance(message, RankReady):
                rank.ready = message
                self._see_who_is_up()

    def _answered(self, output: StepOutput) -> None:
        if output.fault is not None:
            self._failed(output.rank, output.step_id, output.fault)
            return
        try:
            self._steps.answered(output, self._clock.now())
        except EngineFault as error:
            self._fail(error)

    def _failed(self, rank: int, step_id: int, fault: str) -> None:
        """The first trace says why; of ranks that only miss that one the last line is enough."""
        is_first = self._failure is None and not any(other.fault for other in self._roster.ranks)
        said = fault if is_first else fault.rstrip().rpartition("\n")[2]
        logger().error("rank_fault", rank=rank, step_id=step_id, fault=said)
        self._roster.ranks[rank].fault = fault
        self._background.keep(self._judge_end())

    def _count_processes(self) -> None:
        """The first step of a start is the driver's to see: how many have called."""
        for rank in self._roster.ranks:
            if "processes" not in rank.parts or rank.is_routable > rank.parts["processes"].done:
                rank.progressed("processes", done=int(rank.is_routable), total=1, now=self._clock.now())
        self._on_progress()

    def _see_who_is_up(self) -> None:
        if not self._roster.not_called():
            self._all_called.set()
            if not self._roster.not_ready():
                self._came_up.set()

    # -- watching --------------------------------------------------------------------------------------------------

    def _exited(self, rank: int, status: int) -> None:
        self._roster.ranks[rank].status = status
        if status < 0:  # ended by a signal: there are no last words, and the others only complain of its absence
            self._judge()
        else:
            self._background.keep(self._judge_end())

    async def _judge_end(self) -> None:
        await self._clock.sleep(LAST_WORDS_S)
        self._judge()

    def _judge(self) -> None:
        if self._failure is not None:  # what ends now is ended, and not the rank that was lost
            return
        cause = self._roster.cause(is_up=self._came_up.is_set())
        if cause is not None:
            lost = self._processes.loss() if isinstance(cause, EngineFault) else None
            self._fail(lost or cause)

    async def _watch(self) -> None:
        """Judge silence and overdue steps once for each heartbeat, and at the moment when a step becomes overdue."""
        before = self._clock.now()
        self._roster.all_heard_at(before)
        while True:
            pause_s = min(self._steps.due_in(before) or HEARTBEAT_S, HEARTBEAT_S)
            await self._clock.sleep(pause_s)
            now = self._clock.now()
            stood_still = now - before - pause_s
            before = now
            if stood_still > HEARTBEAT_S:  # it was this process that slept
                self._roster.forgive(stood_still)
                self._steps.forgive(stood_still)
                continue
            lost = self._roster.silence(now, self._config.rank_lost_s)
            if lost is not None:
                self._fail(lost)
            self._judge_step(now)

    def _judge_step(self, now: float) -> None:
        before = self._overdue
        self._overdue = overdue = self._steps.overdue(now, self._roster.accounts())
        if overdue is None:
            return
        if before is None or before.step_id != overdue.step_id:
            where, missed = "; ".join(overdue.standing.lines), list(overdue.standing.missed)
            logger().warning("step_overdue", step_id=overdue.step_id, seconds=overdue.seconds, rank=missed, where=where)
            self._processes.dump_stacks()  # while all are still there
        if overdue.seconds > self._config.step_timeout_s + self._config.rank_lost_s:
            self._roster.lose(overdue.standing.missed)
            self._fail(overdue.loss())

    def _fail(self, error: LongcatError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        if isinstance(error, RankLost):
            lost = [rank for rank in self._roster.ranks if rank.is_lost]
            step_id = self._overdue.step_id if self._overdue is not None else None
            nodes = sorted({rank.node for rank in lost})
            logger().error("rank_lost", reason=error.message, rank=[r.number for r in lost], node=nodes, step_id=step_id)
        else:
            logger().error("engine_fault", reason=error.message)
        self._processes.dump_stacks()
        self._steps.end(error)
        self._all_called.set()
        self._came_up.set()
        self._on_failure(error)

    def _defect(self, error: BaseException) -> None:
        logger().error("executor_fault", exc_info=error)
        self._fail(EngineFault("the driver's side of the ranks failed"))
