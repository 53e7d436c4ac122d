"""Attention over a paged latent cache, dense and sparse: what stands before it, and the merging of partial attentions.

A row's bits must not depend on how many keys *other* rows have. So the denominator of a softmax is one more column of the
product with the values, which adds key after key, and not torch's sum, whose order follows the length. And what is not
computed for whole rows of vectors is computed in fp64, because the vectorised exponential and logarithm round differently
from the one that torch uses for the rest of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from longcat_pd.kernels.ops import MlaProlog, MlaStore, PrologScales, PrologWeights, RmsNorm, Rope
from longcat_pd.kernels.reference.rows import ROW_TILE, head_linear, in_tiles, linear, sum_over_keys

Attend = Callable[..., tuple[Tensor, Tensor]]

_NEVER = -torch.inf


def store(cache: Tensor, slots: Tensor, values: Tensor) -> None:
    """See ``ops.Store``."""
    cache.view(-1, cache.shape[-1]).index_copy_(0, slots, values)


def prolog_with(rms_norm: RmsNorm, rope: Rope) -> tuple[MlaProlog, MlaStore]:
    """See ``ops.MlaProlog`` and ``ops.MlaStore``: one product for all that goes down, one turn for keys and queries."""

    def mla_prolog(
        x: Tensor,
        rotation: Tensor,
        *,
        weights: tuple[Tensor, ...],
        slots: Tensor,
        cache: tuple[Tensor, Tensor],
        scales: PrologScales,
    ) -> tuple[Tensor, Tensor]:
        """The key's rope part is turned as one more head."""
        by = PrologWeights(*weights)
        (heads, nope_width, kv_rank), q_rank = by.key_up.shape, by.q_norm.shape[0]
        down = linear(x, by.down)
        rope_width = down.shape[1] - q_rank - kv_rank
        q_lora, latent, rope_key = torch.split(down, [q_rank, kv_rank, rope_width], 1)
        q_lora = rms_norm(q_lora, by.q_norm, scales.eps)
        q = linear(q_lora, by.q_up).view(len(x), heads, nope_width + rope_width)
        nope, rope_part = torch.split(q, [nope_width, rope_width], -1)
        turned = rope(torch.cat((rope_part, rope_key.unsqueeze(1)), 1), rotation, is_interleaved=True)
        store(cache[0], slots, rms_norm(latent, by.kv_norm, scales.eps) * scales.kv)
        store(cache[1], slots, turned[:, heads])
        return torch.cat((head_linear(nope, by.key_up), turned[:, :heads]), -1), q_lora

    def mla_store(
        x: Tensor,
        rotation: Tensor,
        *,
        weights: tuple[Tensor, ...],
        slots: Tensor,
        cache: tuple[Tensor, Tensor],
        scales: PrologScales,
    ) -> None:
        by = PrologWeights(*weights)
        q_rank, kv_rank = by.q_norm.shape[0], by.kv_norm.shape[0]
        latent, rope_key = linear(x, by.down)[:, q_rank:].tensor_split([kv_rank], 1)
        store(cache[0], slots, rms_norm(latent, by.kv_norm, scales.eps) * scales.kv)
        store(cache[1], slots, rope(rope_key, rotation, is_interleaved=True))

    return mla_prolog, mla_store


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
    """See ``ops.PagedAttention``. All rows of a sequence share one product with its keys."""
    batch, rows, heads, _ = q.shape
    block_size, width = latent.shape[1:]
    values = latent[block_tables].view(batch, -1, width)
    rope_keys = rope[block_tables].view(batch, -1, rope.shape[-1])
    key_positions = block_starts.unsqueeze(-1) + torch.arange(block_size, device=q.device)
    hidden = key_positions.view(batch, 1, 1, -1) > positions.view(batch, rows, 1, 1)
    hidden = hidden.expand(-1, -1, heads, -1).flatten(1, 2)
    out, lse = _attend(q.reshape(batch, rows * heads, -1) * scale, values, rope_keys=rope_keys, hidden=hidden)
    return out.view(batch, rows, heads, width), lse.view(batch, rows, heads)


