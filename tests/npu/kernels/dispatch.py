"""CPU kernels of fused dispatch and combine: rows really travel between the ranks of a registered group.

``group_ep`` is a communicator's name, see ``groups.py``. ``choose_soc`` says which devices' limits hold; together with
``comm_alg`` it chooses a row of ``VARIANTS``. What dispatch gives besides rows, scales and counts is opaque, but combine
refuses what does not come from the dispatch that it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.npu.kernels.dispatch_limits import VARIANTS, Call, choose_soc
from tests.npu.kernels.groups import Item, register_group, unregister_group
from tests.npu.kernels.limits import FLOATS, Limits, undefined
from tests.npu.kernels.quant import quantised

__all__ = ["KERNELS", "VARIANTS", "choose_soc", "forget_dispatches", "register_group", "unregister_group"]

ASSIST = 128  # int32 of assist info for each row
STAMP, SERIAL, SOURCE, ROW, CHOICE = range(5)  # of which these are used
MAGIC = 0x1B2
UNUSED: dict[str, tuple[Any, ...]] = {
    "group_tp": ("",),
    "tp_world_size": (0, 1),
    "tp_rank_id": (0,),
    "expert_shard_type": (0,),
    "shared_expert_num": (0,),
    "shared_expert_rank_num": (0,),
    "const_expert_num": (0,),
}
_lock = threading.Lock()


def forget_dispatches() -> None:
    """Also those that were never combined; between tests that reuse a group's name."""
    with _lock:
        _serials.clear()
        _open.clear()


@dataclass(frozen=True)
class _Sent:
    """What a rank remembers of a dispatch until its combine."""

    ids: Tensor
    call: Call
    counts: Tensor
    num_active: int
    num_received: int


_serials: dict[tuple[str, int], int] = {}
_open: dict[tuple[str, int, int], _Sent] = {}


def _check_unused(limits: Limits, **arguments: Any) -> None:
    """What is neither used nor emulated."""
    for argument, value in arguments.items():
        limits.one_of(argument, value, *UNUSED[argument])


