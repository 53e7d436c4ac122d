"""Whether the ranks of a stage read what they are to read: each tensor by every group that shares it, once, without gap and
overlap. Arithmetic on names and places; knows no modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from longcat_pd.config.schema import ParallelConfig
from longcat_pd.parallel.layout import ParallelLayout
from longcat_pd.sizing.readers import Use

MAX_NAMED = 3
Part = tuple[tuple[int, int], ...]  # of a tensor: first and end in every dimension
Place = tuple[str, int]  # a tensor, and which of the readings of it by one rank


@dataclass(frozen=True, slots=True)
class Complaints:
    """What does not agree, by kind."""

    found: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, items: Iterable[str]) -> None:
        """Note items of one kind."""
        for item in items:
            self.found.setdefault(kind, []).append(item)

    def lines(self, whose: str) -> Iterator[str]:
        """One line for each kind, with the first items."""
        for kind, items in self.found.items():
            yield f"{whose}: {len(items)} {kind}: {named(items, '; ')}"


class StageReads:
    """What the ranks of one pipeline stage read of a checkpoint, as it is seen rank by rank."""

    def __init__(self, parallel: ParallelConfig, stage: int) -> None:
        self._layout = ParallelLayout.of(parallel)
        self.ranks = range(stage * parallel.stage_size, (stage + 1) * parallel.stage_size)
        self._reads: dict[Place, dict[int, Part]] = {}

    def add(self, rank: int, reads: Iterable[tuple[str, Part]]) -> None:
        """The readings of one rank, in its order."""
        often: Counter[str] = Counter()
        for name, part in reads:
            self._reads.setdefault((name, often[name]), {})[rank] = part
            often[name] += 1

    def against(self, uses: Iterable[Use], complaints: Complaints) -> Iterator[tuple[str, int]]:
        """Each tensor that is to be read here, and how often it is. All ranks of the stage were added."""
        often: Counter[str] = Counter()
        left = dict(self._reads)
        for use in uses:
            parts = left.pop((use.name, often[use.name]), {})
            often[use.name] += 1
            groups = self._groups(use, parts)
            told = (complaint for ranks, places in groups for complaint in _complaint(use, ranks, places))
            complaints.add("tensors are not read as the layout says", told)
            yield use.name, len(groups)
        more = (f"{name} by {_ranks(list(ranks))}" for (name, _), ranks in left.items())
        complaints.add("tensors are read where the layout does not say it", more)

    def _groups(self, use: Use, parts: Mapping[int, Part]) -> list[tuple[range, dict[int, Part]]]:
        """The ranks that share a tensor, by their groups, and the part that each place of a group has."""
        axis = self._layout.axis(use.axis) if use.axis is not None else None
        size = 1 if axis is None else axis.size
        assert axis is None or size == 1 or axis.stride == 1, axis  # what is split has neighbours for its parts
        first = self.ranks.start
        groups: list[tuple[range, dict[int, Part]]] = [
            (range(start, start + size), {}) for start in range(first, self.ranks.stop, size)
        ]
        for rank in sorted(parts):
            group, place = divmod(rank - first, size)
            groups[group][1][place] = parts[rank]
        return groups


def named(items: list[str], between: str) -> str:
    """The first of them, and how many more there are."""
    more = f"{between}{len(items) - MAX_NAMED} more" if len(items) > MAX_NAMED else ""
    return between.join(items[:MAX_NAMED]) + more


def _complaint(use: Use, ranks: range, places: Mapping[int, Part]) -> Iterator[str]:
    """What is wrong with the parts that a group has of a tensor."""
    head = f"{use.name} by {_ranks(ranks)}" + (f" of {use.axis}" if use.axis else "")
    if use.owner is not None and list(places) != [use.owner]:
        yield f"{head}: by places {list(places)}, not by place {use.owner}"
        return
    if not places:
        yield f"{head}: not at all"
        return
    cut = {dim for part in places.values() for dim, size in enumerate(use.shape) if part[dim] != (0, size)}
    if len(cut) > 1:
        yield f"{head}: cut in {len(cut)} dimensions"
        return
    dim, end = min(cut, default=0), 0
    for first, last in [*(part[dim] for part in places.values()), (use.shape[dim], use.shape[dim])]:
        if first != end:
            what = "read by none" if first > end else "read twice"
            yield f"{head}: {min(first, end)}..{max(first, end)} of {use.shape[dim]} in dimension {dim} {what}"
            return
        end = last


def _ranks(ranks: range | list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}..{ranks[-1]}"
