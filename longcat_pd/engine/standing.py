"""Where ranks stand in their collectives, from their own accounts: who has parted from whom, and whom the others wait for.

All ranks of a process group enter the same collectives in the same order, or they wait for each other for ever. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from longcat_pd.config.schema import ParallelConfig
from longcat_pd.engine.plan import RankAccounts
from longcat_pd.parallel.layout import ParallelLayout

Groups = tuple[tuple[str, tuple[int, ...]], ...]  # process groups: an axis, and ranks that share it


@dataclass(frozen=True, kw_only=True, slots=True)
class Parted:
    """Ranks of one process group that have not entered the same collectives. ``counts``: of each, by rank."""

    axis: str
    counts: Mapping[int, int]

    def __str__(self) -> str:
        return f"collectives of {self.axis} differ between ranks ({self.shown})"

    @property
    def shown(self) -> str:
        """The counts, for people."""
        return ", ".join(f"{rank}: {count}" for rank, count in self.counts.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What holds a step up. ``missed``: the ranks that it waits for; ``lines``: where those stand that wait."""

    missed: tuple[int, ...]
    lines: tuple[str, ...]


def groups_of(parallel: ParallelConfig) -> Groups:
    """All process groups of more than one rank, of an instance that is split so."""
    layout = ParallelLayout.of(parallel)
    axes = [axis for axis in layout.axes if axis.size > 1]
    return tuple((axis.name, ranks) for axis in axes for ranks in layout.groups(axis.name))


def parted(accounts: Mapping[int, RankAccounts], groups: Groups) -> list[Parted]:
    """Of ranks that have executed the same plans. Those without accounts are passed over."""
    entered = {rank: {one.axis: one for one in known.collectives} for rank, known in accounts.items()}
    found = []
    for axis, ranks in groups:
        known = {rank: entered[rank].get(axis) for rank in ranks if rank in entered}
        if len(set(known.values())) > 1:
            found.append(Parted(axis=axis, counts={rank: one.entered if one else 0 for rank, one in known.items()}))
    return found


def standing(accounts: Mapping[int, RankAccounts], all_groups: Groups, missing: Sequence[int]) -> Standing:
    """In the middle of a step. ``accounts``: the newest ones of all ranks; ``missing``: those that have not answered.

    Whoever has not answered and waits for nobody is missed. If all wait, or none can be seen to, those are that have
    entered fewer collectives than others of their group, and nowhere more.
    """
    groups = [(axis, {rank: _count(accounts[rank], axis) for rank in ranks}) for axis, ranks in all_groups]
    behind = {rank for _, counts in groups for rank, count in counts.items() if count < max(counts.values())}
    ahead = {rank for _, counts in groups for rank, count in counts.items() if count > min(counts.values())}
    at_work = [rank for rank in missing if not accounts[rank].stands_in]
    candidates = (at_work if len(at_work) < len(missing) else [], [r for r in missing if r in behind - ahead], missing)
    missed = next(tuple(found) for found in candidates if found)
    return Standing(missed=missed, lines=tuple(line for name, counts in groups for line in _lines(name, counts, accounts)))


def _lines(axis: str, counts: Mapping[int, int], accounts: Mapping[int, RankAccounts]) -> Iterator[str]:
    waiting = [rank for rank in counts if accounts[rank].stands_in == axis]
    most = max(counts.values())
    if axis == "pp" and waiting:
        yield f"ranks {waiting} wait for a message along pp"
    elif min(counts.values()) < most:
        behind = [rank for rank, count in counts.items() if count < most]
        where = f"ranks {[rank for rank in counts if rank not in behind]} are in number {most} of {axis}"
        yield f"{where}, which ranks {behind} have not entered ({Parted(axis=axis, counts=counts).shown})"
    elif waiting:
        yield f"ranks {waiting} wait in number {most} of {axis}, which all have entered"


def _count(accounts: RankAccounts, axis: str) -> int:
    return next((one.entered for one in accounts.collectives if one.axis == axis), 0)
