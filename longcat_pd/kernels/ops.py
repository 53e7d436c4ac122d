"""Ops: the table of operators that a device fills in, with the signature and meaning that every device keeps.

An operator is a function of tensors and plain numbers. It returns tensors, or writes into the cache tensor that is its
explicit argument and nowhere else. Knows no model, no request and no other rank. In the reference table a row's result does
not depend, to the bit, on the rows beside it; a device may round differently for different shapes.

Letters: T rows; B sequences with Q rows each (T = B Q); H heads; C latent and R rope width; I index heads; D index head
width; N blocks of ``block_size`` tokens in a cache; M columns of a block table; S = M * block_size *visible keys*; K picked
keys. Visible key ``k`` of a sequence is token ``k % block_size`` of the block in column ``k // block_size``; its position
is ``block_starts[k // block_size] + k % block_size``. Columns that hold nothing start above every position.
"""

# ruff: noqa: D102  (each operator is a class with one call, and the class says what it means)
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from longcat_pd.kernels.drawing_ops import Draw, DrawEdited, KeyedUniform
from longcat_pd.kernels.expert_ops import ExpertRows, GroupedExperts, MoeCombine, MoeDispatch, RouteTopk

MAX_ELEMENTS = 1 << 20  # of what one call should make: 4 MiB in fp32; more leaves the caches and was slower

A = TypeVar("A")
B = TypeVar("B")
WeightKind = Literal["linear", "linear_int8", "heads", "experts", "experts_int8", "experts_scale"]


class Prepare(Protocol):
    """A weight as the operators of the same table want it; called once, when it is loaded. May be the weight itself.

    Kinds, as they are loaded: linear [in, out] (see LinearMap), linear_int8 [out, in] int8, heads [H, in, out], experts
    [E, in, out], experts_int8 [E, out, in] int8, experts_scale [E, out] fp32. What operators say of the shape of a weight
    is that of the loaded one.
    """

    def __call__(self, weight: Tensor, kind: WeightKind) -> Tensor: ...


class RmsNorm(Protocol):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension, statistics in fp32, result in the type of ``x``."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...


