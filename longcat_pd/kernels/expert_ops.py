"""The part of the table of operators that is about experts. Letters as in ``ops.py``; E experts of this rank.

Experts lie as ``Prepare`` of the same table made them: floats, or int8 with one scale for each output.
"""

# ruff: noqa: D102  (each operator is a class with one call, and the class says what it means)
from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class RouteTopk(Protocol):
    """The experts of every row: top-k of softmax(``logits``) + ``bias``, weighted by the softmax without the bias.

    ``logits`` [T, E] fp32, ``bias`` [E] fp32 -> expert ids [T, topk] and weights [T, topk] fp32, times ``factor``,
    renormalised to sum 1 before that if ``is_normalized``.
    """

    def __call__(
        self, logits: Tensor, bias: Tensor, *, topk: int, factor: float, is_normalized: bool
    ) -> tuple[Tensor, Tensor]: ...


class GroupedExperts(Protocol):
    """``sum_k weights[t, k] * expert(x[t])`` over the chosen experts below E; higher ids contribute nothing.

    ``x`` [T, hidden], ``expert_ids`` and ``weights`` [T, topk], ``gate_up`` [E, hidden, 2 f], ``down`` [E, f, hidden]
    -> [T, hidden] fp32 (fp64 in a steady table). Where one comes with a scale, [E, 2 f] or [E, hidden] fp32, it is int8 and
    lies as ``LinearInt8`` wants it, [E, 2 f, hidden] or [E, hidden, f].
    """

    def __call__(
        self,
        x: Tensor,
        expert_ids: Tensor,
        *,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_scale: Tensor | None = None,
        down_scale: Tensor | None = None,
    ) -> Tensor: ...


class ExpertRows(Protocol):
    """Experts over rows that are in their order: the first ``counts[0]`` rows are expert 0's, the next expert 1's, ...

    ``x`` [A, hidden] in the model's type, or int8 with ``row_scale`` [A] fp32; ``counts`` [E] int64; matrices as in
    GroupedExperts -> [A, hidden] in the model's type. Rows behind the sum of ``counts`` hold anything.
    """

    def __call__(
        self,
        x: Tensor,
        counts: Tensor,
        *,
        row_scale: Tensor | None,
        gate_up: Tensor,
        down: Tensor,
        gate_up_scale: Tensor | None = None,
        down_scale: Tensor | None = None,
    ) -> Tensor: ...


class ExpertGroup(NamedTuple):
    """The ranks whose experts rows go to.

    ``communicator``: what the device calls the group, which nothing else may use; this is ``rank`` of ``size``. Ids below
    ``num_experts`` are experts with weights, dealt in runs; the ``num_copies`` ids behind them give their input.
    """

    communicator: str
    size: int
    rank: int
    num_experts: int
    num_copies: int


class Sent(NamedTuple):
    """What came to the experts of this rank, see ExpertRows, and what the way back needs to know."""

    x: Tensor
    row_scale: Tensor | None
    counts: Tensor
    handle: tuple[Tensor, ...]


class MoeDispatch(Protocol):
    """Rows to the ranks of their experts in one operator, of fixed shape. A collective of the group.

    ``x`` [T, hidden], ``expert_ids`` [T, topk] distinct in a row, ``weights`` [T, topk] fp32. ``is_real`` [T] bool: the
    others travel nowhere; None: all are. ``is_int8``: rows are quantised as ``LinearInt8`` does it, before they travel.
    """

    def __call__(
        self,
        x: Tensor,
        expert_ids: Tensor,
        *,
        weights: Tensor,
        is_real: Tensor | None,
        group: ExpertGroup,
        is_int8: bool,
    ) -> Sent: ...


class MoeCombine(Protocol):
    """The way back of MoeDispatch: weighted sums over all ids of every row, copies included, [T, hidden] in ``y``'s type.

    ``y`` [A, hidden]: what the experts made of ``sent``; everything else is what MoeDispatch was given. Rows that are not
    real give anything.
    """

    def __call__(
        self,
        y: Tensor,
        sent: Sent,
        *,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        is_real: Tensor | None,
        group: ExpertGroup,
    ) -> Tensor: ...
