"""Which process groups the axes of an instance share, and which have one of their own. Pure; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from longcat_pd.config.schema import HcclOptions, NpuConfig
from longcat_pd.parallel.layout import AxisName, ParallelLayout

SILENT: frozenset[AxisName] = frozenset({"dp"})  # groups compute beside each other; what joins them has other axes
APART: Mapping[AxisName, AxisName] = MappingProxyType({"fused": "ep"})  # of operators, and whose ranks they join
_EXPERTS: frozenset[AxisName] = frozenset({"ep", "moe_tp", "node", "local"})


class Communicator(NamedTuple):
    """A process group: axes for which all of this is equal share it. ``owner``: "" unless somebody wants it alone."""

    ranks: tuple[int, ...]
    options: HcclOptions
    owner: str


def communicator(name: AxisName, ranks: tuple[int, ...], npu: NpuConfig) -> Communicator:
    """Of a group of an axis.

    Experts that run beside the rest share none with it: one communicator must not have collectives on two streams at once.
    """
    options: HcclOptions = vars(npu.hccl)[name]
    beside = _EXPERTS if npu.is_moe_overlapped else frozenset()
    owner = name if name in APART else "experts" if name in beside else ""
    return Communicator(ranks, options, owner)


def communicators(layout: ParallelLayout, rank: int, npu: NpuConfig) -> dict[AxisName, Communicator]:
    """Those that a rank is in, by axis."""
    return {
        axis.name: communicator(axis.name, layout.group_of(rank, axis.name), npu)
        for axis in layout.axes
        if axis.size > 1 and axis.name not in SILENT
    }
