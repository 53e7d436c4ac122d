"""Collectives that a rank may be told not to enter (``faults.py``). The others of its group wait for it, or go astray.

What a rank goes on with in place of what it skipped has the right shape and the wrong numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from longcat_pd.faults import Switches, stand_still
from longcat_pd.parallel.collectives import Collectives


class FaultyCollectives:
    """``Collectives`` of a group of ``size`` ranks in front of others."""

    def __init__(self, inner: Collectives, size: int, switches: Switches) -> None:
        self._inner = inner
        self._size = size
        self._switches = switches

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tensor in place of all."""
        return x.expand(self._size, *x.shape) if self._is_skipped() else self._inner.gather(x)

    def swap(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """What this rank would have sent in place of what comes."""
        return torch.stack(x.chunk(self._size, dim)) if self._is_skipped() else self._inner.swap(x, dim)

    def swap_rows(self, x: torch.Tensor, out: Sequence[int], into: Sequence[int]) -> torch.Tensor:
        """Zeros in place of what comes."""
        return x.new_zeros(sum(into), *x.shape[1:]) if self._is_skipped() else self._inner.swap_rows(x, out, into)

    def sum_parts(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of its own."""
        return x.chunk(self._size, dim)[0] if self._is_skipped() else self._inner.sum_parts(x, dim)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's own."""
        return x.clone() if self._is_skipped() else self._inner.sum(x)

    def warm_up(self) -> None:
        """As it is."""
        self._inner.warm_up()

    def leave(self) -> None:
        """As it is."""
        self._inner.leave()

    def _is_skipped(self) -> bool:
        if self._switches.strike("endless_collective") is not None:
            stand_still(math.inf)
        return self._switches.strike("skip_collective") is not None
