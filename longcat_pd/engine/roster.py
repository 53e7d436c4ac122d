"""What a driver knows of its rank processes without asking them: who has called, who is silent, who has ended, and why.

Judges only; whoever owns the sockets and the processes (``executor.py``) feeds it and acts. Pure but
for the log and ``listen_for_ranks``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from longcat_pd.clock import RANK_SILENT_S
from longcat_pd.config.keys import admission
from longcat_pd.config.schema import RankSpec
from longcat_pd.engine.open_steps import Overdue
from longcat_pd.engine.plan import RankAccounts, RankReady
from longcat_pd.errors import ConfigError, EngineFault, LongcatError, RankLost
from longcat_pd.log import logger
from longcat_pd.progress.steps import Part, Step, heard
from longcat_pd.wire import AsyncSocket

STATUS_CONFIG = 2  # of a rank process that refuses its configuration or checkpoint


def listen_for_ranks(spec: RankSpec) -> Iterator[AsyncSocket]:
    """The driver's sockets of plans and of outputs. Raises OSError for a port that is taken, ConfigError for a key file."""
    place = admission(spec.instance.cluster_key_file)
    yield AsyncSocket("router", spec.plan_endpoint, bind=True, admission=place)
    yield AsyncSocket("pull", spec.output_endpoint, bind=True, admission=place)


@dataclass(frozen=True, slots=True)
class RankState:
    """What is known of a rank without asking it.

    ``waits_for``: the machine that has to come before it can be started. ``missed``: what is said of a rank for which an
    overdue step waits. ``parts``: of the steps of its start.
    """

    rank: int
    state: Literal["ok", "silent", "lost"]
    silent_s: float
    overdue_step: int | None
    accounts: RankAccounts
    waits_for: str = ""
    missed: str = ""
    parts: tuple[Part, ...] = ()


@dataclass
class RankEntry:
    """One rank. ``title``: with its machine if there are several; ``fault``: its own last words; ``status``: of its
    process, when that has ended.
    """

    number: int
    title: str
    identity: bytes
    heard_at: float
    accounts: RankAccounts
    ready: RankReady | None = None
    fault: str | None = None
    status: int | None = None
    is_routable: bool = False
    is_silent: bool = False
    is_lost: bool = False
    node: int = 0
    parts: dict[Step, Part] = field(default_factory=dict)

    def progressed(self, step: Step, *, done: int, total: int, now: float) -> None:
        """A step of its start has gone on."""
        self.parts = heard(self.parts, step, done=done, total=total, now=now)


class Roster:
    """The ranks of one instance, by number."""

    def __init__(self, specs: Sequence[RankSpec], now: float) -> None:
        self.ranks = tuple(
            RankEntry(s.rank, _title(s), s.identity, now, RankAccounts(rank=s.rank), node=s.node_rank) for s in specs
        )
        self._by_identity = {rank.identity: rank for rank in self.ranks}

    def __len__(self) -> int:
        return len(self.ranks)

    def known(self, identity: bytes) -> RankEntry | None:
        """The rank of this name; None for strangers, also for a rank of a former life."""
        return self._by_identity.get(identity)

    def accounts(self) -> dict[int, RankAccounts]:
        """The newest that have come of each."""
        return {rank.number: rank.accounts for rank in self.ranks}

    def lose(self, ranks: Iterable[int]) -> None:
        """They are gone, though their processes may still be there."""
        for number in ranks:
            self.ranks[number].is_lost = True

    def not_called(self) -> list[int]:
        """Ranks that plans cannot reach yet."""
        return [rank.number for rank in self.ranks if not rank.is_routable]

    def not_ready(self) -> list[int]:
        """Ranks that have not loaded yet what they compute with."""
        return [rank.number for rank in self.ranks if rank.ready is None]

    def states(self, now: float, overdue: Overdue | None, *, absent: Mapping[int, str]) -> tuple[RankState, ...]:
        """By rank. ``absent``: those whose machine is waited for, and its name."""
        return tuple(
            RankState(
                rank.number,
                "lost" if rank.is_lost else "silent" if rank.is_silent else "ok",
                now - rank.heard_at,
                overdue.step_id if overdue else None,
                rank.accounts,
                absent.get(rank.number, ""),
                overdue.said_of(rank.number) if overdue else "",
                tuple(rank.parts.values()),
            )
            for rank in self.ranks
        )

    def cause(self, *, is_up: bool) -> LongcatError | None:
        """Ranks have failed or ended: why, if that can be said. A lost rank makes the others fail in their collectives.

        ``is_up``: all of them were ready before; else one that has failed is waited for, as its status says more.
        """
        for rank in self.ranks:
            rank.is_lost = rank.is_lost or rank.status is not None
        failed = [rank for rank in self.ranks if rank.fault is not None]
        refused = [rank for rank in failed if rank.status == STATUS_CONFIG]
        mute = [rank for rank in self.ranks if rank.status is not None and rank.fault is None]
        if refused:
            return ConfigError(str(refused[0].fault))
        if mute:
            return RankLost(f"{mute[0].title} ended with status {mute[0].status}")
        if failed and (is_up or all(rank.status is not None for rank in failed)):
            return EngineFault(f"{failed[0].title} failed")
        return None

    def all_heard_at(self, now: float) -> None:
        """Silence counts from now on."""
        for rank in self.ranks:
            rank.heard_at = now

    def forgive(self, seconds: float) -> None:
        """This process itself stood still for so long; what the ranks sent meanwhile is unread."""
        for rank in self.ranks:
            rank.heard_at += seconds

    def silence(self, now: float, lost_s: float) -> RankLost | None:
        """Note who is silent; the loss of one that has been so for ``lost_s`` more."""
        for rank in self.ranks:
            silent_s = now - rank.heard_at
            was_silent, rank.is_silent = rank.is_silent, silent_s > RANK_SILENT_S
            if rank.is_silent and not was_silent:
                logger().warning("rank_silent", rank=rank.number, node=rank.node, seconds=silent_s)
            if silent_s > RANK_SILENT_S + lost_s:
                rank.is_lost = True
                return RankLost(f"{rank.title} has been silent for {silent_s:.0f} s")
        return None


def _title(spec: RankSpec) -> str:
    nodes = spec.instance.nodes
    return f"rank {spec.rank} on {nodes[spec.node_rank]}" if len(nodes) > 1 else f"rank {spec.rank}"
