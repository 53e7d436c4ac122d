"""Attention over latents and what goes with it: npu_fused_infer_attention_score and its v2, npu_sparse_flash_attention,
npu_attention_update, npu_scatter_nd_update_ and its functional twin, npu_transpose_batchmatmul.

Attention is that of absorbed queries, 512 wide with a rope part of 64, to one head of keys that are the values as well.
What it leaves for a query row that sees no key is not documented: here the output is NaN and the log-sum-exp +inf. Rows
that belong to no request (BSND with lengths below S) are the same.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.npu.kernels.latents import Results, attend, joined_queries, paged, rows_at, seen_by, unpaged
from tests.npu.kernels.refusals import FLOATS, Limits

MASK = 2048
EVER, LONG_EVER = 2**31 - 1, 2**63 - 1
INTS = (torch.int32, torch.int64)

_LAYOUTS = {"TND": "TND", "TND_NTD": "TND", "BSND": "BSND", "BSND_NBSD": "BSND"}


def npu_fused_infer_attention_score_v2(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return _fused(Limits("npu_fused_infer_attention_score_v2"), (query, key, value), **options)


_NAMES_IN_V1 = {
    "num_query_heads": "num_heads",
    "softmax_scale": "scale",
    "actual_seq_qlen": "actual_seq_lengths",
    "actual_seq_kvlen": "actual_seq_lengths_kv",
    "query_quant_mode": "antiquant_mode",
    "key_quant_mode": "key_antiquant_mode",
    "value_quant_mode": "value_antiquant_mode",
    "return_softmax_lse": "softmax_lse_flag",
}


def npu_fused_infer_attention_score(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The same with older names."""
    in_v2 = {old: new for new, old in _NAMES_IN_V1.items()}
    renamed = {in_v2.get(argument, argument): got for argument, got in options.items()}
    return _fused(Limits("npu_fused_infer_attention_score", _NAMES_IN_V1), (query, key, value), **renamed)


def _fused(
    limits: Limits,
    tensors: tuple[Tensor, Tensor, Tensor],
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    return_softmax_lse: bool = False,
    **others: object,
) -> tuple[Tensor, Tensor]:
    _check_others(limits, others)
    limits.one_of("input_layout", input_layout, tuple(_LAYOUTS))
    is_tnd = _LAYOUTS[input_layout] == "TND"
    q = joined_queries(limits, tensors[0], query_rope, is_tnd=is_tnd)
    limits.need("num_query_heads", num_query_heads == q.shape[-2], q.shape[-2], num_query_heads)
    limits.need("num_key_value_heads", num_key_value_heads == 1, 1, num_key_value_heads)
    _check_sparse_mode(limits, sparse_mode, atten_mask)
    rows = limits.rows_of("actual_seq_qlen", actual_seq_qlen, q, is_tnd=is_tnd)
    limits.need("requests", len(rows) <= 4096, "at most 4096", len(rows))
    keys = (tensors[1], tensors[2], key_rope)
    if block_table is None:
        limits.need("block_size", block_size == 0, "0 without a block_table", block_size)
        visible = unpaged(limits, "actual_seq_kvlen", keys, actual_seq_kvlen, requests=len(rows), is_tnd=is_tnd)
    else:
        keys = _as_bsnd_pages(limits, keys, is_tnd)
        visible = paged(limits, "actual_seq_kvlen", keys, actual_seq_kvlen, block_table=block_table, requests=len(rows))
        limits.need("block_size", block_size == keys[0].shape[1], keys[0].shape[1], block_size)
    limits.dtype("key", visible.keys, (q.dtype,))
    results = Results(q)
    for request, picked in zip(rows, visible.slots, strict=True):
        seen = seen_by(len(request), len(picked), sparse_mode)
        results.put(request, attend(results.q[rows_at(request)], visible.keys[picked], seen, softmax_scale))
    return _laid_out(results, input_layout, with_lse=return_softmax_lse)


