"""Linear maps whose weights may be shares of checkpoint tensors. Knows axes of the mesh, no layer.

Parameters are made empty and filled through WeightSpecs. No map of this family has a bias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longcat_pd.errors import ConfigError
from longcat_pd.models.batch import Rows
from longcat_pd.models.context import ModelContext
from longcat_pd.models.preparing import prepared
from longcat_pd.models.rows import RowExchange
from longcat_pd.models.weight_spec import WeightSpec
from longcat_pd.parallel.collectives import AxisGroup


def empty_parameter(
    context: ModelContext, *shape: int, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> nn.Parameter:
    """A parameter without content, in the model's data type and on its device unless told."""
    made = torch.empty(shape, dtype=dtype or context.dtype, device=device or context.device)
    return nn.Parameter(made, requires_grad=False)


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


def piece_specs(piece: Piece, in_features: int, *, weight: Tensor, scale: Tensor | None = None) -> Iterator[WeightSpec]:
    """The spec of a piece's own rows [out, in], and that of their scales where they are int8."""
    name, shape = f"{piece.name}.weight", (piece.num_rows, in_features)
    region = (piece.own_rows, slice(0, in_features)) if piece.own else ()
    yield WeightSpec(name, shape, copy_into(weight), region, "float" if scale is None else "int8")
    if scale is not None:
        yield WeightSpec(f"{name}_scale", shape[:1], copy_into(scale), region[:1], "scale")