def npu_moe_distribute_dispatch_v2(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    expert_scales: Tensor | None = None,
    elastic_info: Tensor | None = None,
    performance_info: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    comm_alg: str = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
    y_dtype: int | None = None,
    x_dtype: int | None = None,
    scales_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Every row to the ranks of its experts. Received rows lie by expert, then by source rank, then by row."""
    limits = Limits("npu_moe_distribute_dispatch_v2")
    limits.absent(elastic_info=elastic_info, performance_info=performance_info, y_dtype=y_dtype, x_dtype=x_dtype)
    limits.absent(scales_dtype=scales_dtype)
    limits.dtype("x", x, *FLOATS)
    limits.shape("x", x, len(expert_ids), None)
    limits.one_of("quant_mode", quant_mode, 0, 2)
    limits.one_of("expert_token_nums_type", expert_token_nums_type, 0, 1)
    call = Call(group_ep, ep_world_size, ep_rank_id, moe_expert_num, zero_expert_num, copy_expert_num, global_bs, comm_alg)
    _check_unused(
        limits,
        group_tp=group_tp,
        tp_world_size=tp_world_size,
        tp_rank_id=tp_rank_id,
        expert_shard_type=expert_shard_type,
        shared_expert_num=shared_expert_num,
        shared_expert_rank_num=shared_expert_rank_num,
        const_expert_num=const_expert_num,
    )
    exchange, variant, num_active = call.check(limits, x.shape[1], expert_ids, x_active_mask)
    limits.require(
        expert_scales is not None or not variant.needs_scales, "expert_scales are not given, which hierarchy needs"
    )
    if expert_scales is not None:
        limits.dtype("expert_scales", expert_scales, torch.float32)
        limits.shape("expert_scales", expert_scales, *expert_ids.shape)
    if scales is not None:
        limits.one_of("quant_mode with scales", quant_mode, 2)
        limits.dtype("scales", scales, torch.float32)
        limits.shape("scales", scales, moe_expert_num, x.shape[1])
    outgoing = _outgoing(call, x, expert_ids[:num_active], scales, is_int8=quant_mode == 2)
    weights = torch.zeros(len(outgoing[0])) if expert_scales is None else expert_scales.flatten()[outgoing[1][:, 3].long()]
    serial = _next_serial(group_ep, ep_rank_id)
    common = [serial, global_bs, moe_expert_num, zero_expert_num, copy_expert_num, quant_mode, x.shape[1]]
    items = exchange(ep_rank_id, (*outgoing, weights, torch.tensor([len(x), *common])))
    _check_alike(limits, items, call, len(x))
    received = _received(call, items, call.capacity(*expert_ids.shape))
    counts = received.sums
    if expert_scales is not None:  # more of them, of no use to anybody
        most = call.most_rows(len(x)) * ep_world_size
        counts = torch.cat((counts, undefined(most * 2 * expert_ids.shape[1] * (ep_world_size // 8), dtype=torch.int32)))
    received.assist[:, STAMP], received.assist[:, SERIAL] = MAGIC, serial
    assist = undefined(max(expert_ids.numel(), received.assist.numel()), dtype=torch.int32)
    assist[: received.assist.numel()] = received.assist.flatten()
    with _lock:
        _open[group_ep, ep_rank_id, serial] = _Sent(expert_ids.clone(), call, counts.clone(), num_active, received.total)
    return (
        received.rows,
        received.scales,
        assist,
        received.counts if expert_token_nums_type == 1 else received.counts.cumsum(0),
        counts,
        undefined(max(tp_world_size, 1), dtype=torch.int32),
        torch.empty(0) if expert_scales is None else received.weights,
    )


def _next_serial(name: str, rank: int) -> int:
    with _lock:
        _serials[name, rank] = _serials.get((name, rank), 0) + 1
        return _serials[name, rank]


def _outgoing(call: Call, x: Tensor, ids: Tensor, smooth: Tensor | None, *, is_int8: bool) -> Item:
    """Rows for experts with weights, where each comes from (expert, row, choice, flat place), and their scales."""
    flat = ids.flatten().long()
    places = (flat < call.routed).nonzero().flatten()
    topk = max(ids.shape[1], 1)
    marks = torch.stack((flat[places], places // topk, places % topk, places), 1).int()
    rows = x[places // topk]
    if not is_int8:
        return rows, marks, torch.full((len(rows),), torch.nan)
    wide = rows.float() if smooth is None else rows.float() * smooth[flat[places]]
    q, scale = quantised(wide)
    return q, marks, scale


def _check_alike(limits: Limits, items: Sequence[Item], call: Call, rows: int) -> None:
    """Every rank has to call the operator with the same settings; rows may differ only if ``global_bs`` says how far."""
    settings = [item[4].tolist() for item in items]
    mine = settings[call.rank][1:]
    for rank, (count, *others) in enumerate(settings):
        limits.require(
            others == mine,
            f"rank {rank} has [number of dispatch, global_bs, routed, zero, copy, quant_mode, H] {others}, this one {mine}",
        )
        if call.global_bs:
            most = call.most_rows(rows)
            limits.require(count <= most, f"rank {rank} has {count} rows, global_bs {call.global_bs} allows {most} a rank")
        else:
            limits.require(count == rows, f"rank {rank} has {count} rows, this one {rows}, and global_bs is 0")


@dataclass(frozen=True)
class _Received:
    """Rows, scales, assist info and weights of ``capacity`` rows, of which ``total`` are there."""

    rows: Tensor
    scales: Tensor
    assist: Tensor
    weights: Tensor
    counts: Tensor
    sums: Tensor
    total: int


def _received(call: Call, items: Sequence[Item], capacity: int) -> _Received:
    first = call.rank * call.local
    parts, experts = [], []
    for source, (rows, marks, scales, weights, _) in enumerate(items):
        mine = ((marks[:, 0] >= first) & (marks[:, 0] < first + call.local)).nonzero().flatten()
        stamps = undefined(len(mine), ASSIST, dtype=torch.int32)
        stamps[:, SOURCE] = source
        stamps[:, [ROW, CHOICE]] = marks[mine, 1:3]
        parts.append((rows[mine], scales[mine], stamps, weights[mine]))
        experts.append(marks[mine, 0].long() - first)
    order = torch.cat(experts).sort(stable=True).indices
    columns = []
    for column in zip(*parts, strict=True):
        whole = torch.cat(column)[order]
        padded = undefined(capacity, *whole.shape[1:], dtype=whole.dtype)
        padded[: len(whole)] = whole
        columns.append(padded)
    by_source = torch.stack([torch.bincount(part, minlength=call.local) for part in experts], 1)
    return _Received(*columns, by_source.sum(1), by_source.flatten().cumsum(0).int(), len(order))


def npu_moe_distribute_combine_v2(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    expand_scales: Tensor | None = None,
    shared_expert_x: Tensor | None = None,
    elastic_info: Tensor | None = None,
    ori_x: Tensor | None = None,
    const_expert_alpha_1: Tensor | None = None,
    const_expert_alpha_2: Tensor | None = None,
    const_expert_v: Tensor | None = None,
    performance_info: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    comm_quant_mode: int = 0,
    comm_alg: str = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
) -> Tensor:
    """``sum of weights * results`` for the rows of this rank, copy experts giving ``ori_x``; added in fp32 by choice."""
    limits = Limits("npu_moe_distribute_combine_v2")
    limits.absent(shared_expert_x=shared_expert_x, elastic_info=elastic_info, performance_info=performance_info)
    limits.absent(const_expert_alpha_1=const_expert_alpha_1, const_expert_alpha_2=const_expert_alpha_2)
    limits.absent(const_expert_v=const_expert_v)
    limits.one_of("comm_quant_mode", comm_quant_mode, 0)
    limits.dtype("expand_x", expand_x, *FLOATS)
    limits.shape("expand_x", expand_x, None, None)
    rows, hidden = len(expert_ids), expand_x.shape[1]
    call = Call(group_ep, ep_world_size, ep_rank_id, moe_expert_num, zero_expert_num, copy_expert_num, global_bs, comm_alg)
    _check_unused(
        limits,
        group_tp=group_tp,
        tp_world_size=tp_world_size,
        tp_rank_id=tp_rank_id,
        expert_shard_type=expert_shard_type,
        shared_expert_num=shared_expert_num,
        shared_expert_rank_num=shared_expert_rank_num,
        const_expert_num=const_expert_num,
    )
    exchange, variant, num_active = call.check(limits, hidden, expert_ids, x_active_mask)
    capacity = call.capacity(*expert_ids.shape)
    limits.shape("expand_x", expand_x, capacity, hidden)
    limits.dtype("expert_scales", expert_scales, torch.float32)
    limits.shape("expert_scales", expert_scales, *expert_ids.shape)
    if variant.needs_scales:
        limits.require(expand_scales is not None, "expand_scales are not given, which hierarchy needs")
        assert expand_scales is not None
        limits.dtype("expand_scales", expand_scales, torch.float32)
        limits.shape("expand_scales", expand_scales, capacity)
    limits.require(ori_x is not None or not copy_expert_num, f"ori_x is not given for {copy_expert_num} copy experts")
    if ori_x is not None:
        limits.dtype("ori_x", ori_x, expand_x.dtype)
        limits.shape("ori_x", ori_x, rows, hidden)
    sent = _opened(limits, call, expert_ids, assist_info_for_combine, ep_send_counts)
    stamps = assist_info_for_combine[: capacity * ASSIST].view(-1, ASSIST)
    limits.require(
        sent.num_active == num_active, f"x_active_mask has {num_active} rows, that of dispatch {sent.num_active}"
    )
    valid = slice(0, sent.num_received)
    items = exchange(ep_rank_id, (expand_x[valid], stamps[valid, SOURCE : CHOICE + 1], stamps[0, SERIAL : SERIAL + 1]))
    results = _brought_back(limits, call, items, expert_ids[:num_active], hidden)
    out = undefined(rows, hidden, dtype=torch.float32)
    out[:num_active] = 0.0
    for choice in range(expert_ids.shape[1]):
        ids = expert_ids[:num_active, choice : choice + 1]
        product = results[:, choice]
        if ori_x is not None:
            is_copy = (ids >= call.routed + call.zero) & (ids < call.routed + call.zero + call.copy)
            product = torch.where(is_copy, ori_x[:num_active].float(), product)
        out[:num_active] += product * expert_scales[:num_active, choice : choice + 1]
    return out.to(expand_x.dtype)


def _opened(limits: Limits, call: Call, ids: Tensor, assist: Tensor, counts: Tensor) -> _Sent:
    """The dispatch that this combine ends; once."""
    limits.dtype("assist_info_for_combine", assist, torch.int32)
    limits.shape("assist_info_for_combine", assist, max(ids.numel(), call.capacity(*ids.shape) * ASSIST))
    stamp, serial = assist[STAMP].item(), int(assist[SERIAL])
    with _lock:
        sent = _open.get((call.group_ep, call.rank, serial)) if stamp == MAGIC else None
    limits.require(
        sent is not None, f"assist_info_for_combine (number {serial}) is of no dispatch that waits for its combine"
    )
    assert sent is not None
    limits.require(sent.call == call, f"arguments are {call}, those of dispatch were {sent.call}")
    limits.require(torch.equal(sent.ids, ids), f"expert_ids differ from those of dispatch {serial}")
    limits.dtype("ep_send_counts", counts, torch.int32)
    limits.require(torch.equal(sent.counts, counts), f"ep_send_counts differ from the ep_recv_counts of dispatch {serial}")
    with _lock:
        _open.pop((call.group_ep, call.rank, serial), None)
    return sent


def _brought_back(limits: Limits, call: Call, items: Sequence[Item], ids: Tensor, hidden: int) -> Tensor:
    """fp32 results [rows, K, H] of the experts with weights; 0 for others."""
    results, is_there = torch.zeros(*ids.shape, hidden), torch.zeros(ids.shape, dtype=torch.bool)
    mine = items[call.rank][2].item()
    for rank, (rows, origins, serial) in enumerate(items):
        limits.require(
            serial.item() == mine, f"rank {rank} combines its dispatch {serial.item()}, this one its dispatch {mine}"
        )
        own = (origins[:, 0] == call.rank).nonzero().flatten()
        places = origins[own, 1].long(), origins[own, 2].long()
        results[places] = rows[own].float()
        is_there[places] = True
    is_expected = ids < call.routed
    missing = int((is_expected != is_there).sum())
    limits.require(missing == 0, f"{missing} results of {int(is_expected.sum())} did not come back")
    return results


KERNELS: dict[str, Callable[..., Any]] = {
    "npu_moe_distribute_dispatch_v2": npu_moe_distribute_dispatch_v2,
    "npu_moe_distribute_combine_v2": npu_moe_distribute_combine_v2,
}