def _check_others(limits: Limits, others: dict[str, object]) -> None:
    """Quantisation, bands and the like, which have to stay at their defaults; a precision may be either."""
    allowed = {"inner_precise": (0, 1), "pre_tokens": (EVER,), "next_tokens": (EVER,)}
    allowed |= {f"{which}_quant_mode": (0,) for which in ("query", "key", "value")}
    for argument, got in others.items():
        if argument in allowed:
            limits.one_of(argument, got, allowed[argument])
        else:
            limits.absent(**{argument: got})


def _laid_out(results: Results, layout: str, *, with_lse: bool) -> tuple[Tensor, Tensor]:
    out, lse = results.out, results.lse
    if _LAYOUTS[layout] == "BSND":
        lse = lse.transpose(1, 2)
    if layout == "TND_NTD":
        out = out.transpose(0, 1)
    elif layout == "BSND_NBSD":
        out = out.permute(2, 0, 1, 3)
    return out.contiguous(), lse.unsqueeze(-1).contiguous() if with_lse else torch.empty(0)


def npu_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    sparse_mode: int = 3,
    return_softmax_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Picked keys are numbers of blocks of `sparse_block_size` among the request's own keys; twice picked counts twice."""
    limits = Limits("npu_sparse_flash_attention")
    limits.one_of("sparse_mode", sparse_mode, (0, 3))
    is_tnd, is_paged = _check_sparse_options(limits, **options)
    if return_softmax_lse and is_paged:
        raise limits.refuse("return_softmax_lse with layout_kv 'PA_BSND' is broken in the stock operator")
    value = limits.given("value (None needs a newer CANN)", value)
    q = joined_queries(limits, query, query_rope, is_tnd=is_tnd)
    lengths = actual_seq_lengths_query
    lengths = None if lengths is None else limits.int32_list("actual_seq_lengths_query", lengths)
    rows = limits.rows_of("actual_seq_lengths_query", lengths, q, is_tnd=is_tnd)
    kv_lengths = limits.int32_list("actual_seq_lengths_kv", actual_seq_lengths_kv)
    named = (limits, "actual_seq_lengths_kv", (key, value, key_rope), kv_lengths)
    if is_paged:
        visible = paged(*named, block_table=limits.given("block_table", block_table), requests=len(rows))
    else:
        limits.absent(block_table=block_table)
        visible = unpaged(*named, requests=len(rows), is_tnd=True)
    limits.dtype("key", visible.keys, (q.dtype,))
    _check_sparse_block(limits, sparse_block_size, key.shape[1] if is_paged else 128)
    picks = _picks(limits, sparse_indices, q)
    results = Results(q)
    for request, slots in zip(rows, visible.slots, strict=True):
        at, is_picked = _expanded(limits, picks[rows_at(request)], len(slots), sparse_block_size)
        if at.numel() and len(slots):
            seen = seen_by(len(request), len(slots), sparse_mode).expand(len(request), -1)
            seen, picked = is_picked & seen.gather(1, at), visible.keys[slots[at]]
            found = attend(results.q[rows_at(request)].unsqueeze(1), picked, seen.unsqueeze(1), scale_value)
            results.put(request, (found[0].squeeze(1), found[1].squeeze(1), found[2].squeeze(1)))
    if not return_softmax_lse:
        return results.out, torch.empty(0), torch.empty(0)
    highest, total = results.highest_and_total
    return results.out, highest.unsqueeze(0), total.unsqueeze(0)


def _check_sparse_options(
    limits: Limits,
    *,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    pre_tokens: int = LONG_EVER,
    next_tokens: int = LONG_EVER,
    attention_mode: int = 0,
    sinks: Tensor | None = None,
) -> tuple[bool, bool]:
    """Whether the queries are TND, and whether the keys are in pages."""
    limits.absent(sinks=sinks)
    limits.one_of("attention_mode", attention_mode, (2,))
    limits.one_of("layout_query", layout_query, ("TND", "BSND"))
    limits.one_of("layout_kv", layout_kv, ("PA_BSND", "TND"))
    limits.one_of("pre_tokens", pre_tokens, (LONG_EVER,))
    limits.one_of("next_tokens", next_tokens, (LONG_EVER,))
    is_tnd, is_paged = layout_query == "TND", layout_kv == "PA_BSND"
    limits.need("layout_query", is_tnd or is_paged, "'TND' with layout_kv 'TND'", repr(layout_query))
    return is_tnd, is_paged


