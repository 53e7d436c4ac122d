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

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

MAX_ELEMENTS = 1 << 20  # of what one call should make: 4 MiB in fp32; more leaves the caches and was slower

A = TypeVar("A")
B = TypeVar("B")


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


class Rope(Protocol):
    """Turns pairs of the last dimension of ``x`` [T, R] or [T, H, R] by ``rotation`` [2, T, R / 2, 2], fp32.

    ``rotation[0]`` is (cos, cos) of each pair, ``rotation[1]`` is (-sin, sin): pair times the first plus swapped pair times
    the second.
    Pairs are (2 i, 2 i + 1) if ``is_interleaved``, else (i, i + R / 2); they stay where they are. Computed in fp32.
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


class MlaProlog(Protocol):
    """All of a latent attention that comes before its keys are looked at.

    ``x`` [T, hidden] goes down to query latents, latents and rope parts of keys. Latents, normed and times ``kv_scale``,
    and rope parts, turned, go to ``slots`` of ``cache`` = (latents, rope parts), see Store. Query latents are normed and go
    up to heads, whose nope parts are absorbed by ``key_up`` and whose rope parts are turned. ``rotation`` is that of Rope,
    pairs interleaved; norms as RmsNorm. -> queries of the latents [T, H, C + R], and the normed query latents [T, q_rank].
    """

    def __call__(
        self,
        x: Tensor,
        rotation: Tensor,
        *,
        weights: PrologWeights,
        slots: Tensor,
        cache: tuple[Tensor, Tensor],
        eps: float,
        kv_scale: float,
    ) -> tuple[Tensor, Tensor]: ...


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


class NgramIds(Protocol):
    """Row numbers of the n-gram tables, [T, tables].

    ``windows`` [T, N]: the row's own token, the one before it, ...; -1 before the start. The look-back ends before an EOS
    (``eos`` [n]) other than the row's own token, before an ignored id (``ignored`` [n, 2], half-open ranges; the own token
    counts too) and at -1. ``powers`` [tables, N] and ``moduli`` [tables]; everything int64.
    """

    def __call__(self, windows: Tensor, *, powers: Tensor, moduli: Tensor, eos: Tensor, ignored: Tensor) -> Tensor: ...


class KeyedUniform(Protocol):
    """One number in [0, 1) for each key, [T] fp64: a counter-based hash (splitmix64's finaliser) of three int64 [T].

    A seeded text is made of these numbers, so every device gives the same ones, to the bit.
    """

    def __call__(self, seeds: Tensor, choices: Tensor, positions: Tensor) -> Tensor: ...


class Draw(Protocol):
    """One token for each row of ``logits`` [T, V] fp32 -> ids [T] int64. Everything else is [T]; fp64, ``top_k`` int64.

    ``temperature`` 0 takes the arg-max, the lowest id of equal ones. Else the softmax at that temperature, in fp64, is cut:
    to the ``top_k`` best, equal ones by lower id (0: all); then to the shortest run of the best whose sum reaches ``top_p``
    of what is left (1: all); and then to those of at least ``exp(floor)`` times the best (-inf: all). Of the rest, in the
    order of ids, the first whose sum exceeds ``uniform`` times all.
    """

    def __call__(
        self, logits: Tensor, *, temperature: Tensor, top_k: Tensor, top_p: Tensor, floor: Tensor, uniform: Tensor
    ) -> Tensor: ...


IN_PROMPT, ENDS = 1, 2  # bits of ``Edits.flags``


class Edits(NamedTuple):
    """What changes the logits of T rows before they are drawn from. Tables have a row for each of S sequences.

    Tables: ``counts`` [S, V] int32, how often each id was generated; ``flags`` [S, V] uint8, IN_PROMPT for ids that the
    prompt has and ENDS for those that end an answer; ``bias_ids`` [S, N] int64 and ``bias`` [S, N] fp32, what is added to
    which id, 0 where there is nothing.

    Rows: ``seqs`` [T], the sequence; ``drafts`` [T, D], ids that stand between what is counted and the row, -1 for none;
    ``is_early`` [T] bool, whether the answer may not end yet; ``frequency``, ``presence`` and ``repetition`` [T] fp64;
    ``masks`` [T, words] int32, a bit for each id that may be drawn, the lowest first, and ``is_bound`` [T] bool, whether
    the row's mask counts.
    """

    counts: Tensor
    flags: Tensor
    bias_ids: Tensor
    bias: Tensor
    seqs: Tensor
    drafts: Tensor
    is_early: Tensor
    frequency: Tensor
    presence: Tensor
    repetition: Tensor
    masks: Tensor
    is_bound: Tensor


class DrawEdited(Protocol):
    """Draw from logits that were changed, in fp64 and rounded once: bias, then penalties, then masks.

    ``repetition`` divides positive and multiplies other logits of ids that the prompt or the answer has, up to the row and
    with its drafts. Then ``frequency`` for each time that the answer has the id, and ``presence`` if it does, are
    subtracted. An id that ENDS is not drawn while ``is_early``, and none that the mask of a bound row lacks; where both
    leave nothing, the mask alone counts. ``logits`` stay as they are; rows without any of this cost what Draw costs.
    """

    def __call__(
        self,
        logits: Tensor,
        edits: Edits,
        *,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        floor: Tensor,
        uniform: Tensor,
    ) -> Tensor: ...


class Overlap(Protocol):
    """Results of two functions that do not depend on each other; a device may run ``side`` beside ``main``."""

    def __call__(self, side: Callable[[], A], main: Callable[[], B]) -> tuple[A, B]: ...


@dataclass(frozen=True)
class Ops:
    """One function per operator. A backend is the reference table with entries replaced."""

    rms_norm: RmsNorm
    add_rms_norm: AddRmsNorm
    layer_norm: LayerNorm
    swiglu: Swiglu
    linear: LinearMap
    linear_int8: LinearInt8
    head_linear: HeadLinear
    rope: Rope
    store: Store
    mla_prolog: MlaProlog
    select_positions: SelectPositions
    index_candidates: IndexCandidates
    paged_attention: PagedAttention
    sparse_attention: SparseAttention
    merge_partials: MergePartials
    route_topk: RouteTopk
    grouped_experts: GroupedExperts
    ngram_ids: NgramIds
    keyed_uniform: KeyedUniform
    draw: Draw
    draw_edited: DrawEdited
    overlap: Overlap