class Matrix(nn.Module):
    """The stacked rows of one or more checkpoint tensors: whole (replicated) or this rank's rows (column parallel).

    Stored as [in, out] (see ``ops.LinearMap``), in the order of the pieces.
    """

    def __init__(self, context: ModelContext, in_features: int, *pieces: Piece, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self._pieces = pieces
        self._in_features = in_features
        self.widths = [piece.own_rows.stop - piece.own_rows.start for piece in pieces]
        self.weight = empty_parameter(context, in_features, sum(self.widths), dtype=dtype)

    def weight_specs(self) -> Iterator[WeightSpec]:
        """One spec a piece."""
        for piece, target in zip(self._pieces, torch.split(self.weight, self.widths, 1), strict=True):
            yield from piece_specs(piece, self._in_features, weight=target.t())


class Linear(Matrix):
    """``x W^T`` with W a matrix. The results of the pieces stand side by side."""

    def __init__(self, context: ModelContext, in_features: int, *pieces: Piece, dtype: torch.dtype | None = None) -> None:
        super().__init__(context, in_features, *pieces, dtype=dtype)
        self._ops = context.ops

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, sum of the pieces' own rows]."""
        return self._ops.linear(x, self.weight)

    def prepare(self) -> None:
        """See Preparable."""
        self.weight = prepared(self._ops, self.weight, "linear")


class Int8Linear(nn.Module):
    """Like ``Linear``, from int8 tensors with one scale a row; stored as they are, [out, in]."""

    def __init__(self, context: ModelContext, in_features: int, *pieces: Piece) -> None:
        super().__init__()
        self._ops = context.ops
        self._pieces = pieces
        self._in_features = in_features
        self.widths = [piece.own_rows.stop - piece.own_rows.start for piece in pieces]
        self.weight = empty_parameter(context, sum(self.widths), in_features, dtype=torch.int8)
        self.scale = empty_parameter(context, sum(self.widths), dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, sum of the pieces' own rows]."""
        return self._ops.linear_int8(x, self.weight, self.scale)

    def prepare(self) -> None:
        """See Preparable."""
        self.weight = prepared(self._ops, self.weight, "linear_int8")

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Two specs a piece."""
        weights, scales = torch.split(self.weight, self.widths), torch.split(self.scale, self.widths)
        for piece, weight, scale in zip(self._pieces, weights, scales, strict=True):
            yield from piece_specs(piece, self._in_features, weight=weight, scale=scale)


def is_int8(context: ModelContext, *names: str) -> bool:
    """Whether the checkpoint stores these tensors, which are multiplied as one, in int8.

    Raises:
        ConfigError: some are int8 and some are not.
    """
    stored = [name in context.int8 for name in names]
    if any(stored) and not all(stored):
        one, other = names[stored.index(True)], names[stored.index(False)]
        text = f"checkpoint: {one} is int8 with a scale and {other} is not; they are multiplied as one and must be alike"
        raise ConfigError(text, param="model.path")
    return all(stored)


class RowLinear(nn.Module):
    """``x W^T`` where this rank has some of the input features and the sum over the group makes the result whole."""

    def __init__(self, context: ModelContext, name: str, *, shape: tuple[int, int], exchange: RowExchange) -> None:
        super().__init__()
        self._ops = context.ops
        self._name = name
        self._shape = shape
        self._exchange = exchange
        self._own = share_of(shape[1], exchange.group)
        self.weight = empty_parameter(context, self._own.stop - self._own.start, shape[0])

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """[rows that were spread, own in] -> the stream [T, out]."""
        return self._exchange.total(self._ops.linear(x, self.weight), rows)

    def prepare(self) -> None:
        """See Preparable."""
        self.weight = prepared(self._ops, self.weight, "linear")

    def weight_specs(self) -> Iterator[WeightSpec]:
        """The columns of this rank."""
        region = (slice(0, self._shape[0]), self._own) if self._exchange.group.size > 1 else ()
        yield WeightSpec(f"{self._name}.weight", self._shape, copy_into(self.weight.t()), region)


class GatheringLinear(nn.Module):
    """Like ``RowLinear``, but to the last bit what one rank gives: the ranks gather the input features instead of adding.

    Each rank has some rows of W and all columns. One more exchange than ``RowLinear``.
    """

    def __init__(self, context: ModelContext, name: str, *, shape: tuple[int, int], exchange: RowExchange) -> None:
        super().__init__()
        self._exchange = exchange
        own = share_of(shape[0], exchange.group) if exchange.group.size > 1 else None
        self.linear = _linear(context, shape[1], Piece(name, shape[0], own))

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """[rows that were spread, own in] -> the stream [T, out]."""
        return self._exchange.joined(self.linear(self._exchange.group.all_gather(x, dim=1)), rows)

    def weight_specs(self) -> Iterator[WeightSpec]:
        """The rows of this rank."""
        yield from self.linear.weight_specs()


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


def summing_linear(
    context: ModelContext, name: str, *, shape: tuple[int, int], exchange: RowExchange
) -> RowLinear | GatheringLinear:
    """A map whose input features are spread over a group.

    Where int8 products follow, a last bit that depends on the number of ranks can become a whole step; and where it is one
    itself, a row is quantised over its whole width.
    """
    kind = GatheringLinear if context.int8 else RowLinear
    return kind(context, name, shape=shape, exchange=exchange)


def _linear(context: ModelContext, in_features: int, *pieces: Piece) -> Linear | Int8Linear:
    """A map that takes its weights as they are stored."""
    if is_int8(context, *(piece.name for piece in pieces)):
        return Int8Linear(context, in_features, *pieces)
    return Linear(context, in_features, *pieces)


class GatedMlp(nn.Module):
    """``down(silu(gate(x)) * up(x))``, its inner width split over ``dense_tp``."""

    def __init__(self, context: ModelContext, name: str, *, width: int) -> None:
        super().__init__()
        hidden, mesh = context.config.hidden_size, context.mesh
        self._ops = context.ops
        self._exchange = RowExchange(mesh.axis("dense_tp"), mesh.axis("attn_tp"))
        group = self._exchange.group
        own = share_of(width, group) if group.size > 1 else None
        gate, up = (Piece(f"{name}.{part}_proj", width, own) for part in ("gate", "up"))
        self.gate_up = _linear(context, hidden, gate, up)
        self.down = summing_linear(context, f"{name}.down_proj", shape=(hidden, width), exchange=self._exchange)

    def forward(self, x: Tensor, rows: Rows, *, then: Sequence[Tensor] = ()) -> Tensor:
        """[T, hidden] -> [T, hidden], both the stream. ``then``: weights that are needed behind it."""
        both = self.gate_up(self._exchange.spread(x, rows))
        self._ops.prefetch(then, both)
        down: Tensor = self.down(self._ops.swiglu(both), rows)
        return down

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Gate, up and down."""
        yield from self.gate_up.weight_specs()
        yield from self.down.weight_specs()
