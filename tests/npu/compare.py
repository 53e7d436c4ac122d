"""How near the result of a card has to be to that of a CPU kernel, one rule for each output.

A rule knows which rows are defined; others may hold anything and are not looked at. ``damaged`` makes results that the
rule has to notice, so that a test of a card cannot pass by comparing nothing. Knows no operator and no device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Arguments = Mapping[str, Any]
BF16 = 2**-7  # two units in the last place
COARSE = 2  # times the tolerance is the most that an outlier may be away


class Rule(Protocol):
    def check(self, found: Tensor, wanted: Tensor, arguments: Arguments) -> None:
        """AssertionError where they differ more than the device may."""

    def damaged(self, wanted: Tensor, arguments: Arguments) -> Iterator[tuple[str, Tensor]]:
        """What was done to a result, and what became of it."""

    def check_defined(self, wanted: Tensor) -> None:
        """AssertionError where the CPU kernel leaves garbage in what is compared."""


@dataclass(frozen=True)
class Opaque:
    """Not compared: nobody but the device reads it, or the call does not ask for it."""

    def check(self, found: Tensor, wanted: Tensor, arguments: Arguments) -> None:
        pass

    def damaged(self, wanted: Tensor, arguments: Arguments) -> Iterator[tuple[str, Tensor]]:
        yield from ()

    def check_defined(self, wanted: Tensor) -> None:
        pass


@dataclass(frozen=True)
class Close:
    """Floats within ``rtol`` of the value and ``floor * rtol`` of the row's size; ``rows``: how many are defined.

    A share of ``outliers`` may be ``COARSE`` times as far away.
    """

    rtol: float = BF16
    floor: float = 1.0
    rows: int | None = None
    outliers: float = 0.0

    def check(self, found: Tensor, wanted: Tensor, arguments: Arguments) -> None:
        _check_kind(found, wanted)
        found, wanted = found[: self.rows].double(), wanted[: self.rows].double()
        size = wanted.square().mean(-1, keepdim=True).sqrt() if self.floor else torch.zeros(())
        allowed = self.rtol * (wanted.abs() + self.floor * size)
        away = (found - wanted).abs()
        is_far = ~(away <= allowed)  # NaN is far
        worst = float((away / allowed.clamp(min=1e-300)).nan_to_num(torch.inf).max())
        share = float(is_far.double().mean())
        assert share <= self.outliers, f"{share:.2%} of the elements are beyond the tolerance, the worst {worst:.3g} times"
        assert worst <= COARSE or share == 0, f"an element is {worst:.3g} times the tolerance away"

    def damaged(self, wanted: Tensor, arguments: Arguments) -> Iterator[tuple[str, Tensor]]:
        bad = _copy(wanted)
        part = bad[: self.rows]
        place = int(part.abs().argmax())
        part.view(-1)[place] *= 1.05
        yield "an element is 5 % larger", bad
        bad = _copy(wanted)
        bad[: self.rows] *= 2
        yield "a factor is missing", bad
        bad = _copy(wanted)
        bad[: self.rows].view(-1)[place] = torch.nan
        yield "an element is NaN", bad
        yield from _swapped(wanted, self.rows)

    def check_defined(self, wanted: Tensor) -> None:
        part = wanted[: self.rows]
        assert part.numel() and part.isfinite().all() and part.abs().max() < 1e6


@dataclass(frozen=True)
class Int8:
    """Quantised values; the last step of rounding is the device's own."""

    rows: int | None = None
    within: int = 1

    def check(self, found: Tensor, wanted: Tensor, arguments: Arguments) -> None:
        _check_kind(found, wanted)
        away = (found[: self.rows].int() - wanted[: self.rows].int()).abs()
        assert int(away.max()) <= self.within, f"an element is {int(away.max())} steps away"

    def damaged(self, wanted: Tensor, arguments: Arguments) -> Iterator[tuple[str, Tensor]]:
        bad = _copy(wanted)
        part = bad[: self.rows].view(-1)
        place = int(part.int().abs().argmax())
        part[place] -= 6 * int(part[place].sign())
        yield "an element is 5 % smaller", bad
        bad = _copy(wanted)
        bad[: self.rows] //= 2
        yield "a factor is missing", bad
        yield from _swapped(wanted, self.rows)

    def check_defined(self, wanted: Tensor) -> None:
        part = wanted[: self.rows]
        assert part.dtype == torch.int8 and part.numel() and part.int().abs().amax(-1).min() > 100


