"""Rank arithmetic: how the ranks of one instance are arranged on named axes. Pure; no torch, no processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longcat_pd.config.schema import ParallelConfig

AxisName = Literal["pp", "cp", "dp", "kvp", "attn_tp"]
KVAccess = Literal["local", "gathered", "partitioned"]


@dataclass(frozen=True, slots=True)
class Axis:
    """Ranks whose numbers differ by multiples of ``stride`` form the groups of this axis."""

    name: AxisName
    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class CacheShard:
    """Which part of a sequence's cache a rank keeps, and what of it its attention sees.

    Attributes:
        access: local: it keeps all blocks; gathered: it keeps some and sees all, for the rows whose blocks it keeps
            (context parallel); partitioned: it keeps some and sees those, for all rows (KV parallel).
        num_ranks: ranks that share the blocks of one sequence, by BlockSplit.
        rank: this one's place among them.
    """

    access: KVAccess
    num_ranks: int
    rank: int


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The axes of one instance, outermost first. ``size * stride`` of every axis divides the world.

    A prefill instance is pp x cp, a decode instance dp x kvp; one inside the other they tile the world. ``attn_tp`` is the
    same set of ranks as ``kvp`` under the name that the projections use.
    """

    world_size: int
    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, parallel: ParallelConfig) -> ParallelLayout:
        """The layout of a configuration, which was checked by the resolver."""
        assert parallel.attn_tp_size in (1, parallel.kvp_size), (parallel.attn_tp_size, parallel.kvp_size)
        tiling: tuple[tuple[AxisName, int], ...] = (
            ("pp", parallel.pp_size),
            ("dp", parallel.dp_size),
            ("cp", parallel.cp_size),
            ("kvp", parallel.kvp_size),
        )
        stride = parallel.world_size
        axes = []
        for name, size in tiling:
            stride //= size
            axes.append(Axis(name, size, stride))
        axes.append(Axis("attn_tp", parallel.attn_tp_size, 1))
        return cls(parallel.world_size, tuple(axes))

    def axis(self, name: AxisName) -> Axis:
        """The axis of that name."""
        return next(axis for axis in self.axes if axis.name == name)

    def coordinate(self, rank: int, name: AxisName) -> int:
        """The place of ``rank`` on an axis."""
        axis = self.axis(name)
        return rank // axis.stride % axis.size

    def group_of(self, rank: int, name: AxisName) -> tuple[int, ...]:
        """The ranks that share an axis with ``rank``, in the order of their coordinates."""
        axis = self.axis(name)
        first = rank - self.coordinate(rank, name) * axis.stride
        return tuple(first + place * axis.stride for place in range(axis.size))

    def groups(self, name: AxisName) -> list[tuple[int, ...]]:
        """All groups of an axis, in the order of their first ranks."""
        return sorted({self.group_of(rank, name) for rank in range(self.world_size)})

    def cache_shard(self, rank: int) -> CacheShard:
        """A sequence is split over cp or over kvp, never over both."""
        cp, kvp = self.axis("cp"), self.axis("kvp")
        assert cp.size == 1 or kvp.size == 1, (cp.size, kvp.size)
        if cp.size > 1:
            return CacheShard("gathered", cp.size, self.coordinate(rank, "cp"))
        if kvp.size > 1:
            return CacheShard("partitioned", kvp.size, self.coordinate(rank, "kvp"))
        return CacheShard("local", 1, 0)

    def is_reporting(self, rank: int) -> bool:
        """Whether ``rank`` reports sampled tokens: the first rank of the last stage, and of each decode group."""
        last_stage = self.coordinate(rank, "pp") == self.axis("pp").size - 1
        return last_stage and self.coordinate(rank, "cp") == 0 and self.coordinate(rank, "kvp") == 0


def layers_of_stage(parallel: ParallelConfig, num_layers: int, pp_rank: int) -> range:
    """The decoder layers of a pipeline stage; ``layers_per_stage`` empty: even, larger stages first."""
    sizes = parallel.layers_per_stage or tuple(
        num_layers // parallel.pp_size + (stage < num_layers % parallel.pp_size) for stage in range(parallel.pp_size)
    )
    assert len(sizes) == parallel.pp_size and sum(sizes) == num_layers, (sizes, parallel.pp_size, num_layers)
    first = sum(sizes[:pp_rank])
    return range(first, first + sizes[pp_rank])
