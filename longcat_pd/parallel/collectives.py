"""Communication over one axis of a mesh; the identity where the axis has one rank. Knows no models.

How a collective is carried out is chosen with the kind of device when the mesh is made: ``pairwise.py`` or ``native.py``,
which move the same bytes and differ in how they add.

All ranks of an axis call the same operations in the same order with the same shapes. Every wait ends with the time-out of
the process group (RuntimeError).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from longcat_pd.parallel.line import Line
from longcat_pd.parallel.native import Native
from longcat_pd.parallel.pairwise import Pairwise


class Collectives(Protocol):
    """The collectives of one process group. What comes from all ranks is [size, ...], by rank."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, equal in shape."""
        ...

    def swap(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Cuts ``x`` along ``dim`` into equal parts; part j goes to rank j."""
        ...

    def swap_rows(self, x: torch.Tensor, out: Sequence[int], into: Sequence[int]) -> torch.Tensor:
        """``out[j]`` rows, in the order of ranks, go to rank j and ``into[j]`` come from it: [sum(into), ...]."""
        ...

    def sum_parts(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The sum over ranks of this rank's part, of equal parts along ``dim``."""
        ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, as a new tensor."""
        ...

    def warm_up(self) -> None:
        """Builds what the backend builds at the first call, so that it has its memory. All ranks of the group call it."""
        ...

    def leave(self) -> None:
        """The process group ends."""
        ...


COLLECTIVES: Mapping[str, Callable[[Line], Collectives]] = {"pairwise": Pairwise, "native": Native}


@dataclass(frozen=True, slots=True)
class PendingSend:
    """A message on its way. Its tensor must not change until ``wait`` has returned."""

    line: Line
    work: dist.Work | None
    payload: torch.Tensor

    def wait(self) -> None:
        """Until the receiver has taken the message."""
        if self.work is not None:
            self.line.traffic.wait(self.line.axis, [self.work])


class AxisGroup:
    """The ranks that share one axis with this rank.

    Args:
        name: the axis.
        size: how many they are.
        rank: this rank's coordinate among them.
        line: their process group; None when the axis has one rank, and where a rank is only looked at: then its modules can
            be built and cannot compute.
        collectives: a name in COLLECTIVES.

    ``communicator``: what a device's operators that communicate themselves call these ranks, apart from all other groups.
    Empty where there are none, and before ``Mesh.warm_up``.
    """

    def __init__(self, name: str, size: int, rank: int, line: Line | None, *, collectives: str = "pairwise") -> None:
        assert size > 1 or line is None, name
        self.name = name
        self.size = size
        self.rank = rank
        self.communicator = ""
        self._line = line
        self._collectives = None if line is None else COLLECTIVES[collectives](line)

    def leave(self) -> None:
        """The process group ends."""
        if self._collectives is not None:
            self._collectives.leave()

    def through(self, wrap: Callable[[Collectives, int], Collectives]) -> None:
        """From now on through what ``wrap`` makes of the collectives and the size, where there is anybody to talk to."""
        if self._collectives is not None:
            self._collectives = wrap(self._collectives, self.size)

    def warm_up(self) -> None:
        """Builds what the first collective would build. All ranks of the axis call it; it is not counted as traffic."""
        if self._collectives is not None:
            self._collectives.warm_up()

    def warm_up_chain(self) -> None:
        """Like ``warm_up`` for messages from every rank to the next one along the axis."""
        if self._line is None:
            return
        message = torch.zeros(1, device=self._line.device)
        if self.rank > 0:
            self._line.group.recv([message], self.rank - 1, 0).wait()
        if self.rank < self.size - 1:
            self._line.group.send([message], self.rank + 1, 0).wait()

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The tensors of all ranks, equal in shape, one behind the other along ``dim``."""
        if self.size == 1:
            return x
        return _join(self._talking().gather(x), dim)

    def all_to_all(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Cuts ``x`` along ``dim`` into equal parts; part j goes to rank j. Returns what came, by rank, along ``dim``."""
        if self.size == 1:
            return x
        self._assert_parts(x, dim)
        return _join(self._talking().swap(x, dim), dim)

    def all_to_all_rows(self, x: torch.Tensor, out: Sequence[int], into: Sequence[int]) -> torch.Tensor:
        """The first ``out[0]`` rows go to rank 0, the next ``out[1]`` to rank 1, ...; ``into[j]`` rows come from rank j.

        All ranks know what comes. Returns what came, by rank.
        """
        if self.size == 1:
            return x
        return self._talking().swap_rows(x, out, into)

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The sum over ranks of this rank's part (of equal parts along ``dim``)."""
        if self.size == 1:
            return x
        self._assert_parts(x, dim)
        return self._talking().sum_parts(x, dim)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, as a new tensor."""
        if self.size == 1:
            return x
        return self._talking().sum(x)

    def send(self, x: torch.Tensor, to: int) -> None:
        """Sends to the rank at coordinate ``to`` and waits until it was taken."""
        self.start_send(x, to).wait()

    def start_send(self, x: torch.Tensor, to: int) -> PendingSend:
        """Like ``send`` without waiting."""
        assert self._line is not None, f"{self.name} has one rank"
        payload = x.contiguous()
        return PendingSend(self._line, self._line.post_send(payload, to) if payload.numel() else None, payload)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, frm: int) -> torch.Tensor:
        """Receives what the rank at coordinate ``frm`` sends, on the rank's device; an empty tensor is not sent."""
        assert self._line is not None, f"{self.name} has one rank"
        x = torch.empty(tuple(shape), dtype=dtype, device=self._line.device)
        if x.numel():
            self._line.traffic.wait(self._line.axis, [self._line.post_recv(x, frm)])
        return x

    def _talking(self) -> Collectives:
        assert self._collectives is not None, f"{self.name}: {self.size} ranks, and no process group"
        return self._collectives

    def _assert_parts(self, x: torch.Tensor, dim: int) -> None:
        assert x.shape[dim] % self.size == 0, (self.name, tuple(x.shape), dim, self.size)


def _join(parts: torch.Tensor, dim: int) -> torch.Tensor:
    dim %= parts.dim() - 1
    return parts.movedim(0, dim).flatten(dim, dim + 1)