@dataclass(frozen=True)
class Exact:
    """Whole numbers, or values that are only moved."""

    rows: int | None = None

    def check(self, found: Tensor, wanted: Tensor, arguments: Arguments) -> None:
        _check_kind(found, wanted)
        assert torch.equal(found[: self.rows], wanted[: self.rows]), "the values differ"

    def damaged(self, wanted: Tensor, arguments: Arguments) -> Iterator[tuple[str, Tensor]]:
        bad = _copy(wanted)
        part = bad[: self.rows].view(-1)
        place = int(part.abs().argmax())  # where one step is lost in no type
        part[place] = part[place] * 1.05 if part.is_floating_point() else part[place] - 1
        yield "an element differs", bad
        yield from _swapped(wanted, self.rows)

    def check_defined(self, wanted: Tensor) -> None:
        part = wanted[: self.rows]
        assert part.numel() and part.double().isfinite().all() and part.double().abs().max() < 1e6


@dataclass(frozen=True)
class Positions:
    """The best positions of each row in any order, -1 behind them; which of near ties are taken is the device's choice.

    ``scores(arguments)`` [rows, keys] is -inf for what a row does not see.
    """

    scores: Callable[[Arguments], Tensor]
    near: float = BF16

    def check(self, found: Tensor, wanted: Tensor, arguments: Arguments) -> None:
        _check_kind(found, wanted)
        scores, count = self.scores(arguments), found.shape[-1]
        for row, (picked, score) in enumerate(zip(found.flatten(0, -2).long(), scores, strict=True)):
            num_seen = int((score > -torch.inf).sum())
            num_best = min(count, num_seen)
            best, rest = picked[:num_best], picked[num_best:]
            assert bool((rest == -1).all()), f"row {row}: {num_best} positions and then -1 are expected"
            assert len(best.unique()) == num_best, f"row {row}: a position is listed twice"
            is_there = (best >= 0) & (best < len(score))
            assert bool(is_there.all()), f"row {row}: positions {best[~is_there].tolist()} do not exist"
            taken = score[best]
            assert bool((taken > -torch.inf).all()), f"row {row}: a position is listed that the row does not see"
            if num_best < num_seen:
                lowest = score.topk(num_best).values[-1]
                slack = self.near * float(score[score > -torch.inf].abs().max())
                assert float(taken.min()) >= lowest - slack, f"row {row}: a position is listed that is not among the best"
                left_out = torch.ones_like(score, dtype=torch.bool)
                left_out[best] = False
                assert not bool((score[left_out] > lowest + slack).any()), f"row {row}: one of the best is missing"

    def damaged(self, wanted: Tensor, arguments: Arguments) -> Iterator[tuple[str, Tensor]]:
        scores = self.scores(arguments)
        flat = wanted.flatten(0, -2)
        row = int((flat >= 0).sum(-1).argmax())
        worst = int(torch.where(scores[row] > -torch.inf, scores[row], torch.inf).argmin())
        if worst not in flat[row].tolist():
            bad = flat.clone()
            bad[row, 0] = worst
            yield "a bad position", bad.view(wanted.shape)
        bad = flat.clone()
        bad[row, 0] = bad[row, 1]
        yield "a position twice", bad.view(wanted.shape)
        bad = flat.clone()
        bad[row, 0] = -1
        yield "a position is missing", bad.view(wanted.shape)
        yield from _swapped(wanted, None)

    def check_defined(self, wanted: Tensor) -> None:
        assert wanted.numel() and wanted.min() >= -1


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _check_kind(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype, f"the type is {found.dtype}, not {wanted.dtype}"
    assert found.shape == wanted.shape, f"the shape is {tuple(found.shape)}, not {tuple(wanted.shape)}"


def _swapped(wanted: Tensor, rows: int | None) -> Iterator[tuple[str, Tensor]]:
    """The first two slices that differ, along the first dimension that has two."""
    part = wanted[:rows]
    for dim, size in enumerate(part.shape):
        for other in range(1, size):
            if not torch.equal(part.select(dim, 0), part.select(dim, other)):
                bad = _copy(wanted)
                bad[:rows].select(dim, 0).copy_(part.select(dim, other))
                bad[:rows].select(dim, other).copy_(part.select(dim, 0))
                yield "two rows are swapped", bad
                return
