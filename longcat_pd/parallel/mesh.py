"""The process groups of one instance and this rank's place in them. Knows the layout, no models."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from longcat_pd.config.schema import ParallelConfig
from longcat_pd.parallel.collectives import AxisGroup
from longcat_pd.parallel.layout import AxisName, ParallelLayout
from longcat_pd.parallel.platform import Platform

_JOIN_TIMEOUT = timedelta(seconds=120)  # until all ranks of the instance have come to the rendezvous


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of an instance meet (rank 0 listens there), and how long one collective may take afterwards."""

    host: str
    port: int
    timeout_s: float


class Mesh:
    """A layout, a rank in it, and one group for each of its axes."""

    def __init__(self, layout: ParallelLayout, rank: int, groups: dict[AxisName, dist.ProcessGroup]) -> None:
        self.layout = layout
        self.rank = rank
        self._axes = {
            axis.name: AxisGroup(
                axis.name,
                layout.group_of(rank, axis.name),
                layout.coordinate(rank, axis.name),
                groups.get(axis.name),
            )
            for axis in layout.axes
        }

    @classmethod
    def single(cls) -> Mesh:
        """A world of one rank, without torch.distributed."""
        return cls(ParallelLayout.of(ParallelConfig()), 0, {})

    @classmethod
    def join(cls, layout: ParallelLayout, rank: int, platform: Platform, rendezvous: Rendezvous) -> Mesh:
        """Meets the other ranks of the instance. A world of one needs nobody.

        Raises:
            RuntimeError: not all ranks came in time (torch.distributed's errors are of this class).
        """
        if layout.world_size == 1:
            return cls(layout, 0, {})
        store = dist.TCPStore(  # type: ignore[attr-defined]  # exported, but not by name
            rendezvous.host, rendezvous.port, layout.world_size, is_master=rank == 0, timeout=_JOIN_TIMEOUT
        )
        timeout = timedelta(seconds=rendezvous.timeout_s)
        dist.init_process_group(
            platform.collective_backend, store=store, rank=rank, world_size=layout.world_size, timeout=timeout
        )
        groups: dict[AxisName, dist.ProcessGroup] = {}
        for axis in layout.axes:  # all ranks make all groups, in the same order
            if axis.name == "attn_tp" and axis.size > 1:
                groups["attn_tp"] = groups["kvp"]
            elif axis.size > 1:
                for ranks in layout.groups(axis.name):
                    group = dist.new_group(list(ranks), timeout=timeout)
                    if rank in ranks:
                        groups[axis.name] = group
        return cls(layout, rank, groups)

    def axis(self, name: AxisName) -> AxisGroup:
        """The group of an axis; of size 1 where the layout does not split along it."""
        return self._axes[name]

    def coordinate(self, name: AxisName) -> int:
        """This rank's place on an axis."""
        return self._axes[name].rank

    def leave(self) -> None:
        """Ends the groups."""
        if self.layout.world_size > 1:
            dist.destroy_process_group()
