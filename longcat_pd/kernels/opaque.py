"""Operators that look at their data, sealed for a compiler: each is one node of a graph, and computes what eager mode does.

A graph has one shape, which is that of the longest context; what is really there decides inside the node how much is read.
Results are those of the reference table to the bit. Devices whose kernels take lengths as tensors need nothing of this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from longcat_pd.kernels.drawing_ops import Edits
from longcat_pd.kernels.node import node
from longcat_pd.kernels.ops import MAX_ELEMENTS, Ops
from longcat_pd.kernels.reference import steady_table, table
from longcat_pd.kernels.unfused import unfused as with_twins

Pair = tuple[Tensor, Tensor]

_STEADY = "steady"


class _Keys(NamedTuple):
    """The visible keys of a paged attention; operators take them as one list."""

    latent: Tensor
    rope: Tensor
    block_tables: Tensor


def sealed(ops: Ops, *, is_steady: bool, unfused: Collection[str] = ()) -> Ops:
    """``ops``, the reference table or its steady form, with the operators that look at their data sealed.

    ``unfused``: which of its parts are twins.
    """
    kind = " ".join((*[_STEADY][: int(is_steady)], *sorted(unfused)))
    return replace(
        ops,
        linear_int8=_linear_int8,
        index_candidates=_candidates,
        paged_attention=partial(_paged, kind),
        sparse_attention=partial(_sparse, kind),
        grouped_experts=partial(_experts, kind),
        keyed_uniform=_keyed_uniform,
        draw=_drawn,
        draw_edited=_drawn_edited,
    )


def _paged(kind: str, q: Tensor, positions: Tensor, *, block_starts: Tensor, scale: float, **keys: Tensor) -> Pair:
    found: Pair = _paged_attention(q, positions, [*_Keys(**keys)], block_starts, scale, kind)
    return found


def _sparse(kind: str, q: Tensor, picked: Tensor, *, scale: float, **keys: Tensor) -> Pair:
    found: Pair = _sparse_attention(q, picked, [*_Keys(**keys)], scale, kind)
    return found


def _candidates(
    index_q: Tensor,
    weights: Tensor,
    *,
    cache: Tensor,
    block_tables: Tensor,
    block_starts: Tensor,
    high: Tensor,
    limits: tuple[int, int],
) -> Pair:
    found: Pair = _index_candidates(index_q, weights, [cache, block_tables, block_starts], high, *limits)
    return found


def _experts(
    kind: str,
    x: Tensor,
    expert_ids: Tensor,
    *,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    **scales: Tensor | None,
) -> Tensor:
    known = [scale for scale in (scales.get("gate_up_scale"), scales.get("down_scale")) if scale is not None]
    assert len(known) in (0, 2), "both matrices of an expert are int8, or none"
    out: Tensor = _grouped_experts(x, expert_ids, weights, [gate_up, down, *known], kind)
    return out


class _Filters(NamedTuple):
    """How rows are drawn; operators take them as one list."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    floor: Tensor
    uniform: Tensor


def _drawn(logits: Tensor, **filters: Tensor) -> Tensor:
    ids: Tensor = _draw(logits, [*_Filters(**filters)])
    return ids


def _drawn_edited(logits: Tensor, edits: Edits, **filters: Tensor) -> Tensor:
    ids: Tensor = _draw_edited(logits, [*edits], [*_Filters(**filters)])
    return ids


@cache
def _ops(kind: str) -> Ops:
    """Made once: a step asks a dozen times. ``kind``: a name for operators of a graph to carry; see ``sealed``."""
    words = kind.split()
    is_steady = _STEADY in words
    return with_twins(steady_table() if is_steady else table(), words, is_steady=is_steady)


def _sums(kind: str) -> torch.dtype:
    """Of results that are added up later."""
    return torch.float64 if _STEADY in kind.split() else torch.float32


def _num_columns(block_starts: Tensor, positions: Tensor) -> int:
    """Table columns that hold a key which some row can see; at least one."""
    is_seen = block_starts <= positions.amax()
    return max(int(is_seen.sum(-1).amax()), 1)


