"""Collectives of the backend itself, as operators that a compiler may look at. For HCCL; gloo has them too.

They are torch's functional collectives, named by the group's name: the same in eager mode, for a tracer and on tensors
without data, and what the graph compilers of devices have nodes for. Everything travels as a 1-D tensor: the only form of
an all_to_all that all of those take.

Sums are the backend's: in the type of the tensor and in an order of its own. Every rank gets the same bits, because each
number is added up in one place; two runs, two layouts or two batches need not.

Traffic is counted where a call is really made. Under a compiler nothing is counted, which would break the graph or be done
once for all: whoever executes a compiled step replays what an eager one was noted to send (``Traffic.noted``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as _registered  # noqa: F401  (shapes of the operators)

from longcat_pd.parallel.line import Line

_OPS: Any = torch.ops._c10d_functional
# types that backends have no name for, and one of theirs of the same size to move them as
_MOVED_AS = dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), torch.int8)


class Native:
    """See ``collectives.Collectives``."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._size = len(line.ranks)
        self._name: str = line.group.group_name
        self._others = line.others

    def leave(self) -> None:
        """See Collectives."""

    def warm_up(self) -> None:
        """See Collectives. Not counted."""
        dist.all_reduce(torch.zeros(1, device=self._line.device), group=self._line.group)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """See Collectives."""
        self._note("all_gather", x.numel() * x.element_size())
        if not x.numel():
            return x.new_empty((self._size, *x.shape))
        flat = _movable(x.reshape(-1))
        everyones = _done(_OPS.all_gather_into_tensor(flat, self._size, self._name))
        return everyones.view(x.dtype).view(self._size, *x.shape)

    def swap(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """See Collectives."""
        parts = self._parts(x, dim)
        part = x.numel() // self._size
        self._note("all_to_all", part * x.element_size())
        if not part:
            return parts
        even = [part] * self._size
        came = _done(_OPS.all_to_all_single(_movable(parts.reshape(-1)), even, even, self._name))
        return came.view(x.dtype).view(parts.shape)

    def swap_rows(self, x: torch.Tensor, out: Sequence[int], into: Sequence[int]) -> torch.Tensor:
        """See Collectives. The counts are Python numbers: not for a graph."""
        line, width = self._line, x[:1].numel() if len(x) else x.new_empty((1, *x.shape[1:])).numel()
        line.began("all_to_all_rows")
        for to in self._others:
            line.traffic.sent(line.axis, line.ranks[to], out[to] * width * x.element_size())
        outs, intos = [count * width for count in out], [count * width for count in into]
        came = _done(_OPS.all_to_all_single(_movable(x.reshape(-1)), intos, outs, self._name))
        return came.view(x.dtype).view(sum(into), *x.shape[1:])

    def sum_parts(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """See Collectives."""
        parts = self._parts(x, dim)
        self._note("reduce_scatter", x.numel() // self._size * x.element_size())
        if not x.numel():
            return parts[0]
        part = _done(_OPS.reduce_scatter_tensor(parts.reshape(-1), "sum", self._size, self._name))
        return part.view(parts.shape[1:])

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See Collectives."""
        # by the usual way of rings: each rank's part there, and the sums of all parts back
        self._note("all_reduce", 2 * -(-x.numel() // self._size) * x.element_size())
        if not x.numel():
            return x.clone()
        return _done(_OPS.all_reduce(x.reshape(-1), "sum", self._name)).view(x.shape)

    def _parts(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """[size, ...], of which entry j is what goes to rank j."""
        dim %= x.dim()
        before, whole, after = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
        return x.reshape(*before, self._size, whole // self._size, *after).movedim(dim, 0)

    def _note(self, kind: str, bytes_each: int) -> None:
        """``bytes_each``: what the definition of the collective brings to every other rank, however the backend does it."""
        if torch.compiler.is_compiling():
            return
        line = self._line
        line.began(kind)
        for to in self._others:
            line.traffic.sent(line.axis, line.ranks[to], bytes_each)


def _movable(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(_MOVED_AS[flat.dtype]) if flat.dtype in _MOVED_AS else flat


def _done(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _OPS.wait_tensor(x)
    return result