def sparse_attention(
    q: Tensor, keys: Tensor, *, latent: Tensor, rope: Tensor, block_tables: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """See ``ops.SparseAttention``. Every row gathers its own keys; columns without any key are left out."""
    batch, rows, heads, _ = q.shape
    block_size, width = latent.shape[1:]
    keys, is_none = _ascending(keys)
    blocks = block_tables.gather(1, (keys // block_size).view(batch, -1)).view_as(keys)
    slots = (blocks * block_size + keys % block_size).view(batch * rows, -1)
    values, rope_keys = latent.flatten(0, 1)[slots], rope.flatten(0, 1)[slots]
    hidden = is_none.view(batch * rows, 1, -1)
    out, lse = _attend(q.reshape(batch * rows, heads, -1) * scale, values, rope_keys=rope_keys, hidden=hidden)
    return out.view(batch, rows, heads, width), lse.view(batch, rows, heads)


def merge_partials(outs: Tensor, lses: Tensor) -> Tensor:
    """See ``ops.MergePartials``."""
    highest = lses.amax(0).clamp_min(torch.finfo(lses.dtype).min)  # -inf - -inf would be NaN
    weights = torch.exp((lses - highest).double()).to(lses.dtype)
    total = weights.sum(0).clamp_min(torch.finfo(lses.dtype).tiny)
    return (outs * (weights / total).unsqueeze(-1)).sum(0)


def wide(attend: Attend) -> Attend:
    """The same attention with sums over keys in fp64. Rounded to fp32 they do not show how the keys lie on ranks."""

    def attend_wide(q: Tensor, keys: Tensor, **where: Any) -> tuple[Tensor, Tensor]:
        return attend(q.double(), keys, **where)

    return attend_wide


def _attend(q: Tensor, values: Tensor, *, rope_keys: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of scaled ``q`` [n, x, C + R] to keys in two parts, ``values`` [n, s, C] and ``rope_keys`` [n, s, R].

    ``hidden`` [n, x or 1, s] masks. Returns [n, x, C] and the log-sum-exp [n, x], fp32, or fp64 if ``q`` is: then all
    that depends on how many keys there are is computed so. Rows without keys: 0 and -inf.
    """
    num_rows, width = q.shape[1], values.shape[-1]
    sums = torch.promote_types(q.dtype, torch.float32)
    hidden = functional.pad(hidden, (0, -hidden.shape[-1] % ROW_TILE), value=True)
    q, values, rope_keys = in_tiles(q.float()), in_tiles(values.float()), in_tiles(rope_keys.float())
    turned = torch.bmm(q[..., width:], rope_keys.transpose(1, 2))
    scores = torch.baddbmm(turned, q[..., :width], values.transpose(1, 2))
    scores[:, :num_rows].masked_fill_(hidden, _NEVER)
    highest = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:2], 1), _NEVER)
    lowest = torch.finfo(scores.dtype).min
    weights = torch.exp(scores.to(sums) - highest.clamp_min(lowest))  # a row without keys: 0, never NaN
    ones = functional.pad(values.to(sums), (0, ROW_TILE - width % ROW_TILE), value=1.0)
    added = sum_over_keys(weights, ones)[:, :num_rows]
    out, total = added[..., :width], added[..., width : width + 1]
    lse = highest[:, :num_rows].double() + total.double().log()
    return out / total.clamp_min(torch.finfo(total.dtype).tiny), lse.squeeze(-1).to(sums)


def _ascending(keys: Tensor) -> tuple[Tensor, Tensor]:
    """``keys`` [B, Q, K] in ascending order; -1 as 0 at the end, with a mask of these; columns of -1 alone are cut.

    In the order of dense attention a row that picked all its keys gets the same bits as there. And a rank that holds a part
    of the picked keys would otherwise gather and weigh the empty rest as well.
    """
    above = torch.iinfo(keys.dtype).max
    ordered = keys.masked_fill(keys < 0, above).sort(-1).values
    is_none = ordered == above
    longest = keys.shape[-1] - int(is_none.sum(-1).min()) if keys.numel() else 0
    width = -(-longest // ROW_TILE) * ROW_TILE
    return ordered.masked_fill(is_none, 0)[..., :width], is_none[..., :width]
