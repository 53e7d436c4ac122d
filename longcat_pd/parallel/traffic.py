"""What a rank has sent over each axis: how many collectives, in which order, how many bytes and to whom.

All ranks of a process group take part in the same sequence of collectives, or they wait for each other for ever; two ranks
whose ``AxisTraffic`` of one axis differ have parted. Knows no torch.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Work(Protocol):
    """Something begun that ends when other ranks have done their part."""

    def wait(self) -> object:
        """Until then."""
        ...


@dataclass
class AxisTraffic:
    """One axis. ``num_collectives`` so far, whose kinds in their order ``digest`` stands for; bytes sent to other ranks."""

    num_collectives: int = 0
    digest: int = 0
    sent_bytes: int = 0


@dataclass
class Note:
    """Counts of some calls, without those before them. ``kinds``: of collectives in their order, by axis."""

    kinds: dict[str, list[bytes]] = field(default_factory=dict)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    sent_to: Counter[int] = field(default_factory=Counter)


@dataclass
class Traffic:
    """All axes of one rank. Written by the thread that computes; readers may see a step half counted.

    ``sent_to``: bytes by rank of the instance. What a device's own operators exchange inside (a fused dispatch) is unknown.
    ``stands_in``: the axis along which the rank waits for others now; empty when it does not, and on devices whose
    collectives the host does not wait in.
    """

    axes: dict[str, AxisTraffic] = field(default_factory=dict)
    sent_to: Counter[int] = field(default_factory=Counter)
    stands_in: str = ""
    _note: Note | None = None

    def began(self, axis: str, kind: str) -> None:
        """One more collective of this kind."""
        self._began(axis, 1, kind.encode())
        if self._note is not None:
            self._note.kinds.setdefault(axis, []).append(kind.encode())

    def wait(self, axis: str, works: Iterable[Work]) -> None:
        """Until other ranks of the axis have done their part. After an error the rank is seen to stand where it failed."""
        self.stands_in = axis
        for work in works:
            work.wait()
        self.stands_in = ""

    def sent(self, axis: str, to: int, num_bytes: int) -> None:
        """So many bytes went to a rank, as part of a collective or as a message."""
        self.axes.setdefault(axis, AxisTraffic()).sent_bytes += num_bytes
        self.sent_to[to] += num_bytes
        if self._note is not None:
            self._note.sent_bytes[axis] += num_bytes
            self._note.sent_to[to] += num_bytes

    @contextlib.contextmanager
    def noted(self) -> Iterator[Note]:
        """What is counted meanwhile, for a step that will be executed again where nothing can count it."""
        assert self._note is None, "notes are not taken inside each other"
        self._note = Note()
        try:
            yield self._note
        finally:
            self._note = None

    def repeat(self, note: Note) -> None:
        """Counts once more what was noted: ends up where the same calls in the same order would."""
        for axis, kinds in note.kinds.items():
            self._began(axis, len(kinds), b"".join(kinds))
        for axis, num_bytes in note.sent_bytes.items():
            self.axes.setdefault(axis, AxisTraffic()).sent_bytes += num_bytes
        self.sent_to.update(note.sent_to)

    def _began(self, axis: str, num_collectives: int, kinds: bytes) -> None:
        traffic = self.axes.setdefault(axis, AxisTraffic())
        traffic.num_collectives += num_collectives
        traffic.digest = zlib.crc32(kinds, traffic.digest)

    def crossing_bytes(self, rank: int, node: Sequence[int]) -> int:
        """Bytes that ``rank``, which is one of ``node``, sent to ranks that are none of them."""
        assert rank in node, (rank, node)
        return sum(count for to, count in self.sent_to.items() if to not in node)
