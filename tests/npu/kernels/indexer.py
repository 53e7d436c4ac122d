"""The lightning indexer: npu_lightning_indexer and npu_quant_lightning_indexer.

The best positions of a row come in a shuffled order, the same at each call, and -1 behind them. Of equal scores the lower
position is taken; the documentation says nothing of that. Rows of no request (BSND with lengths below S) hold -2^31.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.npu.kernels.refusals import FLOATS, Limits

WIDTH = 128
LONG_EVER = 2**63 - 1
SEED = 5
NOWHERE = torch.iinfo(torch.int32).min


def npu_lightning_indexer(
    query: Tensor, key: Tensor, weights: Tensor, *, return_value: bool = False, **options: Any
) -> tuple[Tensor, Tensor]:
    limits = Limits("npu_lightning_indexer")
    limits.dtype("query", query, FLOATS)
    limits.dtype("key", key, (query.dtype,))
    if return_value and options.get("layout_key") == "PA_BSND":
        raise limits.refuse("return_value has to be False with layout_key 'PA_BSND': values are for un-paged keys only")
    found, values = _best(limits, query, key, weights, **options)
    return found, values.to(query.dtype) if return_value else torch.empty(0, dtype=query.dtype)


def npu_quant_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    query_quant_mode: int,
    key_quant_mode: int,
    *,
    query_dtype: int | None = None,
    key_dtype: int | None = None,
    **options: Any,
) -> Tensor:
    """int8 queries and keys with a scale for each head of a row and for each key."""
    limits = Limits("npu_quant_lightning_indexer")
    limits.absent(query_dtype=query_dtype, key_dtype=key_dtype)
    limits.one_of("query_quant_mode", query_quant_mode, (0,))
    limits.one_of("key_quant_mode", key_quant_mode, (0,))
    for argument, tensor, scale in (("query", query, query_dequant_scale), ("key", key, key_dequant_scale)):
        limits.dtype(argument, tensor, (torch.int8,))
        limits.dtype(f"{argument}_dequant_scale", scale, (torch.float16, torch.float32))
        limits.shape(f"{argument}_dequant_scale", scale, *tensor.shape[:-1])
    q = query.double() * query_dequant_scale.double().unsqueeze(-1)
    k = key.double() * key_dequant_scale.double().unsqueeze(-1)
    return _best(limits, q, k, weights, **options)[0]


def _best(
    limits: Limits,
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = LONG_EVER,
    next_tokens: int = LONG_EVER,
) -> tuple[Tensor, Tensor]:
    """Positions int32 and scores fp64 [T, 1, count] or [B, S, 1, count]; scores beside -1 are NaN."""
    limits.one_of("layout_query", layout_query, ("TND", "BSND"))
    limits.one_of("layout_key", layout_key, ("PA_BSND", layout_query))
    limits.one_of("sparse_mode", sparse_mode, (0, 3))
    limits.one_of("pre_tokens", pre_tokens, (LONG_EVER,))
    limits.one_of("next_tokens", next_tokens, (LONG_EVER,))
    is_kept = 1 <= sparse_count <= 2048 or (1 <= sparse_count <= 8192 and sparse_count % 1024 == 0)
    limits.need("sparse_count", is_kept, "in 1 ... 2048, or a multiple of 1024 up to 8192", sparse_count)
    is_tnd = layout_query == "TND"
    limits.shape("query", query, *((None,) * (2 if is_tnd else 3)), WIDTH)
    limits.need("heads of query", 1 <= query.shape[-2] <= 64, "in 1 ... 64", query.shape[-2])
    limits.dtype("weights", weights, FLOATS)
    limits.shape("weights", weights, *query.shape[:-1])
    lengths = actual_seq_lengths_query
    lengths = None if lengths is None else limits.int32_list("actual_seq_lengths_query", lengths)
    rows = limits.rows_of("actual_seq_lengths_query", lengths, query, is_tnd=is_tnd)
    if layout_key == "PA_BSND":
        keys = _paged(limits, key, actual_seq_lengths_key, limits.given("block_table", block_table), requests=len(rows))
    else:
        limits.absent(block_table=block_table)
        keys = _unpaged(limits, key, actual_seq_lengths_key, requests=len(rows), is_tnd=is_tnd)
    lead = query.shape[:-2]
    found = torch.full((lead.numel(), sparse_count), NOWHERE, dtype=torch.int32)
    values = torch.full(found.shape, torch.nan, dtype=torch.float64)
    q, w = query.flatten(0, -3), weights.flatten(0, -2)
    for request, slots in zip(rows, keys.slots, strict=True):
        where = slice(request.start, request.stop)
        scores = _scores(q[where], w[where], keys.keys[slots], sparse_mode)
        found[where], values[where] = _shuffled_best(scores, sparse_count)
    return found.view(*lead, 1, sparse_count), values.view(*lead, 1, sparse_count)


@dataclass(frozen=True)
class _Keys:
    """Keys [n, 128] and which of them each request has."""

    keys: Tensor
    slots: list[Tensor]


def _paged(limits: Limits, key: Tensor, lengths: Tensor | None, block_table: Tensor, *, requests: int) -> _Keys:
    limits.shape("key", key, None, None, 1, WIDTH)
    limits.contiguous(key=key)
    num_blocks, size = key.shape[:2]
    limits.page("key", size)
    limits.dtype("block_table", block_table, (torch.int32,))
    limits.shape("block_table", block_table, requests, None)
    each = limits.int32_list("actual_seq_lengths_key", lengths)
    limits.lengths("actual_seq_lengths_key", each, requests, block_table.shape[1] * size)
    return _Keys(key.view(-1, WIDTH), limits.pages_of(block_table, each, size, num_blocks))


def _unpaged(limits: Limits, key: Tensor, lengths: Tensor | None, *, requests: int, is_tnd: bool) -> _Keys:
    """Lengths are running sums in TND, else those of requests."""
    limits.shape("key", key, *((None,) if is_tnd else (requests, None)), 1, WIDTH)
    each = None if lengths is None else limits.int32_list("actual_seq_lengths_key", lengths)
    rows = limits.rows_of("actual_seq_lengths_key", each, key, is_tnd=is_tnd)
    limits.need("actual_seq_lengths_key", len(rows) == requests, f"of {requests} requests", f"of {len(rows)}")
    return _Keys(key.reshape(-1, WIDTH), [torch.arange(of.start, of.stop) for of in rows])


def _scores(q: Tensor, weights: Tensor, keys: Tensor, sparse_mode: int) -> Tensor:
    """[rows, keys], -inf for what a row does not see: in mode 3 the last row sees all, each one before it one fewer.

    Rounded to fp32, so that equal keys have equal scores wherever they lie.
    """
    dots = torch.einsum("tnd,sd->tns", q.double(), keys.double()).relu()
    scores = torch.einsum("tn,tns->ts", weights.double(), dots).float().double()
    if sparse_mode == 3:
        ends = len(keys) - len(q) + 1 + torch.arange(len(q))
        scores = scores.masked_fill(torch.arange(len(keys)) >= ends[:, None], -torch.inf)
    return scores


def _shuffled_best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    ordered = scores.sort(dim=-1, descending=True, stable=True)
    values, positions = ordered.values[:, :count], ordered.indices[:, :count]
    positions = positions.masked_fill(values == -torch.inf, -1)
    missing = (0, count - positions.shape[1])
    positions = torch.nn.functional.pad(positions, missing, value=-1)
    values = torch.nn.functional.pad(values, missing).masked_fill(positions < 0, torch.nan)
    order = (
        torch.rand(positions.shape, generator=torch.Generator().manual_seed(SEED)).masked_fill(positions < 0, 2).argsort(-1)
    )
    return positions.gather(-1, order).int(), values.gather(-1, order)


KERNELS = {kernel.__name__: kernel for kernel in (npu_lightning_indexer, npu_quant_lightning_indexer)}
