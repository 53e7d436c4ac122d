"""Communication over one axis of a mesh; the identity where the axis has one rank. Knows no models.

Everything is built from pairwise exchanges of bytes. Measured with gloo on loopback, 2 and 4 ranks, 1 KiB to 4 MiB, sends
first, they are as fast as its own all_to_all and faster than all_gather and all_reduce (batch_isend_irecv takes half as
long again); every data type travels (gloo refuses 8-bit floats, and the refusal poisons the group); and sums are ours: in
fp32, in the order of ranks, rounded once, so that every rank gets the same bits, and a row the same bits in any batch.

The exchange is one operator that a compiler does not look into, so a compiled step communicates, and is counted, as an
eager one.

All ranks of an axis call the same operations in the same order with the same shapes. Every wait ends with the time-out of
the process group (RuntimeError).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from longcat_pd.kernels.node import node
from longcat_pd.parallel.traffic import Traffic

# Above so many bytes an all_reduce moves each rank's part only (two exchanges) instead of all parts to all ranks (one).
_GATHER_AND_SUM_BYTES = 65536


@dataclass(frozen=True, slots=True)
class _Line:
    """Whom a process group joins, and where is noted what it carries."""

    ranks: tuple[int, ...]  # of the instance, by place in the group
    traffic: Traffic


# By the name of a process group, which is all that an operator can be told: torch finds the group itself in the same way,
# in a table of its own. An entry is there as long as the group (``AxisGroup.leave``).
_LINES: dict[str, _Line] = {}

_CONTINUED = ""  # the kind of an exchange that belongs to the collective before it


@dataclass(frozen=True, slots=True)
class PendingSend:
    """A message on its way. Its tensor must not change until ``wait`` has returned."""

    work: dist.Work | None
    payload: torch.Tensor

    def wait(self) -> None:
        """Until the receiver has taken the message."""
        if self.work is not None:
            self.work.wait()


class AxisGroup:
    """The ranks that share one axis with this rank.

    Args:
        name: the axis.
        size: how many they are.
        rank: this rank's coordinate among them.
        group: their process group; None when the axis has one rank.
        ranks: their numbers in the instance.
        traffic: notes what they exchange; a collective of one rank is none.
    """

    def __init__(
        self,
        name: str,
        size: int,
        rank: int,
        group: dist.ProcessGroup | None,
        *,
        ranks: Sequence[int] = (),
        traffic: Traffic | None = None,
    ) -> None:
        assert (size == 1) == (group is None), (name, size)
        self.name = name
        self.size = size
        self.rank = rank
        self._group = group
        self._line = _Line(tuple(ranks) or tuple(range(size)), traffic or Traffic())
        if group is not None:
            _LINES[group.group_name] = self._line

    @property
    def communicator(self) -> str:
        """What a device's own collectives call these ranks, apart from all other groups; empty where there are none."""
        return ""

    def leave(self) -> None:
        """The process group ends."""
        if self._group is not None:
            _LINES.pop(self._group.group_name, None)

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The tensors of all ranks, equal in shape, one behind the other along ``dim``."""
        if self.size == 1:
            return x
        return _join(self._exchange([x.contiguous()] * self.size, "all_gather"), dim)

    def all_to_all(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Cuts ``x`` along ``dim`` into equal parts; part j goes to rank j. Returns what came, by rank, along ``dim``."""
        if self.size == 1:
            return x
        return _join(self._exchange(self._parts(x, dim), "all_to_all"), dim)

    def all_to_all_rows(self, x: torch.Tensor, out: Sequence[int], into: Sequence[int]) -> torch.Tensor:
        """The first ``out[0]`` rows go to rank 0, the next ``out[1]`` to rank 1, ...; ``into[j]`` rows come from rank j.

        All ranks know what comes. Returns what came, by rank.
        """
        if self.size == 1:
            return x
        self._line.traffic.began(self.name, "all_to_all_rows")
        received = x.new_empty((sum(into), *x.shape[1:]))
        mine, theirs = torch.split(x.contiguous(), list(out)), torch.split(received, list(into))
        theirs[self.rank].copy_(mine[self.rank])
        others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        works = [self._post_send(mine[to], to) for to in others if mine[to].numel()]
        works += [self._post_recv(theirs[frm], frm) for frm in reversed(others) if theirs[frm].numel()]
        for work in works:
            work.wait()
        return received

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The sum over ranks of this rank's part (of equal parts along ``dim``)."""
        if self.size == 1:
            return x
        return _sum(self._exchange(self._parts(x, dim), "reduce_scatter"))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, as a new tensor."""
        if self.size == 1:
            return x
        if x.numel() * x.element_size() <= _GATHER_AND_SUM_BYTES:
            return _sum(self._exchange([x.contiguous()] * self.size, "all_reduce"))
        flat = x.reshape(-1)
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % self.size))
        part = _sum(self._exchange(self._parts(padded, 0), "all_reduce"))
        total = self._exchange([part] * self.size, _CONTINUED).flatten()
        return total[: flat.numel()].view(x.shape)

    def send(self, x: torch.Tensor, to: int) -> None:
        """Sends to the rank at coordinate ``to`` and waits until it was taken."""
        self.start_send(x, to).wait()

    def start_send(self, x: torch.Tensor, to: int) -> PendingSend:
        """Like ``send`` without waiting."""
        payload = x.contiguous()
        return PendingSend(self._post_send(payload, to) if payload.numel() else None, payload)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, frm: int) -> torch.Tensor:
        """Receives what the rank at coordinate ``frm`` sends; an empty tensor is not sent."""
        x = torch.empty(tuple(shape), dtype=dtype)
        if x.numel():
            self._post_recv(x, frm).wait()
        return x

    def _parts(self, x: torch.Tensor, dim: int) -> list[torch.Tensor]:
        assert x.shape[dim] % self.size == 0, (self.name, tuple(x.shape), dim, self.size)
        return [part.contiguous() for part in x.tensor_split(self.size, dim)]

    def _exchange(self, parts: Sequence[torch.Tensor], kind: str) -> torch.Tensor:
        """Part j goes to rank j; returns what each rank sent here, [size, ...]. Parts are contiguous, equal in shape."""
        assert self._group is not None, f"{self.name} has one rank"
        return _exchange(list(parts), self._group.group_name, self.rank, self.name, kind)

    def _post_send(self, x: torch.Tensor, to: int) -> dist.Work:
        assert self._group is not None, f"{self.name} has one rank"
        self._line.traffic.sent(self.name, self._line.ranks[to], x.numel() * x.element_size())
        return self._group.send([_bytes(x)], to, 0)

    def _post_recv(self, x: torch.Tensor, frm: int) -> dist.Work:
        assert self._group is not None, f"{self.name} has one rank"
        return self._group.recv([_bytes(x)], frm, 0)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Of a contiguous tensor; one of a single element may still have any stride, which a view of bytes does not take."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


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
    others = [(rank + distance) % len(parts) for distance in range(1, len(parts))]
    for to in others:
        line.traffic.sent(axis, line.ranks[to], parts[to].numel() * parts[to].element_size())
    works = [ranks.send([_bytes(parts[to])], to, 0) for to in others]
    works += [ranks.recv([_bytes(received[frm])], frm, 0) for frm in reversed(others)]
    for work in works:
        work.wait()
    return received


def _join(parts: torch.Tensor, dim: int) -> torch.Tensor:
    return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(), dim)


def _sum(parts: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(parts.dtype, torch.float32) if parts.is_floating_point() else parts.dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:].unbind():
        total += part
    return total.to(parts.dtype)
