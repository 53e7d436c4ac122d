"""Rows and the ranks that need them: how a module whose weights are split over some axis gets its rows, and gives back
results where they belong.

Two facts meet here. Ranks that have the same rows (those of ``attn_tp``; behind the last layer those of ``cp``) may keep
all of them or each its share (``Rows.is_split``). And a module is split over its own axis, which may be smaller than that
group, the same, or join several groups. Knows no weights.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from longcat_pd.models.batch import Rows
from longcat_pd.parallel.collectives import AxisGroup


class Shares:
    """Ranks that have the same rows, and the share of each.

    *The stream* is what modules pass on: all rows, or this rank's share of them if ``rows.is_split``. A share has
    ``rows.share`` rows; what stands in those that are missing at its end means nothing.
    """

    def __init__(self, same: AxisGroup) -> None:
        self._same = same

    def enter(self, x: Tensor, rows: Rows) -> Tensor:
        """The stream of all rows [num, ...]."""
        return self.take(x, rows) if rows.is_split else x

    def leave(self, stream: Tensor, rows: Rows) -> Tensor:
        """All rows of the stream."""
        return self._same.all_gather(stream)[: rows.num] if rows.is_split else stream

    def hand_in(self, stream: Tensor, rows: Rows) -> Tensor:
        """This rank's share of the stream."""
        return stream if rows.is_split else self.take(stream, rows)

    def take(self, x: Tensor, rows: Rows) -> Tensor:
        """This rank's share of all rows."""
        start = self._same.rank * rows.share
        return padded(x, self._same.size * rows.share)[start : start + rows.share]

    def give(self, share: Tensor, rows: Rows) -> Tensor:
        """The stream of what every rank has for its share."""
        return share if rows.is_split else self._same.all_gather(share)[: rows.num]

    def num_real(self, rows: Rows) -> int:
        """Rows of this rank's share that are not missing."""
        return min(max(rows.num - self._same.rank * rows.share, 0), rows.share)


class RowExchange:
    """The rows of a module that is split over ``group``.

    Args:
        same: the ranks that have the same rows.
        by_shares: each rank hands in its share only, also where all ranks of the group have all rows: more exchanges, and
            what is done between ``spread`` and the end is divided between them.
    """

    def __init__(self, group: AxisGroup, same: AxisGroup, *, by_shares: bool = False) -> None:
        self.group = group
        self.shares = Shares(same)
        self._meets = by_shares or group.size > same.size

    def spread(self, stream: Tensor, rows: Rows) -> Tensor:
        """The rows that all ranks of the group compute together."""
        if self.group.size == 1 or not self.meets(rows):
            return stream
        return self.group.all_gather(self.shares.hand_in(stream, rows))

    def total(self, partial: Tensor, rows: Rows) -> Tensor:
        """The stream of sums over the group of what each rank has for rows that ``spread`` gave, or the first of them."""
        if self.group.size == 1:
            return partial
        if not self.meets(rows):
            return self.group.all_reduce(partial)
        return self.shares.give(self.total_share(partial, rows), rows)

    def total_share(self, partial: Tensor, rows: Rows) -> Tensor:
        """Like ``total`` where rows are handed in by shares, and for this rank's share only."""
        return self.group.reduce_scatter(padded(partial, self.group.size * rows.share))

    def joined(self, columns: Tensor, rows: Rows) -> Tensor:
        """The stream [rows, n] of columns [rows that spread gave, n / size] that each rank has, side by side."""
        if self.group.size == 1:
            return columns
        if not self.meets(rows):
            return self.group.all_gather(columns, dim=1)
        size, share = self.group.size, rows.share
        by_rank = self.group.all_to_all(padded(columns, size * share))
        return self.shares.give(by_rank.view(size, share, columns.shape[1]).transpose(0, 1).flatten(1), rows)

    def meets(self, rows: Rows) -> bool:
        """Whether ranks hand in shares, because no rank has all rows that the group computes."""
        return self._meets or rows.is_split


def padded(x: Tensor, num_rows: int) -> Tensor:
    """``x`` with rows of zeros behind it, up to so many."""
    missing = num_rows - len(x)
    return functional.pad(x, (*[0] * (2 * x.dim() - 2), 0, missing)) if missing else x