def _calls(elements_each: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The sequences, tensor by tensor, as many at once as one call may take."""
    at_once = max(MAX_ELEMENTS // max(elements_each, 1), 1)
    return zip(*(torch.split(tensor, at_once) for tensor in tensors), strict=True)


def _paged_attention_shapes(
    q: Tensor, positions: Tensor, keys: list[Tensor], block_starts: Tensor, scale: float, kind: str
) -> Pair:
    return _results(q, keys, kind)


@node(_paged_attention_shapes)
def _paged_attention(
    q: Tensor, positions: Tensor, keys: list[Tensor], block_starts: Tensor, scale: float, kind: str
) -> tuple[Tensor, Tensor]:
    where, columns = _Keys(*keys), _num_columns(block_starts, positions)
    elements = columns * where.latent.shape[1] * (q.shape[1] * q.shape[2] + q.shape[3])
    each = (q, positions, where.block_tables[:, :columns], block_starts[:, :columns])
    attend, found = _ops(kind).paged_attention, list[Pair]()
    for part, at, tables, starts in _calls(elements, *each):
        cut = where._replace(block_tables=tables)
        found.append(attend(part, at, **cut._asdict(), block_starts=starts, scale=scale))
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


def _sparse_attention_shapes(q: Tensor, picked: Tensor, keys: list[Tensor], scale: float, kind: str) -> Pair:
    return _results(q, keys, kind)


@node(_sparse_attention_shapes)
def _sparse_attention(q: Tensor, picked: Tensor, keys: list[Tensor], scale: float, kind: str) -> tuple[Tensor, Tensor]:
    where = _Keys(*keys)
    elements = q.shape[1] * picked.shape[2] * (q.shape[2] + q.shape[3])
    each = (q, picked, where.block_tables)
    attend, found = _ops(kind).sparse_attention, list[Pair]()
    for part, chosen, tables in _calls(elements, *each):
        found.append(attend(part, chosen, **where._replace(block_tables=tables)._asdict(), scale=scale))
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


def _results(q: Tensor, keys: list[Tensor], kind: str) -> tuple[Tensor, Tensor]:
    sums, lead = _sums(kind), q.shape[:3]
    return q.new_empty((*lead, _Keys(*keys).latent.shape[-1]), dtype=sums), q.new_empty(lead, dtype=sums)


def _index_candidates_shapes(
    index_q: Tensor, weights: Tensor, keys: list[Tensor], high: Tensor, low: int, budget: int
) -> tuple[Tensor, Tensor]:
    shape = (*high.shape, budget)
    return index_q.new_empty(shape, dtype=torch.float32), high.new_empty(shape)


@node(_index_candidates_shapes)
def _index_candidates(
    index_q: Tensor, weights: Tensor, keys: list[Tensor], high: Tensor, low: int, budget: int
) -> tuple[Tensor, Tensor]:
    index_cache, block_tables, block_starts = keys
    find, columns = _ops("").index_candidates, _num_columns(block_starts, high)
    elements = columns * index_cache.shape[1] * (index_q.shape[1] * index_q.shape[2] + index_cache.shape[2])
    each = (index_q, weights, block_tables[:, :columns], block_starts[:, :columns], high)
    found = [
        find(q, w, cache=index_cache, block_tables=tables, block_starts=starts, high=h, limits=(low, budget))
        for q, w, tables, starts, h in _calls(elements, *each)
    ]
    return torch.cat([scores for scores, _ in found]), torch.cat([positions for _, positions in found])


def _grouped_experts_shapes(x: Tensor, expert_ids: Tensor, weights: Tensor, matrices: list[Tensor], kind: str) -> Tensor:
    return x.new_empty(x.shape, dtype=_sums(kind))


@node(_grouped_experts_shapes)
def _grouped_experts(x: Tensor, expert_ids: Tensor, weights: Tensor, matrices: list[Tensor], kind: str) -> Tensor:
    gate_up, down, *scales = matrices
    names = dict(zip(("gate_up_scale", "down_scale"), scales, strict=False))
    return _ops(kind).grouped_experts(x, expert_ids, weights=weights, gate_up=gate_up, down=down, **names)


def _linear_int8_shapes(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@node(_linear_int8_shapes)
def _linear_int8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Sealed because it asks the processor for its integer product."""
    return _ops("").linear_int8(x, weight, scale)


def _draw_shapes(logits: Tensor, filters: list[Tensor]) -> Tensor:
    return logits.new_empty(logits.shape[:1], dtype=torch.int64)


@node(_draw_shapes)
def _draw(logits: Tensor, filters: list[Tensor]) -> Tensor:
    return _ops("").draw(logits, **_Filters(*filters)._asdict())


def _draw_edited_shapes(logits: Tensor, edits: list[Tensor], filters: list[Tensor]) -> Tensor:
    return logits.new_empty(logits.shape[:1], dtype=torch.int64)


@node(_draw_edited_shapes)
def _draw_edited(logits: Tensor, edits: list[Tensor], filters: list[Tensor]) -> Tensor:
    return _ops("").draw_edited(logits, Edits(*edits), **_Filters(*filters)._asdict())


def _keyed_uniform_shapes(seeds: Tensor, choices: Tensor, positions: Tensor) -> Tensor:
    return seeds.new_empty(seeds.shape, dtype=torch.float64)


@node(_keyed_uniform_shapes)
def _keyed_uniform(seeds: Tensor, choices: Tensor, positions: Tensor) -> Tensor:
    """Sealed for another reason: every round uses its number twice, and a compiler that writes it out never ends."""
    return _ops("").keyed_uniform(seeds, choices, positions)