class AddRmsNorm(Protocol):
    """``(x + delta, rms_norm(x + delta))``."""

    def __call__(self, x: Tensor, delta: Tensor, *, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...


class LayerNorm(Protocol):
    """Mean and variance normalisation over the last dimension with weight and bias, statistics in fp32."""

    def __call__(self, x: Tensor, weight: Tensor, *, bias: Tensor, eps: float) -> Tensor: ...


class Swiglu(Protocol):
    """``silu(x[..., :n]) * x[..., n:]`` for ``x`` of width 2 n."""

    def __call__(self, x: Tensor) -> Tensor: ...


class LinearMap(Protocol):
    """``x W``: [T, in] and ``weight`` [in, out] -> [T, out] in the type of ``x``, added in fp32."""

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor: ...


class LinearInt8(Protocol):
    """``x W^T``: [T, in], ``weight`` int8 [out, in] and ``scale`` fp32 [out] -> [T, out] in the type of ``x``.

    ``x`` is quantised row by row: ``s = max|x| / 127``, ``q = round(x / s)``, half to even. The result is ``q W^T``, added
    in int32 and exact, times ``s`` and then times ``scale``, in fp32.
    """

    def __call__(self, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor: ...


class HeadLinear(Protocol):
    """One map for each head: [T, H, in] and ``weight`` [H, in, out] -> [T, H, out]."""

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor: ...


class PrepareRotation(Protocol):
    """What Rotation of the same table reads angles from, made once: of ``frequencies`` [R / 2] fp64 and ``magnitude``.

    ``dtype``: the type of what will be turned.
    """

    def __call__(self, frequencies: Tensor, *, magnitude: float, dtype: torch.dtype) -> Tensor: ...


class Rotation(Protocol):
    """The rotations of ``positions`` [T], by position times frequency and times magnitude, as Rope of the same table wants
    them: made once a step for all layers. ``prepared``: what PrepareRotation made.

    In the reference table: [2, T, R / 2, 2] fp32, where ``rotation[0]`` is (cos, cos) of each pair and ``rotation[1]`` is
    (-sin, sin).
    """

    def __call__(self, positions: Tensor, prepared: Tensor) -> Tensor: ...


class Rope(Protocol):
    """Turns pairs of the last dimension of ``x`` [T, R] or [T, H, R] by what Rotation of the same table made.

    A pair (a, b) becomes (a cos - b sin, b cos + a sin). Pairs are (2 i, 2 i + 1) if ``is_interleaved``, else
    (i, i + R / 2); they stay where they are. Computed in fp32 in the reference table.
    """

    def __call__(self, x: Tensor, rotation: Tensor, *, is_interleaved: bool) -> Tensor: ...


class Store(Protocol):
    """Writes ``values`` [T, width] to the slots (block * block_size + offset) [T] of ``cache`` [N, block_size, width]."""

    def __call__(self, cache: Tensor, slots: Tensor, values: Tensor) -> None: ...


class PrologWeights(NamedTuple):
    """The matrices of an attention's front, [in, out], with H the heads that are computed, and its two norms.

    ``down`` [hidden, q_rank + C + R]: queries, latents and rope parts of keys under each other in one matrix; ``q_up``
    [q_rank, H (nope + R)], head by head; ``key_up`` [H, nope, C]; ``q_norm`` [q_rank], ``kv_norm`` [C].
    """

    down: Tensor
    q_norm: Tensor
    q_up: Tensor
    key_up: Tensor
    kv_norm: Tensor


class PrologScales(NamedTuple):
    """Numbers of an attention's front: ``eps`` of both norms; latents are multiplied by ``kv`` before they are stored."""

    eps: float
    kv: float


class PrepareProlog(Protocol):
    """The weights as MlaProlog and MlaStore of the same table want them, once, when they are loaded. May be themselves.

    ``scales``: those that all calls with these weights will have.
    """

    def __call__(self, weights: PrologWeights, scales: PrologScales) -> tuple[Tensor, ...]: ...


class MlaProlog(Protocol):
    """All of a latent attention that comes before its keys are looked at.

    ``x`` [T, hidden] goes down to query latents, latents and rope parts of keys. Latents, normed and times ``scales.kv``,
    and rope parts, turned, go to ``slots`` (see Store) of ``cache`` = (latents, rope parts), [N, block_size, 1, width].
    Query latents are normed and go up to heads, whose nope parts are absorbed by ``key_up`` and whose rope parts are
    turned. ``rotation``: see Rope, pairs interleaved (in the cache and in the queries a table may keep them in another
    order, the same in both); norms as RmsNorm; ``weights``: what PrepareProlog made. -> queries of the latents
    [T, H, C + R], and the normed query latents [T, q_rank].
    """

    def __call__(
        self,
        x: Tensor,
        rotation: Tensor,
        *,
        weights: tuple[Tensor, ...],
        slots: Tensor,
        cache: tuple[Tensor, Tensor],
        scales: PrologScales,
    ) -> tuple[Tensor, Tensor]: ...


class MlaStore(Protocol):
    """The part of MlaProlog that writes the cache, for rows that attend to nothing."""

    def __call__(
        self,
        x: Tensor,
        rotation: Tensor,
        *,
        weights: tuple[Tensor, ...],
        slots: Tensor,
        cache: tuple[Tensor, Tensor],
        scales: PrologScales,
    ) -> None: ...


class SelectPositions(Protocol):
    """The ``budget`` best of the keys with ``low <= position < high``; equal scores go to the smaller position.

    ``scores`` [T, S] fp32, ``positions`` [T, S] below 2^31, ``high`` [T] -> (scores, positions), both [T, budget], in no
    defined order; where fewer keys are eligible the rest is (-inf, -1).
    """

    def __call__(
        self, scores: Tensor, positions: Tensor, *, low: int, high: Tensor, budget: int
    ) -> tuple[Tensor, Tensor]: ...


class IndexCandidates(Protocol):
    """The visible keys with the best scores among the positions ``low ... high - 1`` of each row (see SelectPositions).

    The score of key s is ``sum_i weights[b, q, i] * max(0, <index_q[b, q, i], key s>)`` in fp32. ``index_q`` [B, Q, I, D],
    ``weights`` [B, Q, I] fp32, ``cache`` [N, block_size, D], ``block_tables`` and ``block_starts`` [B, M], ``high`` [B, Q],
    ``limits`` (low, budget) -> (scores, positions), both [B, Q, budget].
    """

    def __call__(
        self,
        index_q: Tensor,
        weights: Tensor,
        *,
        cache: Tensor,
        block_tables: Tensor,
        block_starts: Tensor,
        high: Tensor,
        limits: tuple[int, int],
    ) -> tuple[Tensor, Tensor]: ...


class PagedAttention(Protocol):
    """Attention of latent queries to all visible keys up to each row's own position.

    ``q`` [B, Q, H, C + R], ``positions`` [B, Q], ``latent`` [N, block_size, C], ``rope`` [N, block_size, R],
    ``block_tables`` and ``block_starts`` [B, M] -> the weighted sum of latents [B, Q, H, C] and the log-sum-exp of the
    scaled scores [B, Q, H], both fp32 (fp64 in a steady table). A row that sees no key gives 0 and -inf.
    """

    def __call__(
        self,
        q: Tensor,
        positions: Tensor,
        *,
        latent: Tensor,
        rope: Tensor,
        block_tables: Tensor,
        block_starts: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]: ...


class SparseAttention(Protocol):
    """Like PagedAttention over the picked visible keys only: ``keys`` [B, Q, K], distinct, -1 for none."""

    def __call__(
        self, q: Tensor, keys: Tensor, *, latent: Tensor, rope: Tensor, block_tables: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]: ...


class MergePartials(Protocol):
    """One attention from partial ones over disjoint keys: ``outs`` [P, T, H, C] and ``lses`` [P, T, H] -> [T, H, C], fp32.

    Parts with log-sum-exp -inf weigh nothing; a row without any key gives 0.
    """

    def __call__(self, outs: Tensor, lses: Tensor) -> Tensor: ...


class NgramIds(Protocol):
    """Row numbers of the n-gram tables, [T, tables].

    ``windows`` [T, N]: the row's own token, the one before it, ...; -1 before the start. The look-back ends before an EOS
    (``eos`` [n]) other than the row's own token, before an ignored id (``ignored`` [n, 2], half-open ranges; the own token
    counts too) and at -1. ``powers`` [tables, N] and ``moduli`` [tables]; everything int64.
    """

    def __call__(self, windows: Tensor, *, powers: Tensor, moduli: Tensor, eos: Tensor, ignored: Tensor) -> Tensor: ...


class Overlap(Protocol):
    """Results of two functions that do not depend on each other; a device may run ``side`` beside ``main``."""

    def __call__(self, side: Callable[[], A], main: Callable[[], B]) -> tuple[A, B]: ...


class Prefetch(Protocol):
    """These weights will be needed soon behind ``after``, which is being computed: a device may bring them nearer."""

    def __call__(self, weights: Sequence[Tensor], after: Tensor) -> None: ...


@dataclass(frozen=True)
class Ops:
    """One function per operator. A backend is the reference table with entries replaced.

    ``moe_dispatch`` and ``moe_combine`` are a pair; None: the table has none. ``tile_elements``: what one call should make
    at most (see ``models/tiles.py``). ``exact``: the type of small sums whose order must not show.
    """

    prepare: Prepare
    rms_norm: RmsNorm
    add_rms_norm: AddRmsNorm
    layer_norm: LayerNorm
    swiglu: Swiglu
    linear: LinearMap
    linear_int8: LinearInt8
    head_linear: HeadLinear
    prepare_rotation: PrepareRotation
    rotation: Rotation
    rope: Rope
    store: Store
    prepare_prolog: PrepareProlog
    mla_prolog: MlaProlog
    mla_store: MlaStore
    select_positions: SelectPositions
    index_candidates: IndexCandidates
    paged_attention: PagedAttention
    sparse_attention: SparseAttention
    merge_partials: MergePartials
    route_topk: RouteTopk
    grouped_experts: GroupedExperts
    expert_rows: ExpertRows
    ngram_ids: NgramIds
    keyed_uniform: KeyedUniform
    draw: Draw
    draw_edited: DrawEdited
    overlap: Overlap
    prefetch: Prefetch
    moe_dispatch: MoeDispatch | None = None
    moe_combine: MoeCombine | None = None
    tile_elements: int = MAX_ELEMENTS
    exact: torch.dtype = torch.float64
