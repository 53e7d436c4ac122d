"""Operators that look at their data, sealed for a compiler: each is one node of a graph, and computes what eager mode does.

A graph has one shape, which is that of the longest context; what is really there decides inside the node how much is read.
Results are those of the reference table to the bit. On devices whose kernels take lengths as tensors nothing of this is needed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from longcat_pd.kernels.ops import Ops
from longcat_pd.kernels.reference import steady_table, table

MAX_ELEMENTS = 1 << 20  # of what one call makes; as in eager mode


def sealed(ops: Ops, *, is_steady: bool) -> Ops:
    """``ops``, the reference table or its steady form, with the operators that look at their data sealed."""

    def paged_attention(
        q: Tensor,
        positions: Tensor,
        *,
        latent: Tensor,
        rope: Tensor,
        block_tables: Tensor,
        block_starts: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        return _paged_attention(q, positions, latent, rope, block_tables, block_starts, scale, is_steady)

    def sparse_attention(
        q: Tensor, keys: Tensor, *, latent: Tensor, rope: Tensor, block_tables: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        return _sparse_attention(q, keys, latent, rope, block_tables, scale, is_steady)

    def index_candidates(
        index_q: Tensor,
        weights: Tensor,
        *,
        cache: Tensor,
        block_tables: Tensor,
        block_starts: Tensor,
        high: Tensor,
        limits: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        return _index_candidates(index_q, weights, cache, block_tables, block_starts, high, *limits)

    def grouped_experts(
        x: Tensor,
        expert_ids: Tensor,
        *,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_scale: Tensor | None = None,
        down_scale: Tensor | None = None,
    ) -> Tensor:
        return _grouped_experts(x, expert_ids, weights, gate_up, down, gate_up_scale, down_scale, is_steady)

    def draw(logits: Tensor, *, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
        return _draw(logits, temperature, top_k, top_p, uniform)

    return replace(
        ops,
        linear_int8=_linear_int8,
        index_candidates=index_candidates,
        paged_attention=paged_attention,
        sparse_attention=sparse_attention,
        grouped_experts=grouped_experts,
        keyed_uniform=_keyed_uniform,
        draw=draw,
    )


def _ops(is_steady: bool) -> Ops:
    return steady_table() if is_steady else table()


def _num_columns(block_starts: Tensor, positions: Tensor) -> int:
    """Table columns that hold a key which some row can see; at least one."""
    is_seen = block_starts <= positions.amax()
    return max(int(is_seen.sum(-1).amax()), 1)


def _sequences_at_once(elements_each: int, batch: int) -> int:
    return min(max(MAX_ELEMENTS // max(elements_each, 1), 1), batch)


@torch.library.custom_op("longcat_pd::paged_attention", mutates_args=())
def _paged_attention(
    q: Tensor,
    positions: Tensor,
    latent: Tensor,
    rope: Tensor,
    block_tables: Tensor,
    block_starts: Tensor,
    scale: float,
    is_steady: bool,
) -> tuple[Tensor, Tensor]:
    attend, columns = _ops(is_steady).paged_attention, _num_columns(block_starts, positions)
    tables, starts = block_tables[:, :columns], block_starts[:, :columns]
    at_once = _sequences_at_once(columns * latent.shape[1] * (q.shape[1] * q.shape[2] + q.shape[3]), len(q))
    parts = zip(*(x.split(at_once) for x in (q, positions, tables, starts)), strict=True)
    found = [
        attend(part, where, latent=latent, rope=rope, block_tables=table, block_starts=start, scale=scale)
        for part, where, table, start in parts
    ]
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


@_paged_attention.register_fake
def _(
    q: Tensor,
    positions: Tensor,
    latent: Tensor,
    rope: Tensor,
    block_tables: Tensor,
    block_starts: Tensor,
    scale: float,
    is_steady: bool,
) -> tuple[Tensor, Tensor]:
    return _results(q, latent, is_steady)


@torch.library.custom_op("longcat_pd::sparse_attention", mutates_args=())
def _sparse_attention(
    q: Tensor, keys: Tensor, latent: Tensor, rope: Tensor, block_tables: Tensor, scale: float, is_steady: bool
) -> tuple[Tensor, Tensor]:
    attend = _ops(is_steady).sparse_attention
    at_once = _sequences_at_once(q.shape[1] * keys.shape[2] * (q.shape[2] + q.shape[3]), len(q))
    parts = zip(*(x.split(at_once) for x in (q, keys, block_tables)), strict=True)
    found = [
        attend(part, picked, latent=latent, rope=rope, block_tables=table, scale=scale) for part, picked, table in parts
    ]
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


@_sparse_attention.register_fake
def _(
    q: Tensor, keys: Tensor, latent: Tensor, rope: Tensor, block_tables: Tensor, scale: float, is_steady: bool
) -> tuple[Tensor, Tensor]:
    return _results(q, latent, is_steady)


def _results(q: Tensor, latent: Tensor, is_steady: bool) -> tuple[Tensor, Tensor]:
    sums = torch.float64 if is_steady else torch.float32
    lead = q.shape[:3]
    return q.new_empty((*lead, latent.shape[-1]), dtype=sums), q.new_empty(lead, dtype=sums)


@torch.library.custom_op("longcat_pd::index_candidates", mutates_args=())
def _index_candidates(
    index_q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    block_starts: Tensor,
    high: Tensor,
    low: int,
    budget: int,
) -> tuple[Tensor, Tensor]:
    find, columns = table().index_candidates, _num_columns(block_starts, high)
    tables, starts = block_tables[:, :columns], block_starts[:, :columns]
    at_once = _sequences_at_once(columns * cache.shape[1] * (index_q.shape[1] * index_q.shape[2] + cache.shape[2]), len(high))
    parts = zip(*(x.split(at_once) for x in (index_q, weights, tables, starts, high)), strict=True)
    found = [
        find(q, w, cache=cache, block_tables=table, block_starts=start, high=h, limits=(low, budget))
        for q, w, table, start, h in parts
    ]
    return torch.cat([scores for scores, _ in found]), torch.cat([positions for _, positions in found])


@_index_candidates.register_fake
def _(
    index_q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    block_starts: Tensor,
    high: Tensor,
    low: int,
    budget: int,
) -> tuple[Tensor, Tensor]:
    shape = (*high.shape, budget)
    return index_q.new_empty(shape, dtype=torch.float32), block_starts.new_empty(shape)


@torch.library.custom_op("longcat_pd::grouped_experts", mutates_args=())
def _grouped_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None,
    down_scale: Tensor | None,
    is_steady: bool,
) -> Tensor:
    return _ops(is_steady).grouped_experts(
        x,
        expert_ids,
        weights=weights,
        gate_up=gate_up,
        down=down,
        gate_up_scale=gate_up_scale,
        down_scale=down_scale,
    )


@_grouped_experts.register_fake
def _(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None,
    down_scale: Tensor | None,
    is_steady: bool,
) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


@torch.library.custom_op("longcat_pd::linear_int8", mutates_args=())
def _linear_int8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return table().linear_int8(x, weight, scale)


@_linear_int8.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@torch.library.custom_op("longcat_pd::draw", mutates_args=())
def _draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    return table().draw(logits, temperature=temperature, top_k=top_k, top_p=top_p, uniform=uniform)


@_draw.register_fake
def _(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    return top_k.new_empty(logits.shape[:1])


@torch.library.custom_op("longcat_pd::keyed_uniform", mutates_args=())
def _keyed_uniform(seeds: Tensor, choices: Tensor, positions: Tensor) -> Tensor:
    """Sealed for another reason: every round uses its number twice, and a compiler that writes it out never ends."""
    return table().keyed_uniform(seeds, choices, positions)


@_keyed_uniform.register_fake
def _(seeds: Tensor, choices: Tensor, positions: Tensor) -> Tensor:
    return seeds.new_empty(seeds.shape, dtype=torch.float64)
