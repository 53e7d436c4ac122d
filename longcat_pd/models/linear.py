"""Linear maps whose weights may be shares of checkpoint tensors. Knows axes of the mesh, no layer.

Parameters are made empty and filled through WeightSpecs. No map of this family has a bias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longcat_pd.models.context import ModelContext
from longcat_pd.models.weight_spec import WeightSpec
from longcat_pd.parallel.collectives import AxisGroup


def empty_parameter(context: ModelContext, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A parameter without content, in the model's data type unless told."""
    return nn.Parameter(torch.empty(shape, dtype=dtype or context.dtype, device=context.device), requires_grad=False)


def copy_into(target: Tensor) -> Callable[[Tensor], None]:
    """A ``WeightSpec.store`` that writes to (a part of) a parameter, in the parameter's data type."""

    def store(value: Tensor) -> None:
        target.detach().copy_(value)

    return store


def share_of(size: int, group: AxisGroup) -> slice:
    """This rank's part of ``size`` equal things that are split over an axis."""
    assert size % group.size == 0, (size, group.name, group.size)
    part = size // group.size
    return slice(group.rank * part, (group.rank + 1) * part)


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor of a stacked weight: ``name`` without ``.weight``, its rows, and those that are ours."""

    name: str
    num_rows: int
    own: slice | None = None  # None: all

    @property
    def own_rows(self) -> slice:
        """The rows that this rank keeps."""
        return self.own or slice(0, self.num_rows)


class Linear(nn.Module):
    """``x W^T`` with W the stacked rows of one or more checkpoint tensors: whole (replicated) or this rank's rows (column
    parallel). The results stand side by side in the order of the pieces. Stored as [in, out] (see ``ops.LinearMap``).
    """

    def __init__(self, context: ModelContext, in_features: int, *pieces: Piece, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self._linear = context.ops.linear
        self._pieces = pieces
        self._in_features = in_features
        self.widths = [piece.own_rows.stop - piece.own_rows.start for piece in pieces]
        self.weight = empty_parameter(context, in_features, sum(self.widths), dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, sum of the pieces' own rows]."""
        return self._linear(x, self.weight)

    def weight_specs(self) -> Iterator[WeightSpec]:
        """One spec a piece."""
        for piece, target in zip(self._pieces, torch.split(self.weight, self.widths, 1), strict=True):
            yield WeightSpec(
                f"{piece.name}.weight",
                (piece.num_rows, self._in_features),
                copy_into(target.t()),
                (piece.own_rows, slice(0, self._in_features)) if piece.own else (),
            )


class RowLinear(nn.Module):
    """``x W^T`` where this rank has the input features ``own`` and the sum over ``group`` makes the result whole."""

    def __init__(self, context: ModelContext, name: str, *, shape: tuple[int, int], group: AxisGroup) -> None:
        super().__init__()
        self._linear = context.ops.linear
        self._name = name
        self._shape = shape
        self._group = group
        self._own = share_of(shape[1], group)
        self.weight = empty_parameter(context, self._own.stop - self._own.start, shape[0])

    def forward(self, x: Tensor) -> Tensor:
        """[T, own in] -> [T, out]."""
        return self._group.all_reduce(self._linear(x, self.weight))

    def weight_specs(self) -> Iterator[WeightSpec]:
        """The columns of this rank."""
        region = (slice(0, self._shape[0]), self._own) if self._group.size > 1 else ()
        yield WeightSpec(f"{self._name}.weight", self._shape, copy_into(self.weight.t()), region)


class RmsNorm(nn.Module):
    """A norm's weight; ``forward`` applies it alone, ``after`` to a sum."""

    def __init__(self, context: ModelContext, name: str, *, width: int, eps: float) -> None:
        super().__init__()
        self._ops = context.ops
        self._name = name
        self._eps = eps
        self.weight = empty_parameter(context, width)

    def forward(self, x: Tensor) -> Tensor:
        """rms(x)."""
        return self._ops.rms_norm(x, self.weight, self._eps)

    def after(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """``(x + delta, rms(x + delta))``."""
        return self._ops.add_rms_norm(x, delta, weight=self.weight, eps=self._eps)

    def weight_specs(self) -> Iterator[WeightSpec]:
        """The weight."""
        yield WeightSpec(f"{self._name}.weight", tuple(self.weight.shape), copy_into(self.weight))


class GatedMlp(nn.Module):
    """``down(silu(gate(x)) * up(x))``, whole on every rank."""

    def __init__(self, context: ModelContext, name: str, *, width: int) -> None:
        super().__init__()
        hidden = context.config.hidden_size
        self._ops = context.ops
        self.gate_up = Linear(context, hidden, Piece(f"{name}.gate_proj", width), Piece(f"{name}.up_proj", width))
        self.down = Linear(context, width, Piece(f"{name}.down_proj", hidden))

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        down: Tensor = self.down(self._ops.swiglu(self.gate_up(x)))
        return down

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Gate, up and down."""
        yield from self.gate_up.weight_specs()
        yield from self.down.weight_specs()
