"""The rank processes of an instance over several machines, as its driver starts, watches and stops them.

Those of the first node are the driver's own; a process on each further node (``further_node.py``) starts the others when it
is told. Ranks begin when all nodes are there, because they meet each other within seconds. Knows no plans.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from longcat_pd import log
from longcat_pd.clock import Clock
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.engine.background import Background
from longcat_pd.engine.executor import OnExit, OnFailure, RankProcesses
from longcat_pd.errors import ConfigError, EngineFault, LongcatError, RankLost
from longcat_pd.server.node_records import (
    FROM_DRIVER,
    FROM_NODE,
    NODES_COME_S,
    NODES_END_S,
    DriverBeat,
    DumpStacks,
    EndWanted,
    FromDriver,
    FromNode,
    NodeHello,
    NodeLeft,
    NodeRefusal,
    RankExited,
    Rejected,
    Socket,
    StartRanks,
    StopRanks,
    pulse,
)
from longcat_pd.server.node_roster import NodeEntry, NodeRoster
from longcat_pd.server.run import STATUS_FAULT, STATUS_OK, STATUS_REFUSED
from longcat_pd.wire import MalformedRecord, Unsendable


class OwnRanks(RankProcesses, Protocol):
    """The ranks of the first node."""

    async def prepare(self) -> None:
        """Do what takes time before the first of them can begin."""
        ...


class SeveralNodes:
    """``executor.RankProcesses`` of an instance with further nodes.

    Args:
        ours: what each node must say, apart from its number.
        own: the ranks of this node.
        incarnation: of this life of the instance.
        listen: the socket (a ROUTER) that nodes dial; raises OSError.
        on_end: called when a node was told to end, so that the instance drains.
    """

    def __init__(
        self,
        spec: InstanceSpec,
        ours: NodeHello,
        *,
        own: OwnRanks,
        incarnation: str,
        listen: Callable[[], Socket],
        on_end: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._spec = spec
        self._own = own
        self._incarnation = incarnation
        self._listen = listen
        self._on_end = on_end
        self._clock = clock
        self._roster = NodeRoster(spec, ours, clock.now())
        self._socket: Socket | None = None
        self._background = Background(self._defect)
        self._all_here = asyncio.Event()
        self._refusal: LongcatError | None = None  # why the ranks will not begin
        self._all_left: asyncio.Event | None = None  # once it is stopping
        self._on_exit: OnExit | None = None
        self._on_loss: OnFailure | None = None
        self._status = STATUS_OK  # that the nodes end with

    async def start(self, on_exit: OnExit, on_loss: OnFailure) -> None:
        """Wait for all nodes, then start the ranks of all.

        Raises ConfigError for a port that is taken and for nodes that cannot or must not take part, RankLost for those that
        do not come.
        """
        self._on_exit, self._on_loss = on_exit, on_loss
        try:
            self._socket = self._listen()
        except OSError as error:
            raise ConfigError(f"cannot listen for further nodes: {error}") from error
        self._background.keep(self._hear(self._socket))
        self._background.keep(self._watch())
        try:
            await self._own.prepare()
            await self._all_come()
        except LongcatError as error:
            self._status = _status_of(error)
            raise
        self._roster.has_begun = True
        for entry in self._roster.present():
            self._send(entry, StartRanks(incarnation=self._incarnation))
        await self._own.start(on_exit, on_loss)

    def loss(self) -> RankLost | None:
        """A node to which nothing can be sent any more."""
        self._beat()
        return self._roster.unreachable()

    def absent(self) -> Mapping[int, str]:
        """Ranks of nodes that have not come, with their nodes."""
        each = self._spec.ranks_per_node
        absent = () if self._roster.has_begun else self._roster.absent()
        return {rank: e.title for e in absent for rank in range(e.number * each, (e.number + 1) * each)}

    def dump_stacks(self) -> None:
        """Of all ranks, each in the log of its node."""
        for entry in self._roster.present():
            self._send(entry, DumpStacks())
        self._own.dump_stacks()

    async def stop(self, grace_s: float, *, is_faulty: bool = False) -> None:
        """All nodes at once; one that does not say that its ranks have ended is left behind: it misses the driver soon."""
        self._all_left = asyncio.Event()
        self._status = STATUS_FAULT if is_faulty and self._status == STATUS_OK else self._status
        for entry in self._roster.present():
            self._send(entry, StopRanks(grace_s=grace_s, status=self._status))
        self._see_who_is_here()
        until = self._clock.now() + grace_s + NODES_END_S
        try:
            await self._own.stop(grace_s)
            await self._clock.within(until - self._clock.now(), self._all_left.wait())
        except TimeoutError:
            left = [entry.number for entry in self._roster.present()]
            log.logger().warning("left_behind", instance=self._spec.name, node=left)
        finally:
            await self._background.cancel()
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    async def _all_come(self) -> None:
        absent = self._roster.absent()
        if absent:
            log.logger().info("waits_for_nodes", instance=self._spec.name, node=[entry.number for entry in absent])
        try:
            await self._clock.within(NODES_COME_S, self._all_here.wait())
        except TimeoutError:
            raise self._roster.absence() from None
        if self._refusal is not None:
            raise self._refusal

    def _see_who_is_here(self) -> None:
        if not self._roster.absent() or self._refusal is not None:
            self._all_here.set()
        else:  # one has gone again
            self._all_here.clear()
        if self._all_left is not None and not self._roster.present():
            self._all_left.set()

    def _lose(self, error: LongcatError) -> None:
        self._status = _status_of(error)
        if not self._roster.has_begun:
            self._refusal = self._refusal or error
            self._see_who_is_here()
        elif self._all_left is None and self._on_loss is not None:
            self._on_loss(error)

    # -- listening -------------------------------------------------------------------------------------------------

    async def _hear(self, socket: Socket) -> None:
        refusals = log.Refusals()
        while True:
            identity, *frames = await socket.recv()
            try:
                self._heard(identity, FROM_NODE.decode(frames))
            except MalformedRecord as error:
                refusals.tell(repr(identity), str(error))
                if (entry := self._roster.known(identity)) is not None:
                    self._lose(EngineFault(f"a message of {entry.title} is malformed: {error}"))
            self._see_who_is_here()

    def _heard(self, identity: bytes, record: FromNode) -> None:
        now, entry = self._clock.now(), self._roster.known(identity)
        if isinstance(record, NodeRefusal):
            self._refused(identity, record)
        elif isinstance(record, NodeHello):
            self._answer(identity, self._roster.greet(identity, record, now) or DriverBeat())
        elif entry is None:
            self._answer(identity, Rejected(reason=f"nobody has said hello to this life of {self._spec.name}"))
        else:
            entry.heard_at = now
            if isinstance(record, RankExited):
                self._exited(entry, record)
            elif isinstance(record, EndWanted):
                log.logger().info("node_wants_end", node=entry.number)
                self._on_end()
            elif isinstance(record, NodeLeft):
                entry.identity = None
                if record.reason:
                    self._left(entry, record.reason)

    def _refused(self, identity: bytes, record: NodeRefusal) -> None:
        self._answer(identity, Rejected(reason="as it says itself"))
        title = self._roster.title(record.instance, record.node)
        if title and not self._roster.has_begun:
            self._lose(ConfigError("\n".join(f"{title}: {line}" for line in record.reason.splitlines())))

    def _exited(self, entry: NodeEntry, record: RankExited) -> None:
        if record.rank // self._spec.ranks_per_node != entry.number:
            raise MalformedRecord(f"rank {record.rank} is not of node {entry.number}")
        if self._on_exit is not None:
            self._on_exit(record.rank, record.status)

    def _left(self, entry: NodeEntry, reason: str) -> None:
        log.logger().warning("node_left", node=entry.number, reason=reason)
        if self._roster.has_begun:
            self._lose(RankLost(f"{entry.title} has ended: {reason}"))

    # -- watching --------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            stood_still = await pulse(self._clock)
            if stood_still:
                self._roster.forgive(stood_still)
            self._beat()
            lost = self._roster.silence(self._clock.now())
            if lost is not None:
                self._lose(lost)
            self._see_who_is_here()

    def _beat(self) -> None:
        for entry in self._roster.present():
            self._send(entry, DriverBeat())

    def _send(self, entry: NodeEntry, record: FromDriver) -> None:
        assert entry.identity is not None, "of those that have come"
        entry.is_reachable = self._answer(entry.identity, record)

    def _answer(self, identity: bytes, record: FromDriver) -> bool:
        """Whether the connection is there."""
        if self._socket is None:
            return True
        try:
            self._socket.send([identity, *FROM_DRIVER.encode(record)])
        except Unsendable:  # its silence will be judged
            return False
        return True

    def _defect(self, error: BaseException) -> None:
        log.logger().error("nodes_fault", exc_info=error)
        self._lose(EngineFault("the driver's side of its further nodes failed"))


def _status_of(error: LongcatError) -> int:
    return STATUS_REFUSED if isinstance(error, ConfigError) else STATUS_FAULT
