"""A process group as one rank sees it: who is in it, where its tensors lie, what it carries.

Knows messages, no collectives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from longcat_pd.parallel.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Line:
    """The process group of one axis.

    Attributes:
        axis: its name.
        rank: this rank's place in the group.
        ranks: all of them, as numbers in the instance, by place.
        group: torch's own.
        traffic: notes what the group carries.
        device: where tensors lie that arrive.
    """

    axis: str
    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    traffic: Traffic
    device: torch.device

    @property
    def others(self) -> list[int]:
        """The places of all but this rank, beginning with the next one."""
        return [(self.rank + distance) % len(self.ranks) for distance in range(1, len(self.ranks))]

    def began(self, kind: str) -> None:
        """A collective of this kind begins."""
        self.traffic.began(self.axis, kind)

    def sent(self, to: int, x: torch.Tensor) -> None:
        """``x`` goes to the rank at place ``to``."""
        self.traffic.sent(self.axis, self.ranks[to], x.numel() * x.element_size())

    def post_send(self, x: torch.Tensor, to: int) -> dist.Work:
        """``x`` is contiguous, not empty, and does not change until the work is done."""
        self.sent(to, x)
        return self.group.send([as_bytes(x)], to, 0)

    def post_recv(self, x: torch.Tensor, frm: int) -> dist.Work:
        """``x`` is contiguous and not empty."""
        return self.group.recv([as_bytes(x)], frm, 0)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Of a contiguous tensor; one of a single element may still have any stride, which a view of bytes does not take."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
