"""CPU kernels: the choice of experts, rows sorted by expert and brought back, and hashes of the last tokens.

``OWN_KERNELS`` belong to operators that no release of torch_npu has; ``define_own`` defines them as an operator package of
a deployment does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.npu.kernels.limits import FLOATS, Limits, undefined
from tests.npu.kernels.quant import quantised

MAX_SCORED = 2048
MAX_ACTIVE = 10240
MAX_REROUTED_WIDTH = 16383


def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """Top k of softmax plus bias, best first; the weights are without the bias. Scores are undefined unless asked for."""
    limits = Limits("npu_moe_gating_top_k")
    limits.absent(input_ids=input_ids, tid2eid=tid2eid)
    for argument, value, only in (
        ("k_group", k_group, 1),
        ("group_count", group_count, 1),
        ("group_select_mode", group_select_mode, 0),
        ("renorm", renorm, 0),
        ("norm_type", norm_type, 0),
    ):
        limits.one_of(argument, value, only)
    limits.dtype("x", x, *FLOATS)
    limits.shape("x", x, None, None)
    rows, experts = x.shape
    limits.within("experts of x", experts, 1, MAX_SCORED)
    limits.within("k", k, 1, experts)
    scores = torch.softmax(x.float(), -1)
    chosen_by = scores
    if bias is not None:
        limits.dtype("bias", bias, x.dtype)
        limits.shape("bias", bias, experts)
        chosen_by = scores + bias.float()
    ids = chosen_by.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = (scores.gather(-1, ids) * routed_scaling_factor).to(x.dtype)
    return weights, ids.to(torch.int32), scores if out_flag else undefined(rows, experts, dtype=torch.float32)


def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of the experts in the range, sorted by expert and then by row; what follows them is undefined."""
    limits = Limits("npu_moe_init_routing_v2")
    limits.absent(offset=offset, x_dtype=x_dtype)
    limits.shape("x", x, None, None)
    limits.dtype("expert_idx", expert_idx, torch.int32)
    limits.shape("expert_idx", expert_idx, len(x), None)
    rows, topk = expert_idx.shape
    limits.one_of("active_num", active_num, -1, rows * topk)
    limits.one_of("expert_capacity", expert_capacity, -1)
    limits.one_of("drop_pad_mode", drop_pad_mode, 0)
    limits.one_of("expert_tokens_num_type", expert_tokens_num_type, 0, 1)
    limits.one_of("quant_mode", quant_mode, -1, 1)
    limits.one_of("row_idx_type", row_idx_type, 0, 1)
    low, high = _active(limits, expert_num, active_expert_range)
    ids = expert_idx.flatten().long()
    limits.require(not bool((ids < 0).any()), f"expert_idx has an id of {int(ids.min()) if len(ids) else 0}, below 0")
    order = ids.sort(stable=True).indices
    order = order[(ids[order] >= low) & (ids[order] < high)]
    counts = torch.bincount(ids[order] - low, minlength=high - low)
    expanded, scales = _expanded(
        limits, x, order, scale, experts=ids[order] - low, count=high - low, topk=topk, mode=quant_mode
    )
    index = undefined(rows * topk, dtype=torch.int32)
    if row_idx_type == 1:
        index[: len(order)] = order.int()
    else:
        index.fill_(-1)
        index[order] = torch.arange(len(order), dtype=torch.int32)
    tokens = counts.cumsum(0) if expert_tokens_num_type == 0 else counts
    return expanded, index, tokens if expert_tokens_num_flag else undefined(high - low, dtype=torch.int64), scales


def _active(limits: Limits, expert_num: int, active_expert_range: Sequence[int]) -> tuple[int, int]:
    limits.within("expert_num", expert_num, 1, MAX_ACTIVE)
    limits.one_of("length of active_expert_range", len(active_expert_range), 0, 2)
    low, high = active_expert_range or (0, expert_num)
    limits.require(0 <= low < high <= expert_num, f"active_expert_range is {low} to {high} of {expert_num} experts")
    return low, high


