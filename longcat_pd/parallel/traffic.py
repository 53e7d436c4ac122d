"""What a rank has sent over each axis: how many collectives, in which order, how many bytes and to whom.

All ranks of a process group take part in the same sequence of collectives, or they wait for each other for ever; two ranks
whose ``AxisTraffic`` of one axis differ have parted. Knows no torch.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class AxisTraffic:
    """One axis. ``num_collectives`` so far, whose kinds in their order ``digest`` stands for; bytes sent to other ranks."""

    num_collectives: int = 0
    digest: int = 0
    sent_bytes: int = 0


@dataclass
class Traffic:
    """All axes of one rank. Written by the thread that computes; readers may see a step half counted.

    ``sent_to``: bytes by rank of the instance.
    """

    axes: dict[str, AxisTraffic] = field(default_factory=dict)
    sent_to: Counter[int] = field(default_factory=Counter)

    def began(self, axis: str, kind: str) -> None:
        """One more collective of this kind."""
        traffic = self.axes.setdefault(axis, AxisTraffic())
        traffic.num_collectives += 1
        traffic.digest = zlib.crc32(kind.encode(), traffic.digest)

    def sent(self, axis: str, to: int, num_bytes: int) -> None:
        """So many bytes went to a rank, as part of a collective or as a message."""
        self.axes.setdefault(axis, AxisTraffic()).sent_bytes += num_bytes
        self.sent_to[to] += num_bytes

    def crossing_bytes(self, rank: int, node: Sequence[int]) -> int:
        """Bytes that ``rank``, which is one of ``node``, sent to ranks that are none of them."""
        assert rank in node, (rank, node)
        return sum(count for to, count in self.sent_to.items() if to not in node)
