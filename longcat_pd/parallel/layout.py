"""Rank arithmetic: how the ranks of one instance are arranged on named axes. Pure; no torch, no processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longcat_pd.config.schema import ParallelConfig

AxisName = Literal[
    "pp",
    "cp",
    "dp",
    "kvp",
    "attn_tp",
    "dense_tp",
    "moe_tp",
    "ep",
    "node",
    "local",
    "embed_tp",
    "lmhead_tp",
    "ngram_embed_tp",
    "fused",
]
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

    pp x dp x cp x group tile the world; a group is the ranks of ``attn_tp``, of ``kvp``, or of both, which are the same set
    under two names then. The axes of other parts of the model are runs of neighbours in a stage. ``ep`` is ``node`` x
    ``local``: ranks that share a node are neighbours. ``fused`` has the ranks of ``ep``, for operators that communicate
    themselves.
    """

    world_size: int
    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, parallel: ParallelConfig) -> ParallelLayout:
        """The layout of a configuration, which was checked by the resolver."""
        assert parallel.attn_tp_size == 1 or parallel.kvp_size in (1, parallel.attn_tp_size), parallel
        tiling: tuple[tuple[AxisName, int], ...] = (
            ("pp", parallel.pp_size),
            ("dp", parallel.dp_size),
            ("cp", parallel.cp_size),
        )
        stride = parallel.world_size
        axes = []
        for name, size in tiling:
            stride //= size
            axes.append(Axis(name, size, stride))
        neighbours: tuple[tuple[AxisName, int], ...] = (
            ("kvp", parallel.kvp_size),
            ("attn_tp", parallel.attn_tp_size),
            ("dense_tp", parallel.dense_tp_size),
            ("moe_tp", parallel.moe_tp_size),
            ("ep", parallel.ep_size),
            ("embed_tp", parallel.embed_tp_size),
            ("lmhead_tp", parallel.lmhead_tp_size),
            ("ngram_embed_tp", parallel.ngram_embed_tp_size or parallel.embed_tp_size),
        )
        for name, size in neighbours:
            assert parallel.stage_size % size == 0, (name, size, parallel.stage_size)
            axes.append(Axis(name, size, 1))
        if parallel.moe_dispatch == "two_level":
            num_nodes = parallel.node_size or 1
            assert parallel.ep_size % num_nodes == 0, (parallel.ep_size, num_nodes)
            num_local = parallel.ep_size // num_nodes
            axes += [Axis("node", num_nodes, num_local), Axis("local", num_local, 1)]
        if parallel.moe_dispatch == "fused":
            axes.append(Axis("fused", parallel.ep_size, 1))
        return cls(parallel.world_size, tuple(axes))

    def axis(self, name: AxisName) -> Axis:
        """The axis of that name; of size 1 where the layout has none."""
        return next((axis for axis in self.axes if axis.name == name), Axis(name, 1, 1))

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
        """Whether ``rank`` reports sampled tokens: the first rank of each group, in the last stage."""
        last_stage = self.coordinate(rank, "pp") == self.axis("pp").size - 1
        return last_stage and all(self.coordinate(rank, name) == 0 for name in ("cp", "kvp", "attn_tp"))


def layers_of_stage(parallel: ParallelConfig, num_layers: int, pp_rank: int) -> range:
    """The decoder layers of a pipeline stage; ``layers_per_stage`` empty: even, larger stages first."""
    sizes = parallel.layers_per_stage or tuple(
        num_layers // parallel.pp_size + (stage < num_layers % parallel.pp_size) for stage in range(parallel.pp_size)
    )
    assert len(sizes) == parallel.pp_size and sum(sizes) == num_layers, (sizes, parallel.pp_size, num_layers)
    first = sum(sizes[:pp_rank])
    return range(first, first + sizes[pp_rank])