def _expanded(
    limits: Limits, x: Tensor, order: Tensor, scale: Tensor | None, *, experts: Tensor, count: int, topk: int, mode: int
) -> tuple[Tensor, Tensor]:
    """Rows by expert, with the scales of rows: those that came along, or those of the quantisation in mode 1."""
    total, width = len(x) * topk, x.shape[1]
    scales = undefined(total, dtype=torch.float32)
    sources, filled = order // topk, slice(0, len(order))
    if scale is not None:
        limits.dtype("scale", scale, torch.float32)
    if mode == -1:
        limits.dtype("x", x, torch.int8, *FLOATS)
        expanded = undefined(total, width, dtype=x.dtype)
        expanded[filled] = x[sources]
        if scale is not None:
            limits.shape("scale", scale, len(x))
            scales[filled] = scale[sources]
        return expanded, scales
    limits.dtype("x", x, *FLOATS)
    expanded = undefined(total, width, dtype=torch.int8)
    wide = x.float()[sources]
    if scale is not None:
        limits.shape("scale", scale, 1 if len(scale) == 1 else count, width)
        wide = wide * (scale if len(scale) == 1 else scale[experts])
    expanded[filled], scales[filled] = quantised(wide)
    return expanded, scales


def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    """``skip1 + skip2 + sum over k of scales * (row + bias of its expert)``, added in fp32 in that order."""
    limits = Limits("npu_moe_finalize_routing")
    limits.one_of("drop_pad_mode", drop_pad_mode, 0, 1, 2, 3)
    is_padded, is_row_major = drop_pad_mode in (1, 3), drop_pad_mode in (2, 3)
    dtype, index = expanded_permuted_rows.dtype, expanded_src_to_dst_row
    limits.dtype("expanded_permuted_rows", expanded_permuted_rows, *FLOATS)
    limits.dtype("expanded_src_to_dst_row", index, torch.int32)
    limits.shape("expanded_src_to_dst_row", index, None)
    topk = _choices(limits, scales, k)
    limits.require(len(index) % topk == 0, f"expanded_src_to_dst_row has {len(index)} entries, no multiple of K = {topk}")
    rows, width = len(index) // topk, expanded_permuted_rows.shape[-1]
    limits.shape("expanded_permuted_rows", expanded_permuted_rows, *((None, None) if is_padded else (len(index),)), width)
    if scales is not None:
        limits.dtype("scales", scales, dtype)
        limits.shape("scales", scales, rows, topk)
    flat = expanded_permuted_rows.reshape(-1, width).float()
    low, high = (-1 if is_padded else 0), len(flat) - 1
    is_inside = bool(((index >= low) & (index <= high)).all())
    limits.require(is_inside, f"expanded_src_to_dst_row has values outside {low} to {high} (drop_pad_mode {drop_pad_mode})")
    places = index.view(rows, topk) if is_row_major else index.view(topk, rows).t()
    out = _skipped(limits, skip1, skip2, (rows, width), dtype)
    extra = _bias_rows(limits, bias, export_for_source_row, (rows, topk, width), dtype)
    for choice in range(topk):
        at = places[:, choice]
        there = (at >= 0).unsqueeze(1)
        row = flat[at.clamp(min=0).long()] if len(flat) else torch.zeros(rows, width)
        row = row if extra is None else row + extra[:, choice]
        weight = 1.0 if scales is None else scales[:, choice : choice + 1].float()
        out = out + torch.where(there, row * weight, 0.0)
    return out.to(dtype)


def _choices(limits: Limits, scales: Tensor | None, k: int | None) -> int:
    """K: of the scales; without them that of the argument, which older releases do not have."""
    if scales is None:
        limits.require(k is not None and k >= 1, f"k is {k}, at least 1 is needed without scales")
        return int(k or 1)
    limits.shape("scales", scales, None, None)
    limits.require(scales.shape[1] >= 1, "scales have no columns")
    return scales.shape[1]


