"""The process groups of one instance and this rank's place in them. Knows the layout, no models."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from longcat_pd.config.schema import ParallelConfig, RankSpec
from longcat_pd.errors import RankLost
from longcat_pd.parallel.collectives import AxisGroup
from longcat_pd.parallel.layout import AxisName, CacheShard, ParallelLayout
from longcat_pd.parallel.platform import platform_of
from longcat_pd.parallel.traffic import Traffic

JOIN_LIMIT_S = 20.0  # until all ranks of the instance have come to the rendezvous: they are started together

_SILENT: frozenset[AxisName] = frozenset({"dp"})  # groups compute beside each other; what joins them has other axes


class Mesh:
    """A layout, a rank in it, one group for each of its axes, and what was exchanged in them."""

    def __init__(self, layout: ParallelLayout, rank: int, groups: dict[AxisName, dist.ProcessGroup]) -> None:
        self.layout = layout
        self.rank = rank
        self.traffic = Traffic()
        self._axes = {
            axis.name: AxisGroup(
                axis.name,
                axis.size,
                layout.coordinate(rank, axis.name),
                groups.get(axis.name),
                ranks=layout.group_of(rank, axis.name),
                traffic=self.traffic,
            )
            for axis in layout.axes
            if axis.name not in _SILENT
        }

    @classmethod
    def single(cls) -> Mesh:
        """A world of one rank, without torch.distributed."""
        return cls(ParallelLayout.of(ParallelConfig()), 0, {})

    @classmethod
    def join(cls, spec: RankSpec) -> Mesh:
        """Meets the other ranks of the instance; rank 0 serves the rendezvous. A world of one needs nobody.

        Raises:
            RankLost: not all ranks came in time.
        """
        layout = ParallelLayout.of(spec.instance.parallel)
        if layout.world_size == 1:
            return cls(layout, 0, {})
        rank = spec.rank
        _meet(spec, layout.world_size)
        # the driver judges a slow step first (step_timeout_s); a collective gives up only after the driver has
        timeout = timedelta(seconds=spec.instance.engine.step_timeout_s + spec.instance.engine.rank_lost_s)
        groups: dict[AxisName, dist.ProcessGroup] = {}
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}  # axes of the same ranks share a group
        for axis in layout.axes:  # all ranks make all groups, in the same order
            if axis.size > 1 and axis.name not in _SILENT:
                for ranks in layout.groups(axis.name):
                    if ranks not in made:
                        made[ranks] = dist.new_group(list(ranks), timeout=timeout)
                groups[axis.name] = made[layout.group_of(rank, axis.name)]
        return cls(layout, rank, groups)

    def axis(self, name: AxisName) -> AxisGroup:
        """The group of an axis; of size 1 where the layout does not split along it, or its ranks never talk along it."""
        return self._axes.get(name) or AxisGroup(name, 1, 0, None)

    @property
    def cache_shard(self) -> CacheShard:
        """The part of a sequence's cache that this rank keeps and sees."""
        return self.layout.cache_shard(self.rank)

    def coordinate(self, name: AxisName) -> int:
        """This rank's place on an axis."""
        return self.layout.coordinate(self.rank, name)

    def leave(self) -> None:
        """Ends the groups."""
        for axis in self._axes.values():
            axis.leave()
        if self.layout.world_size > 1:
            dist.destroy_process_group()


def _meet(spec: RankSpec, world_size: int) -> None:
    """Makes the group of all ranks, which computes nothing. Raises RankLost (of RuntimeError are all errors here)."""
    limit = timedelta(seconds=JOIN_LIMIT_S)
    place = spec.rendezvous_host, spec.rendezvous_port
    backend = platform_of(spec.instance.device).collective_backend
    try:
        store = dist.TCPStore(*place, world_size, is_master=spec.rank == 0, timeout=limit)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=spec.rank, world_size=world_size, timeout=limit)
    except RuntimeError as error:
        text = f"not all {world_size} ranks came to the rendezvous at {place[0]}:{place[1]} within {JOIN_LIMIT_S:g} s"
        raise RankLost(f"rank {spec.rank}: {text}") from error
