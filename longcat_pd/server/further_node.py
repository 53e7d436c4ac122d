"""A process on a further node of an instance: it starts the ranks of its node when the driver says so, and ends with them.

Owns the judgement of a driver that is not there, and of signals: the driver is asked to drain before it stops anybody, and
where every process of an instance is signalled at once, ranks have to outlast that. Knows no plans and no requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Protocol

from longcat_pd import log
from longcat_pd.clock import Clock
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.engine.executor import RankProcesses
from longcat_pd.errors import LongcatError
from longcat_pd.server.node_records import (
    DRIVER_ANSWERS_S,
    FROM_DRIVER,
    FROM_NODE,
    STOP_MARGIN_S,
    DumpStacks,
    EndWanted,
    FromDriver,
    FromNode,
    NodeBeat,
    NodeHello,
    NodeLeft,
    RankExited,
    Rejected,
    Socket,
    StartRanks,
    StopRanks,
    nodes_endpoint,
    pulse,
    silence_limit_s,
)
from longcat_pd.server.run import STATUS_FAULT, STATUS_OK, STATUS_REFUSED, Signals
from longcat_pd.wire import MalformedRecord, Unsendable


class Launcher(Protocol):
    """Where the ranks of this node come from."""

    async def prepare(self) -> None:
        """Do what takes time before they can begin."""
        ...

    def ranks(self, incarnation: str) -> RankProcesses:
        """Of this life of the instance; not started."""
        ...


@dataclass(frozen=True, slots=True)
class _End:
    """How it ends. ``reason``: empty if the driver said so; ``grace_s``: what the ranks have to end by themselves."""

    status: int
    reason: str = ""
    grace_s: float = 0.0


class FurtherNode:
    """The life of one further node.

    Args:
        hello: names the node.
        socket: a DEALER that has dialled the driver.
    """

    def __init__(
        self,
        spec: InstanceSpec,
        hello: NodeHello,
        *,
        socket: Socket,
        launcher: Launcher,
        signals: Signals,
        clock: Clock,
    ) -> None:
        self._spec = spec
        self._hello = hello
        self._socket = socket
        self._launcher = launcher
        self._signals = signals
        self._clock = clock
        self._ranks: RankProcesses | None = None
        self._heard_at: float | None = None

    async def run(self) -> int:
        """Until the driver ends it, or is gone; the exit status of the process. Its ranks have ended then."""
        end = _End(STATUS_FAULT, "by a defect of its own")
        try:
            await self._launcher.prepare()
            end = await _first(self._signalled(), self._obey(), self._watch())
        finally:
            await self._leave(end)
        return end.status

    async def _leave(self, end: _End) -> None:
        if end.reason:
            log.logger().error("node_ends", instance=self._spec.name, node=self._hello.node, reason=end.reason)
        if self._ranks is not None:
            await self._ranks.stop(end.grace_s)
        self._say(NodeLeft(reason=end.reason))
        self._socket.close()
        log.logger().info("stopped", exit_status=end.status)

    async def _obey(self) -> _End:
        """What the driver says, until that is the end."""
        while True:
            try:
                record = FROM_DRIVER.decode(await self._socket.recv())
            except MalformedRecord as error:
                return _End(STATUS_FAULT, f"a message of {self._driver} is malformed: {error}")
            self._heard_at = self._clock.now()
            end = await self._obeyed(record)
            if end is not None:
                return end

    async def _obeyed(self, record: FromDriver) -> _End | None:
        if isinstance(record, Rejected):
            text = f"{self._driver} refuses it: {record.reason}"
            is_final = self._ranks is None and not record.is_for_now
            return _End(STATUS_REFUSED if is_final else STATUS_FAULT, text)
        if isinstance(record, StopRanks):
            return _End(record.status, grace_s=record.grace_s)
        if isinstance(record, StartRanks) and self._ranks is None:
            self._ranks = self._launcher.ranks(record.incarnation)
            await self._ranks.start(self._exited, self._lost)
            log.logger().info("ranks_started", instance=self._spec.name, node=self._hello.node)
        if isinstance(record, DumpStacks) and self._ranks is not None:
            self._ranks.dump_stacks()
        return None

    async def _watch(self) -> _End:
        """Beat, and miss the driver."""
        began = self._clock.now()
        while True:
            self._say(NodeBeat() if self._ranks is not None else self._hello)
            stood_still = await pulse(self._clock)
            now = self._clock.now()
            if self._heard_at is None:
                if now - began > DRIVER_ANSWERS_S:
                    return _End(STATUS_FAULT, f"{self._driver} did not answer within {DRIVER_ANSWERS_S:g} s")
                continue
            self._heard_at += stood_still
            silent_s = now - self._heard_at
            if silent_s > silence_limit_s(self._spec):
                return _End(STATUS_FAULT, f"{self._driver} has been silent for {silent_s:.0f} s")

    async def _signalled(self) -> _End:
        """The first signal leaves ranks that work to the driver, which is told of it; the second does not."""
        await self._signals.first.wait()
        if self._ranks is None:
            return _End(STATUS_OK, "told to end before its ranks had begun")
        limit_s = self._spec.engine.drain_timeout_s + STOP_MARGIN_S
        log.logger().info("waits_for_the_driver", instance=self._spec.name, node=self._hello.node, limit_s=limit_s)
        self._say(EndWanted())
        try:
            await self._clock.within(limit_s, self._signals.second.wait())
        except TimeoutError:
            return _End(STATUS_FAULT, f"told to end, and {self._driver} did not say so within {limit_s:g} s")
        return _End(STATUS_FAULT, "told to end at once")

    def _exited(self, rank: int, status: int) -> None:
        self._say(RankExited(rank=rank, status=status))

    def _lost(self, error: LongcatError) -> None:
        log.logger().error("ranks_lost", reason=error.message)

    def _say(self, record: FromNode) -> None:
        try:
            self._socket.send(FROM_NODE.encode(record))
        except Unsendable:  # thousands of messages wait: its silence is judged
            log.logger().warning("driver_unreachable")

    @property
    def _driver(self) -> str:
        return f"the driver of {self._spec.name} at {nodes_endpoint(self._spec).removeprefix('tcp://')}"


async def _first(*lives: Coroutine[None, None, _End]) -> _End:
    """The end that comes first. Of several at once the first in order; an error of any is raised."""
    tasks = [asyncio.ensure_future(life) for life in lives]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task.result() for task in tasks if task in done)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
