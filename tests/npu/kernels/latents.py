"""Attention of absorbed queries to latents: what fused and sparse attention share.

Queries are 512 wide with a rope part of 64, and there is one head of keys, which are the values as well. Computed in fp64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.npu.kernels.refusals import FLOATS, Limits

LATENT, ROPE = 512, 64


class Results:
    """Outputs of rows that lie flat; those that nothing is put to stay NaN, and +inf in the log-sum-exp."""

    def __init__(self, q: Tensor) -> None:
        self.q, self._lead = q.flatten(0, -3), q.shape[:-1]
        self._out = self.q.new_full((*self.q.shape[:-1], LATENT), torch.nan)
        self._highest, self._total = torch.full(self.q.shape[:-1], torch.inf), torch.ones(self.q.shape[:-1])
        self._lse = self._highest.clone()

    def put(self, request: range, result: tuple[Tensor, Tensor, Tensor]) -> None:
        out, highest, total = result
        self._out[rows_at(request)] = out.to(self._out.dtype)
        self._highest[rows_at(request)], self._total[rows_at(request)] = highest.float(), total.float()
        self._lse[rows_at(request)] = (highest + total.log()).float()

    @property
    def out(self) -> Tensor:
        return self._out.view(*self._lead, LATENT)

    @property
    def lse(self) -> Tensor:
        return self._lse.view(self._lead)

    @property
    def highest_and_total(self) -> tuple[Tensor, Tensor]:
        return self._highest.view(self._lead), self._total.view(self._lead)


def rows_at(request: range) -> slice:
    return slice(request.start, request.stop)


def joined_queries(limits: Limits, query: Tensor, query_rope: Tensor | None, *, is_tnd: bool) -> Tensor:
    """Both parts beside each other, [T, N, 576] or [B, S, N, 576]."""
    query_rope = limits.given("query_rope (64 wide beside the 512 of query)", query_rope)
    lead = (None, None) if is_tnd else (None, None, None)
    limits.dtype("query", query, FLOATS)
    limits.dtype("query_rope", query_rope, (query.dtype,))
    limits.shape("query", query, *lead, LATENT)
    limits.shape("query_rope", query_rope, *query.shape[:-1], ROPE)
    limits.heads("heads of query", query.shape[-2])
    return torch.cat((query, query_rope), -1)


@dataclass(frozen=True)
class Visible:
    """Keys [n, 576], both parts beside each other, and which of them each request has."""

    keys: Tensor
    slots: list[Tensor]


def _check_keys(limits: Limits, keys: tuple[Tensor, Tensor, Tensor | None], *lead: int | None) -> Tensor:
    key, value, rope = keys
    rope = limits.given("key_rope", rope)
    limits.shape("key", key, *lead, LATENT)
    limits.shape("key_rope", rope, *key.shape[:-1], ROPE)
    limits.dtype("key", key, FLOATS)
    limits.dtype("key_rope", rope, (key.dtype,))
    is_same = value.shape == key.shape and value.dtype == key.dtype and value.data_ptr() == key.data_ptr()
    limits.need("value", is_same, "the tensor that key is", f"{tuple(value.shape)} elsewhere")
    return rope


def unpaged(
    limits: Limits,
    argument: str,
    keys: tuple[Tensor, Tensor, Tensor | None],
    lengths: Sequence[int] | None,
    *,
    requests: int,
    is_tnd: bool,
) -> Visible:
    """Lengths are running sums in TND, else those of requests."""
    rope = _check_keys(limits, keys, *((None, 1) if is_tnd else (requests, None, 1)))
    joined = torch.cat((keys[0], rope), -1).squeeze(-2)
    rows = limits.rows_of(argument, lengths, joined.unsqueeze(-2), is_tnd=is_tnd)
    limits.need(argument, len(rows) == requests, f"of {requests} requests", f"of {len(rows)}")
    return Visible(joined.flatten(0, -2), [torch.arange(each.start, each.stop) for each in rows])


def paged(
    limits: Limits,
    argument: str,
    keys: tuple[Tensor, Tensor, Tensor | None],
    lengths: Sequence[int] | None,
    *,
    block_table: Tensor,
    requests: int,
) -> Visible:
    """Of keys [blocks, block, 1, 512]; lengths are those of requests."""
    rope = _check_keys(limits, keys, None, None, 1)
    limits.contiguous(key=keys[0], key_rope=rope)
    num_blocks, size = keys[0].shape[:2]
    limits.page("key", size)
    limits.dtype("block_table", block_table, (torch.int32,))
    limits.shape("block_table", block_table, requests, None)
    lengths = limits.given(argument, lengths)
    limits.lengths(argument, lengths, requests, block_table.shape[1] * size)
    slots = limits.pages_of(block_table, lengths, size, num_blocks)
    used = torch.cat(slots).unique()
    joined = torch.cat((keys[0].view(-1, LATENT)[used], rope.view(-1, ROPE)[used]), -1)
    return Visible(joined, [torch.searchsorted(used, each) for each in slots])


def seen_by(num_rows: int, num_keys: int, sparse_mode: int) -> Tensor:
    """[rows or 1, keys]: which keys a row sees; in mode 3 the last row sees all and each one before it one fewer."""
    if sparse_mode == 0:
        return torch.ones(1, num_keys, dtype=torch.bool)
    ends = num_keys - num_rows + 1 + torch.arange(num_rows)
    return torch.arange(num_keys) < ends[:, None]


def attend(q: Tensor, keys: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of `q` [.., x, N, 576] to `keys` [.., n, 576]: outputs [.., x, N, 512], highest scores and sums [.., x, N]."""
    q, keys, seen = q.double(), keys.double(), seen.unsqueeze(-2)
    keys = keys.unsqueeze(-3)
    scores = (q @ keys.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)
    if not scores.shape[-1]:
        nothing = torch.full(q.shape[:-1], torch.inf, dtype=torch.float64)
        return torch.full((*q.shape[:-1], LATENT), torch.nan, dtype=torch.float64), nothing, torch.ones_like(nothing)
    highest = scores.amax(-1)
    weights = torch.exp(scores - highest.unsqueeze(-1))
    total = weights.sum(-1)
    values = keys[..., :LATENT].masked_fill(~seen.any(-3).unsqueeze(-1), 0)  # what no row sees may be anything
    out = weights @ values / total.unsqueeze(-1)
    is_blind = highest == -torch.inf
    return (
        out.masked_fill(is_blind.unsqueeze(-1), torch.nan),
        highest.masked_fill(is_blind, torch.inf),
        total.masked_fill(is_blind, 1),
    )