def _skipped(
    limits: Limits, skip1: Tensor | None, skip2: Tensor | None, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    out = torch.zeros(shape)
    limits.require(skip2 is None or skip1 is not None, "skip2 is given, but skip1 is not")
    for argument, skip in (("skip1", skip1), ("skip2", skip2)):
        if skip is not None:
            limits.dtype(argument, skip, dtype)
            limits.shape(argument, skip, *shape)
            out = out + skip.float()
    return out


def _bias_rows(
    limits: Limits, bias: Tensor | None, experts: Tensor | None, shape: tuple[int, int, int], dtype: torch.dtype
) -> Tensor | None:
    """[rows, K, H], the bias of the expert of every choice."""
    if bias is None:
        return None
    limits.dtype("bias", bias, dtype)
    limits.shape("bias", bias, None, shape[2])
    limits.require(experts is not None, "export_for_source_row is not given, which bias needs")
    assert experts is not None
    limits.dtype("export_for_source_row", experts, torch.int32)
    limits.shape("export_for_source_row", experts, *shape[:2])
    is_inside = bool(((experts >= 0) & (experts < len(bias))).all())
    limits.require(is_inside, f"export_for_source_row has values outside 0 to {len(bias) - 1}")
    return bias.float()[experts.long()]


def npu_moe_re_routing(
    tokens: Tensor,
    expert_token_num_per_rank: Tensor,
    *,
    per_token_scales: Tensor | None = None,
    expert_token_num_type: int = 1,
    idx_type: int = 0,
    tokens_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From runs by (rank, expert) to runs by (expert, rank); the index holds the old place of every row."""
    limits = Limits("npu_moe_re_routing")
    limits.absent(tokens_dtype=tokens_dtype)
    limits.one_of("expert_token_num_type", expert_token_num_type, 1)
    limits.one_of("idx_type", idx_type, 0)
    limits.dtype("tokens", tokens, torch.int8, *FLOATS)
    limits.shape("tokens", tokens, None, None)
    limits.within("width of tokens", tokens.shape[1], 1, MAX_REROUTED_WIDTH)
    counts = expert_token_num_per_rank
    limits.dtype("expert_token_num_per_rank", counts, torch.int32, torch.int64)
    limits.shape("expert_token_num_per_rank", counts, None, None)
    rows, (ranks, experts) = len(tokens), counts.shape
    limits.groups("expert_token_num_per_rank", counts.flatten(), is_sums=False, rows=rows)
    owner = torch.arange(experts).repeat(ranks).repeat_interleave(counts.flatten().long())
    order = owner.sort(stable=True).indices
    out, index = undefined(*tokens.shape, dtype=tokens.dtype), undefined(rows, dtype=torch.int32)
    out[: len(order)], index[: len(order)] = tokens[order], order.int()
    scales = undefined(rows, dtype=torch.float32)
    if per_token_scales is not None:
        limits.dtype("per_token_scales", per_token_scales, torch.float32)
        limits.shape("per_token_scales", per_token_scales, rows)
        scales[: len(order)] = per_token_scales[order]
    return out, scales, index, counts.sum(0, dtype=counts.dtype)


def compute_n_gram_ids(
    oe_weights: Tensor,
    oe_mods: Tensor,
    exclusive_oe_embeder_size_sums: Tensor,
    tokens: Tensor,
    exclusive_req_len_sums: Tensor,
    oe_token_table: Tensor,
    row_indices: Tensor,
    column_starts: Tensor,
    batch_size: int,
    oe_n: int,
    oe_k: int,
    max_context_len: int,
) -> Tensor:
    """Hash of the last 2 ... n tokens for each of k sub-tables, plus the sub-table's start -> int32 [T, (n - 1) k].

    The tokens are read from the table, where the request's first one of this call stands at its column start; the look-back
    ends at the row's start and at negative entries. ``exclusive_req_len_sums`` are the ends of requests in ``tokens``.
    """
    limits = Limits("compute_n_gram_ids")
    tables = (oe_n - 1) * oe_k
    limits.within("oe_n", oe_n, 2, 64)
    limits.within("oe_k", oe_k, 1, 64)
    for argument, tensor, dtype, shape in (
        ("oe_weights", oe_weights, torch.int32, (oe_n - 1, oe_k, oe_n)),
        ("oe_mods", oe_mods, torch.int32, (oe_n - 1, oe_k)),
        ("exclusive_oe_embeder_size_sums", exclusive_oe_embeder_size_sums, torch.int32, (tables + 1,)),
        ("tokens", tokens, torch.int32, (None,)),
        ("exclusive_req_len_sums", exclusive_req_len_sums, torch.int32, (batch_size,)),
        ("oe_token_table", oe_token_table, torch.int32, (None, max_context_len)),
        ("row_indices", row_indices, torch.int64, (batch_size,)),
        ("column_starts", column_starts, torch.int32, (batch_size,)),
    ):
        limits.dtype(argument, tensor, dtype)
        limits.shape(argument, tensor, *shape)
    counts = limits.groups("exclusive_req_len_sums", exclusive_req_len_sums, is_sums=True, rows=len(tokens))
    _check_places(limits, row_indices, column_starts, counts, oe_token_table)
    out, row_number = undefined(len(tokens), tables, dtype=torch.int32), 0
    weights, mods, starts = oe_weights.long(), oe_mods.long(), exclusive_oe_embeder_size_sums[:-1].long()
    for request, count in enumerate(counts):
        history = oe_token_table[row_indices[request]].tolist()
        for column in range(int(column_starts[request]), int(column_starts[request]) + count):
            seen = _look_back(history[max(0, column - oe_n + 1) : column + 1])
            hashes = torch.zeros_like(mods)
            for back, token in enumerate(seen):
                terms = token * weights[:, :, back] % mods
                terms[: max(0, back - 1)] = 0  # row j of the tables looks at j + 2 tokens
                hashes += terms
            out[row_number] = (hashes % mods).flatten().add(starts).int()
            row_number += 1
    return out


def _look_back(history: list[int]) -> list[int]:
    """The newest token first, up to the first negative one."""
    newest_first = history[::-1]
    stops = [place for place, token in enumerate(newest_first) if token < 0]
    return newest_first[: stops[0]] if stops else newest_first


def npu_update_oe_token_table(
    tokens: Tensor,
    req_lens: Tensor,
    row_indices: Tensor,
    column_starts: Tensor,
    ignore_tokens: Tensor,
    batch_size: int,
    max_len: int,
    oe_token_table: Tensor,
) -> None:
    """Writes every request's tokens into its row, from its column start; ignored ones become -1."""
    limits = Limits("npu_update_oe_token_table")
    for argument, tensor, dtype, shape in (
        ("tokens", tokens, torch.int32, (None,)),
        ("req_lens", req_lens, torch.int32, (batch_size,)),
        ("row_indices", row_indices, torch.int64, (batch_size,)),
        ("column_starts", column_starts, torch.int32, (batch_size,)),
        ("ignore_tokens", ignore_tokens, torch.int32, (None,)),
        ("oe_token_table", oe_token_table, torch.int32, (None, max_len)),
    ):
        limits.dtype(argument, tensor, dtype)
        limits.shape(argument, tensor, *shape)
    lengths = limits.groups("req_lens", req_lens, is_sums=False, rows=len(tokens))
    _check_places(limits, row_indices, column_starts, lengths, oe_token_table)
    written = torch.where(torch.isin(tokens, ignore_tokens), -1, tokens)
    start = 0
    for row, column, length in zip(row_indices.tolist(), column_starts.tolist(), lengths, strict=True):
        oe_token_table[row, column : column + length] = written[start : start + length]
        start += length


def _check_places(limits: Limits, rows: Tensor, columns: Tensor, lengths: Sequence[int], table: Tensor) -> None:
    height, width = table.shape
    for row, column, length in zip(rows.tolist(), columns.tolist(), lengths, strict=True):
        limits.within("row_indices", row, 0, height - 1)
        limits.within("column_starts", column, 0, width - 1)
        limits.require(column + length <= width, f"columns {column} to {column + length} lie beyond a table of {width}")


KERNELS: dict[str, Callable[..., Any]] = {
    "npu_moe_gating_top_k": npu_moe_gating_top_k,
    "npu_moe_init_routing_v2": npu_moe_init_routing_v2,
    "npu_moe_finalize_routing": npu_moe_finalize_routing,
    "npu_moe_re_routing": npu_moe_re_routing,
}
OWN_KERNELS: dict[str, tuple[str, Callable[..., Any]]] = {
    "npu::compute_n_gram_ids": (
        "(Tensor oe_weights, Tensor oe_mods, Tensor exclusive_oe_embeder_size_sums, Tensor tokens, "
        "Tensor exclusive_req_len_sums, Tensor oe_token_table, Tensor row_indices, Tensor column_starts, "
        "int batch_size, int oe_n, int oe_k, int max_context_len) -> Tensor",
        compute_n_gram_ids,
    ),
    "flash::npu_update_oe_token_table": (
        "(Tensor tokens, Tensor req_lens, Tensor row_indices, Tensor column_starts, Tensor ignore_tokens, "
        "int batch_size, int max_len, Tensor(a!) oe_token_table) -> ()",
        npu_update_oe_token_table,
    ),
}
_own: list[torch.library.Library] = []


def define_own() -> None:
    """The operators of a deployment's package, once a process; a backend finds them with ``hasattr``."""
    if _own:
        return
    for name, (schema, kernel) in OWN_KERNELS.items():
        namespace, operator = name.split("::")
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(operator + schema)
        library.impl(operator, kernel, "CPU")
        _own.append(library)