def _check_sparse_block(limits: Limits, block: int, page: int) -> None:
    is_kept = 1 <= block <= 128 and block & (block - 1) == 0 and page % block == 0
    limits.need("sparse_block_size", is_kept, f"a power of two up to 128 that divides {page}", block)


def _picks(limits: Limits, indices: Tensor, q: Tensor) -> Tensor:
    """[rows, k]: numbers of picked blocks, -1 behind them."""
    limits.dtype("sparse_indices", indices, (torch.int32,))
    limits.shape("sparse_indices", indices, *q.shape[:-2], 1, None)
    picks = indices.long().flatten(0, -3).squeeze(1)
    limits.need("sparse_indices.shape[-1]", picks.shape[1] > 0, "above 0", picks.shape[1])
    lowest = int(picks.min()) if picks.numel() else -1
    limits.need("sparse_indices", lowest >= -1, "-1 or more", lowest)
    is_none = picks < 0
    is_behind = bool((is_none[:, 1:] >= is_none[:, :-1]).all())
    limits.need("sparse_indices", is_behind, "valid ones first and -1 after them", "mixed")
    return picks


def _expanded(limits: Limits, picks: Tensor, num_keys: int, block: int) -> tuple[Tensor, Tensor]:
    """Numbers of picked keys and which of them count: blocks have `block` keys, the last one maybe fewer."""
    highest = int(picks.max()) if picks.numel() else -1
    num_blocks = -(-num_keys // block)
    limits.need("sparse_indices", highest < num_blocks, f"below the {num_blocks} blocks of {num_keys} keys", highest)
    at = (picks.unsqueeze(-1) * block + torch.arange(block)).flatten(1)
    is_picked = (picks >= 0).repeat_interleave(block, 1) & (at < num_keys)
    return at.clamp(0, max(num_keys - 1, 0)), is_picked


def _as_bsnd_pages(
    limits: Limits, keys: tuple[Tensor, Tensor, Tensor | None], is_tnd: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Fused attention takes pages as [blocks, block, 1 * width] and, for TND queries, as [blocks, 1, block, width] too.

    [blocks, block, 1, width] is the same memory and is taken as well.
    """
    key, value, rope = keys

    def pages(page: Tensor) -> Tensor:
        if page.dim() == 3:
            return page.unsqueeze(2)
        return page.transpose(1, 2) if page.dim() == 4 and page.shape[1] == 1 and is_tnd else page

    if rope is not None:
        limits.need("key_rope.dim()", rope.dim() == key.dim(), f"that of key, {key.dim()}", rope.dim())
    return pages(key), pages(value), None if rope is None else pages(rope)


def _check_sparse_mode(limits: Limits, sparse_mode: int, mask: Tensor | None) -> None:
    limits.one_of("sparse_mode", sparse_mode, (0, 3))
    if sparse_mode == 0:
        limits.absent(atten_mask=mask)
        return
    mask = limits.given("atten_mask (2048 x 2048 for sparse_mode 3)", mask)
    limits.dtype("atten_mask", mask, (torch.bool, torch.int8, torch.uint8))
    limits.shape("atten_mask", mask, MASK, MASK)
    limits.need(
        "atten_mask", torch.equal(mask.bool(), _upper_triangle()), "the upper triangle above the diagonal", "another mask"
    )


@functools.cache
def _upper_triangle() -> Tensor:
    return torch.ones(MASK, MASK, dtype=torch.bool).triu(1)


def npu_attention_update(lse: list[Tensor], local_out: list[Tensor], update_type: int) -> tuple[Tensor, Tensor]:
    """What is not finite is not looked after: an lse of +inf or NaN, or -inf in all parts, makes NaN."""
    limits = Limits("npu_attention_update")
    limits.one_of("update_type", update_type, (0, 1))
    limits.need("len(lse)", 1 <= len(lse) <= 16, "1 ... 16", len(lse))
    limits.need("len(local_out)", len(local_out) == len(lse), len(lse), len(local_out))
    for part, (each, out) in enumerate(zip(lse, local_out, strict=True)):
        limits.dtype(f"lse[{part}]", each, (torch.float32,))
        limits.shape(f"lse[{part}]", each, *lse[0].shape[:1])
        limits.dtype(f"local_out[{part}]", out, FLOATS)
        limits.dtype(f"local_out[{part}]", out, (local_out[0].dtype,))
        limits.shape(f"local_out[{part}]", out, lse[0].shape[0], *local_out[0].shape[1:2])
    width = local_out[0].shape[1]
    limits.need("local_out width", 8 <= width <= 512 and width % 8 == 0, "a multiple of 8 up to 512", width)
    parts = torch.stack(tuple(lse)).double()
    highest = parts.max(0).values
    merged = highest + (parts - highest).exp().sum(0).log()
    out = ((parts - merged).exp().unsqueeze(-1) * torch.stack(tuple(local_out)).double()).sum(0).to(local_out[0].dtype)
    return out, merged.float() if update_type == 1 else torch.full_like(lse[0], torch.nan)


def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    limits = Limits("npu_scatter_nd_update_")
    limits.dtype("indices", indices, INTS)
    limits.dtype("updates", updates, (input.dtype,))
    limits.need("indices.dim()", indices.dim() >= 1, "at least 1", indices.dim())
    depth = indices.shape[-1]
    limits.need("indices.shape[-1]", 1 <= depth <= input.dim(), f"in 1 ... {input.dim()}", depth)
    limits.shape("updates", updates, *indices.shape[:-1], *input.shape[depth:])
    for axis in range(depth):
        limits.indices(f"indices[..., {axis}]", indices[..., axis], input.shape[axis])
    input[indices.long().unbind(-1)] = updates
    return input


def npu_scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return npu_scatter_nd_update_(input.clone(), indices, updates)


def npu_transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: list[int] | None = None,
    perm_x2: list[int] | None = None,
    perm_y: list[int] | None = None,
    batch_split_factor: int | None = 1,
) -> Tensor:
    limits = Limits("npu_transpose_batchmatmul")
    limits.absent(bias=bias, scale=scale)
    limits.one_of("batch_split_factor", batch_split_factor, (1, None))
    limits.one_of("perm_x1", list(perm_x1 or (0, 1, 2)), ([0, 1, 2], [1, 0, 2]))
    limits.one_of("perm_x2", list(perm_x2 or (0, 1, 2)), ([0, 1, 2],))
    limits.one_of("perm_y", list(perm_y or (1, 0, 2)), ([1, 0, 2],))
    limits.dtype("input", input, FLOATS)
    limits.dtype("weight", weight, (input.dtype,))
    limits.shape("input", input, None, None, None)
    x = input.permute(*(perm_x1 or (0, 1, 2)))
    limits.shape("weight", weight, x.shape[0], x.shape[2], None)
    for argument, size in (("K", weight.shape[1]), ("N", weight.shape[2])):
        limits.need(argument, size > 0 and size % 16 == 0, "a multiple of 16", size)
    return torch.bmm(x.double(), weight.double()).transpose(0, 1).to(input.dtype).contiguous()


KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        npu_fused_infer_attention_score,
        npu_fused_infer_attention_score_v2,
        npu_sparse_flash_attention,
        npu_attention_update,
        npu_scatter_nd_update_,
        npu_scatter_nd_update,
        npu_transpose_batchmatmul,
    )
}
