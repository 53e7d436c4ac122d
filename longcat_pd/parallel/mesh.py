"""The process groups of one instance and this rank's place in them. Knows the layout, no models."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from longcat_pd.config.schema import ParallelConfig, RankSpec
from longcat_pd.parallel.collectives import AxisGroup, Collectives
from longcat_pd.parallel.communicators import APART, SILENT
from longcat_pd.parallel.joining import join_groups
from longcat_pd.parallel.layout import AxisName, CacheShard, ParallelLayout
from longcat_pd.parallel.line import Line
from longcat_pd.parallel.platform import Platform, platform_of
from longcat_pd.parallel.traffic import Traffic
from longcat_pd.progress.steps import Tell, untold


class Mesh:
    """A layout, a rank in it, one group for each of its axes, and what was exchanged in them.

    ``platform`` and ``device``: what the rank runs on; ``local_rank``: its place on its node, where it has the device of
    that number.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        rank: int,
        groups: dict[AxisName, dist.ProcessGroup],
        *,
        platform: Platform,
        local_rank: int = 0,
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.platform = platform
        self.device = platform.device(local_rank)
        self.traffic = Traffic()
        self._groups = groups
        self._axes = {
            axis.name: self._axis(axis.name, axis.size)
            for axis in layout.axes
            if axis.name not in SILENT and axis.name not in APART
        }

    @classmethod
    def single(cls, device: str = "cpu") -> Mesh:
        """A world of one rank, without torch.distributed."""
        return cls(ParallelLayout.of(ParallelConfig()), 0, {}, platform=platform_of(device))

    @classmethod
    def join(cls, spec: RankSpec) -> Mesh:
        """Meets the other ranks of the instance; rank 0 serves the rendezvous. A world of one needs nobody.

        Raises:
            RankLost: not all ranks came in time.
            ConfigError: a key file that cannot be read.
        """
        layout, platform = ParallelLayout.of(spec.instance.parallel), platform_of(spec.instance.device)
        if layout.world_size == 1:
            return cls(layout, 0, {}, platform=platform)
        groups = join_groups(spec, layout, platform)
        return cls(layout, spec.rank, groups, platform=platform, local_rank=spec.local_rank)

    def axis(self, name: AxisName) -> AxisGroup:
        """The group of an axis; of size 1 where the layout does not split along it, or its ranks never talk along it."""
        return self._axes.get(name) or AxisGroup(name, 1, 0, None)

    def warm_up(self, tell: Tell = untold) -> None:
        """Builds every communicator, and every pair of neighbours that send to each other. All ranks call it.

        Before memory is measured or given to a cache: the buffers of communicators and the first use of a pair take some.
        """
        names = [axis.name for axis in self.layout.axes if axis.size > 1]  # in the same order everywhere
        for done, name in enumerate(names):
            tell("warm-up", done, len(names))
            self.axis(name).warm_up()
        self.axis("pp").warm_up_chain()
        for name, owner in APART.items():
            if name in self._groups:
                place = self.layout.coordinate(self.rank, name)
                self.axis(owner).communicator = self.platform.runtime.communicator(self._groups[name], place)
        self.platform.runtime.synchronise()
        if names:
            tell("warm-up", len(names), len(names))

    def through(self, wrap: Callable[[Collectives, int], Collectives]) -> None:
        """See ``AxisGroup.through``; on every axis."""
        for axis in self._axes.values():
            axis.through(wrap)

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

    def _axis(self, name: AxisName, size: int) -> AxisGroup:
        rank, group = self.layout.coordinate(self.rank, name), self._groups.get(name)
        if group is None:
            return AxisGroup(name, size, rank, None)
        ranks = self.layout.group_of(self.rank, name)
        line = Line(axis=name, rank=rank, ranks=ranks, group=group, traffic=self.traffic, device=self.device)
        return AxisGroup(name, size, rank, line, collectives=self.platform.collectives)
