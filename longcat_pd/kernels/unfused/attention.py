"""Attention by hand: the context of a sequence is gathered whole, and each head scores it, weighs it and sums it up."""

from __future__ import annotations

import torch
from torch import Tensor


class Attention:
    """``sums``: the type that everything is computed in."""

    def __init__(self, sums: torch.dtype) -> None:
        self._sums = sums

    def paged(
        self,
        q: Tensor,
        positions: Tensor,
        *,
        latent: Tensor,
        rope: Tensor,
        block_tables: Tensor,
        block_starts: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """See ``ops.PagedAttention``. Sequence by sequence."""
        found = self._nothing(q, latent)
        offsets = torch.arange(latent.shape[1], device=q.device)
        for b, where in enumerate(positions):
            columns = (block_starts[b] <= where.max()).nonzero().squeeze(1) if len(where) else offsets[:0]
            blocks = block_tables[b, columns]
            keys = (latent[blocks].flatten(0, 1), rope[blocks].flatten(0, 1))
            key_positions = (block_starts[b, columns].unsqueeze(1) + offsets).flatten()
            self._attend(q[b], keys, key_positions <= where.unsqueeze(1), scale=scale, into=(found[0][b], found[1][b]))
        return found

    def sparse(
        self, q: Tensor, keys: Tensor, *, latent: Tensor, rope: Tensor, block_tables: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See ``ops.SparseAttention``. Row by row."""
        found, block_size = self._nothing(q, latent), latent.shape[1]
        for b, r in [(b, r) for b in range(q.shape[0]) for r in range(q.shape[1])]:
            picked = keys[b, r][keys[b, r] >= 0]
            slots = block_tables[b, picked // block_size] * block_size + picked % block_size
            rows = (latent.flatten(0, 1)[slots], rope.flatten(0, 1)[slots])
            here = slice(r, r + 1)
            is_seen = torch.ones((1, len(picked)), dtype=torch.bool, device=q.device)
            self._attend(q[b, here], rows, is_seen, scale=scale, into=(found[0][b, here], found[1][b, here]))
        return found

    def _nothing(self, q: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """What rows without keys give."""
        lead, width = q.shape[:3], latent.shape[2]
        out = torch.zeros((*lead, width), dtype=self._sums, device=q.device)
        return out, torch.full(lead, -torch.inf, dtype=self._sums, device=q.device)

    def _attend(
        self, q: Tensor, keys: tuple[Tensor, Tensor], is_seen: Tensor, *, scale: float, into: tuple[Tensor, Tensor]
    ) -> None:
        """Rows ``q`` [Q, H, C + R] to ``keys`` [S, C] and [S, R], of which they see some [Q, S]. Head by head."""
        if not is_seen.any():
            return
        values, turned = (part.to(self._sums) for part in keys)
        out, lse, lowest = *into, torch.finfo(self._sums).min
        for head in range(q.shape[1]):
            nope, rope = torch.split(q[:, head].to(self._sums), [values.shape[1], turned.shape[1]], -1)
            scores = (nope @ values.t() + rope @ turned.t()) * scale
            scores = scores.masked_fill(~is_seen, -torch.inf)
            highest = scores.max(-1, keepdim=True).values.clamp(min=lowest)  # a row without keys: 0, never NaN
            weights = torch.exp(scores - highest)
            total = weights.sum(-1, keepdim=True)
            out[:, head] = weights @ values / total.clamp(min=torch.finfo(self._sums).tiny)
            lse[:, head] = (highest + torch.log(total)).squeeze(1)
