"""Documented limits of fused dispatch and combine, by generation of devices and way to travel."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.npu.kernels.groups import Exchange, group
from tests.npu.kernels.limits import Limits

MAX_CHOICES = 16
MEBI = 1 << 20


@dataclass(frozen=True)
class Shape:
    """What the buffer of a communicator depends on: ``local`` experts of a rank, ``rows`` of each rank."""

    rows: int
    hidden: int
    topk: int
    world: int
    local: int


@dataclass(frozen=True)
class Variant:
    """Documented limits of one way to travel, on one generation of devices."""

    worlds: Container[int]
    hidden: tuple[int, int]
    max_rows: int
    buffer_bytes: Callable[[Shape], int]
    has_special_experts: bool = True
    has_masks: bool = True
    needs_scales: bool = False
    max_experts: int = 1024
    max_choices: int = MAX_CHOICES


def _aligned(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _a2_mesh(s: Shape) -> int:
    return 2 * (s.rows * s.world * s.hidden * 2 * min(s.local, s.topk) + 2 * MEBI)


def _a2_tree(s: Shape) -> int:
    row = 2 * s.hidden + 16 * _aligned(s.topk, 8)
    return (s.local * s.world + s.world // 4) * _aligned(s.rows * row, 512) + 8 * MEBI


def _a3_mesh(s: Shape) -> int:
    out = s.local * s.rows * s.world * _aligned(_aligned(2 * s.hidden, 32) + 64, 512)
    return 2 * (out + s.topk * s.rows * _aligned(2 * s.hidden, 512))


A2_MESH = Variant((*range(2, 9), 16, 32, 64, 128, 256), (1, 7168), 256, _a2_mesh)
A2_TREE = Variant((16, 32, 64), (1, 10240), 512, _a2_tree, has_special_experts=False, has_masks=False, needs_scales=True)
A3_MESH = Variant(range(2, 769), (1024, 8192), 512, _a3_mesh)
VARIANTS: dict[tuple[str, str], Variant] = {
    ("A2", ""): A2_MESH,
    ("A2", "fullmesh"): A2_MESH,
    ("A2", "hierarchy"): A2_TREE,
    ("A3", ""): A3_MESH,
    ("A3", "fullmesh_v1"): A3_MESH,
    ("A3", "fullmesh_v2"): Variant(range(2, 769), (1024, 8192), 256, _a3_mesh, max_choices=12),
    ("A3", "hierarchy"): Variant(range(2, 769), (1024, 8192), 256, _a3_mesh, max_experts=512),
}


@dataclass
class _Setting:
    soc: str = "A3"
    buffer_bytes: int = 200 * MEBI


_setting = _Setting()


def choose_soc(soc: str, buffer_mib: int = 200) -> None:
    """The generation of all devices of this process, "A2" or "A3", and the size of a communicator's buffer."""
    if soc not in {known for known, _ in VARIANTS}:
        raise ValueError(f"no limits of {soc} are known")
    _setting.soc, _setting.buffer_bytes = soc, buffer_mib * MEBI


@dataclass(frozen=True)
class Call:
    """Arguments that both operators take, and have to take alike."""

    group_ep: str
    world: int
    rank: int
    routed: int
    zero: int
    copy: int
    global_bs: int
    comm_alg: str

    @property
    def local(self) -> int:
        return self.routed // self.world

    def check(self, limits: Limits, hidden: int, ids: Tensor, mask: Tensor | None) -> tuple[Exchange, Variant, int]:
        """The documented limits -> also how many rows are active."""
        variant = VARIANTS.get((_setting.soc, self.comm_alg))
        limits.require(variant is not None, f"comm_alg is {self.comm_alg!r}, which {_setting.soc} does not have")
        assert variant is not None
        limits.require(self.world in variant.worlds, f"ep_world_size is {self.world}, which {self._place} does not allow")
        limits.within("ep_rank_id", self.rank, 0, self.world - 1)
        limits.within(f"moe_expert_num on {self._place}", self.routed, 1, variant.max_experts)
        limits.require(self.routed % self.world == 0, f"moe_expert_num {self.routed} is no multiple of {self.world} ranks")
        limits.require(self.zero >= 0 and self.copy >= 0, f"numbers of zero and copy experts are {self.zero}, {self.copy}")
        is_plain = self.zero == self.copy == 0
        limits.require(is_plain or variant.has_special_experts, f"{self._place} has no zero or copy experts")
        limits.dtype("expert_ids", ids, torch.int32)
        limits.shape("expert_ids", ids, None, None)
        rows, topk = ids.shape
        limits.within(f"K of expert_ids on {self._place}", topk, 1, min(variant.max_choices, self._experts))
        limits.within(f"rows on {self._place}", max(rows, self.most_rows(rows)), 1, variant.max_rows)
        limits.within(f"H on {self._place}", hidden, *variant.hidden)
        num_active = self._active(limits, variant, mask, rows)
        self._check_ids(limits, ids[:num_active])
        self._check_sizes(limits, variant, Shape(self.most_rows(rows), hidden, topk, self.world, self.local))
        exchange = group(self.group_ep)
        limits.require(exchange is not None, f"group_ep {self.group_ep!r} is no communicator")
        assert exchange is not None
        return exchange, variant, num_active

    def most_rows(self, rows: int) -> int:
        """Of any rank."""
        return self.global_bs // self.world if self.global_bs else rows

    def capacity(self, rows: int, topk: int) -> int:
        """Rows of the result of dispatch."""
        return self.most_rows(rows) * self.world * min(self.local, topk)

    @property
    def _experts(self) -> int:
        return self.routed + self.zero + self.copy

    @property
    def _place(self) -> str:
        return f"{_setting.soc} {self.comm_alg or 'default'}"

    def _active(self, limits: Limits, variant: Variant, mask: Tensor | None, rows: int) -> int:
        if mask is None:
            return rows
        limits.require(variant.has_masks, f"x_active_mask is given, which {self._place} does not have")
        limits.dtype("x_active_mask", mask, torch.bool)
        limits.shape("x_active_mask", mask, rows)
        num_active = int(mask.sum())
        limits.require(bool(mask[:num_active].all()), "x_active_mask has rows that count after rows that do not")
        return num_active

    def _check_ids(self, limits: Limits, ids: Tensor) -> None:
        if not len(ids):
            return
        is_inside = bool(((ids >= 0) & (ids < self._experts)).all())
        limits.require(
            is_inside, f"expert_ids hold {int(ids.min())} to {int(ids.max())}, allowed are 0 to {self._experts - 1}"
        )
        ordered = ids.sort(-1).values
        repeated = (ordered[:, 1:] == ordered[:, :-1]).any(-1)
        limits.require(not bool(repeated.any()), f"expert_ids of row {int(repeated.int().argmax())} are not distinct")

    def _check_sizes(self, limits: Limits, variant: Variant, shape: Shape) -> None:
        if self.global_bs:
            limits.require(
                self.global_bs % self.world == 0, f"global_bs {self.global_bs} is no multiple of {self.world} ranks"
            )
        needed = variant.buffer_bytes(shape)
        limits.require(
            needed <= _setting.buffer_bytes,
            f"{self._place} needs a communicator's buffer of {needed} bytes, it has {_setting.buffer_bytes} ({shape})",
        )
