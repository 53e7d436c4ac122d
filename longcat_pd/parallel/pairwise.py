"""Collectives built from pairwise exchanges of bytes. For gloo.

Measured with gloo on loopback, 2 and 4 ranks, 1 KiB to 4 MiB, sends first, they are as fast as its own all_to_all and
faster than all_gather and all_reduce (batch_isend_irecv takes half as long again); every data type travels (gloo refuses
8-bit floats, and the refusal poisons the group); and sums are ours: in fp32, in the order of ranks, rounded once, so that
every rank gets the same bits, and a row the same bits in any batch.

The exchange is one operator that a compiler does not look into, so a compiled step communicates, and is counted, as an
eager one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from longcat_pd.kernels.node import node
from longcat_pd.parallel.line import Line, as_bytes

# Above so many bytes a sum moves each rank's part only (two exchanges) instead of all parts to all ranks (one).
_GATHER_AND_SUM_BYTES = 65536

# By the name of a process group, which is all that an operator can be told: torch finds the group itself in the same way,
# in a table of its own. An entry is there as long as the group (``Pairwise.leave``).
_LINES: dict[str, Line] = {}

_CONTINUED = ""  # the kind of an exchange that belongs to the collective before it


class Pairwise:
    """See ``collectives.Collectives``."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._size = len(line.ranks)
        _LINES[line.group.group_name] = line

    def leave(self) -> None:
        """See Collectives."""
        _LINES.pop(self._line.group.group_name, None)

    def warm_up(self) -> None:
        """Nothing: gloo joins all pairs when the group is made."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """See Collectives."""
        return self._exchange([x.contiguous()] * self._size, "all_gather")

    def swap(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """See Collectives."""
        return self._exchange(self._parts(x, dim), "all_to_all")

    def swap_rows(self, x: torch.Tensor, out: Sequence[int], into: Sequence[int]) -> torch.Tensor:
        """See Collectives."""
        line = self._line
        line.began("all_to_all_rows")
        received = x.new_empty((sum(into), *x.shape[1:]))
        mine, theirs = torch.split(x.contiguous(), list(out)), torch.split(received, list(into))
        theirs[line.rank].copy_(mine[line.rank])
        works = [line.post_send(mine[to], to) for to in line.others if mine[to].numel()]
        works += [line.post_recv(theirs[frm], frm) for frm in reversed(line.others) if theirs[frm].numel()]
        line.traffic.wait(line.axis, works)
        return received

    def sum_parts(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """See Collectives."""
        return _sum(self._exchange(self._parts(x, dim), "reduce_scatter"))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See Collectives."""
        if x.numel() * x.element_size() <= _GATHER_AND_SUM_BYTES:
            return _sum(self._exchange([x.contiguous()] * self._size, "all_reduce"))
        flat = x.reshape(-1)
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % self._size))
        part = _sum(self._exchange(self._parts(padded, 0), "all_reduce"))
        total = self._exchange([part] * self._size, _CONTINUED).flatten()
        return total[: flat.numel()].view(x.shape)

    def _parts(self, x: torch.Tensor, dim: int) -> list[torch.Tensor]:
        return [part.contiguous() for part in x.tensor_split(self._size, dim)]

    def _exchange(self, parts: Sequence[torch.Tensor], kind: str) -> torch.Tensor:
        """Part j goes to rank j; returns what each rank sent here, [size, ...]. Parts are contiguous, equal in shape."""
        line = self._line
        return _exchange(list(parts), line.group.group_name, line.rank, line.axis, kind)


def _exchange_shapes(parts: list[torch.Tensor], group: str, rank: int, axis: str, kind: str) -> torch.Tensor:
    return parts[rank].new_empty((len(parts), *parts[rank].shape))


@node(_exchange_shapes)
def _exchange(parts: list[torch.Tensor], group: str, rank: int, axis: str, kind: str) -> torch.Tensor:
    line = _LINES[group]
    if kind != _CONTINUED:
        line.traffic.began(axis, kind)
    received = parts[rank].new_empty((len(parts), *parts[rank].shape))
    received[rank] = parts[rank]
    if not parts[rank].numel():
        return received
    ranks: dist.ProcessGroup = _resolve_process_group(group)  # type: ignore[arg-type]
    for to in line.others:
        line.traffic.sent(axis, line.ranks[to], parts[to].numel() * parts[to].element_size())
    works = [ranks.send([as_bytes(parts[to])], to, 0) for to in line.others]
    works += [ranks.recv([as_bytes(received[frm])], frm, 0) for frm in reversed(line.others)]
    line.traffic.wait(axis, works)
    return received


def _sum(parts: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(parts.dtype, torch.float32) if parts.is_floating_point() else parts.dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:].unbind():
        total += part
    return total.to(parts.dtype)
