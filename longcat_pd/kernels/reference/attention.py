"""Attention over a paged latent cache, dense and sparse, and the merging of partial attentions."""

from __future__ import annotations

import torch
from torch import Tensor

_NEVER = -torch.inf


def store(cache: Tensor, slots: Tensor, values: Tensor) -> None:
    """See ``ops.Store``."""
    cache.view(-1, cache.shape[-1]).index_copy_(0, slots, values)


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
    keys = latent[block_tables].view(batch, -1, width).float()
    rope_keys = rope[block_tables].view(batch, -1, rope.shape[-1]).float()
    scores = _scores(q.reshape(batch, rows * heads, -1).float(), keys, rope_keys, scale)
    key_positions = block_starts.unsqueeze(-1) + torch.arange(block_size, device=q.device)
    hidden = key_positions.view(batch, 1, -1) > positions.unsqueeze(-1)
    scores.view(batch, rows, heads, -1).masked_fill_(hidden.unsqueeze(2), _NEVER)
    out, lse = _weigh(scores, keys)
    return out.view(batch, rows, heads, width), lse.view(batch, rows, heads)


def sparse_attention(
    q: Tensor, keys: Tensor, *, latent: Tensor, rope: Tensor, block_tables: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """See ``ops.SparseAttention``. Every row gathers its own keys; columns without any key are left out."""
    batch, rows, heads, _ = q.shape
    block_size, width = latent.shape[1:]
    keys = _without_empty_columns(keys)
    known = keys.clamp_min(0)
    blocks = block_tables.gather(1, (known // block_size).view(batch, -1)).view_as(known)
    slots = (blocks * block_size + known % block_size).view(batch * rows, -1)
    values = latent.flatten(0, 1)[slots].float()
    rope_keys = rope.flatten(0, 1)[slots].float()
    scores = _scores(q.reshape(batch * rows, heads, -1).float(), values, rope_keys, scale)
    scores.masked_fill_((keys < 0).view(batch * rows, 1, -1), _NEVER)
    out, lse = _weigh(scores, values)
    return out.view(batch, rows, heads, width), lse.view(batch, rows, heads)


def merge_partials(outs: Tensor, lses: Tensor) -> Tensor:
    """See ``ops.MergePartials``."""
    highest = lses.amax(0).clamp_min(torch.finfo(lses.dtype).min)  # -inf - -inf would be NaN
    weights = torch.exp(lses - highest)
    total = weights.sum(0).clamp_min(torch.finfo(lses.dtype).tiny)
    return (outs * (weights / total).unsqueeze(-1)).sum(0)


def _scores(q: Tensor, keys: Tensor, rope_keys: Tensor, scale: float) -> Tensor:
    """Scaled scores of ``q`` [n, x, C + R] with keys in two parts, [n, s, C] and [n, s, R]: [n, x, s]."""
    width = keys.shape[-1]
    turned = torch.bmm(q[..., width:], rope_keys.transpose(1, 2))
    return torch.baddbmm(turned, q[..., :width], keys.transpose(1, 2), beta=scale, alpha=scale)


def _weigh(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension and the sum of ``values`` [n, s, C] that it weighs; also the log-sum-exp."""
    lse = torch.logsumexp(scores, -1)
    floor = lse.clamp_min(torch.finfo(lse.dtype).min)  # a row without keys: exp(-inf - finite) = 0, never NaN
    return torch.bmm(torch.exp(scores - floor.unsqueeze(-1)), values), lse


def _without_empty_columns(keys: Tensor) -> Tensor:
    """Moves the -1 of every row to its end and cuts the columns that have nothing else. A rank that holds a part of the
    picked keys only would otherwise gather and weigh the empty rest as well.
    """
    is_empty = keys < 0
    width = keys.shape[-1] - int(is_empty.sum(-1).min()) if keys.numel() else keys.shape[-1]
    if width == keys.shape[-1]:
        return keys
    order = torch.argsort(is_empty, dim=-1, stable=True)[..., :width]
    return keys.gather(-1, order)
