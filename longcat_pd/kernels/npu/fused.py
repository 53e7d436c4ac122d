"""Dispatch and combine as two operators of the device, which are collectives of their own communicator.

Every default that means something here is passed, because some of them are not what is wanted (there is one shared expert
unless told) and releases differ. What dispatch gives beside rows, scales and counts is for combine alone to understand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longcat_pd.kernels.expert_ops import ExpertGroup, MoeCombine, MoeDispatch, Sent
from longcat_pd.kernels.npu.fused_limits import Variant, exceeded, variant_of
from longcat_pd.kernels.npu.settings import NpuSettings

OPERATORS = ("npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2")
_DYNAMIC_INT8 = 2


def fused_pair(settings: NpuSettings) -> tuple[MoeDispatch, MoeCombine]:
    """See ``ops.MoeDispatch`` and ``ops.MoeCombine``."""
    variant = variant_of(settings)
    dispatch, combine = _dispatch_of(settings, variant), _combine_of(settings, variant)
    return _with_copies_outside(dispatch, combine) if variant.is_bare else (dispatch, combine)


def _dispatch_of(settings: NpuSettings, variant: Variant) -> MoeDispatch:
    """A variant that is bare has to be given neither copies nor masks."""

    def dispatch(
        x: Tensor,
        expert_ids: Tensor,
        *,
        weights: Tensor,
        is_real: Tensor | None,
        group: ExpertGroup,
        is_int8: bool,
    ) -> Sent:
        _check(variant, x, expert_ids, group, is_real)
        expanded, scales, assist, counts, received, received_tp, expanded_weights = (
            torch.ops.npu.npu_moe_distribute_dispatch_v2(
                x,
                expert_ids.int(),
                scales=None,
                x_active_mask=is_real,
                expert_scales=weights if variant.is_bare else None,
                quant_mode=_DYNAMIC_INT8 if is_int8 else 0,
                expert_token_nums_type=1,
                **_common(settings, group),
            )
        )
        return Sent(expanded, scales if is_int8 else None, counts, (assist, received, received_tp, expanded_weights))

    return dispatch


def _combine_of(settings: NpuSettings, variant: Variant) -> MoeCombine:
    def combine(
        y: Tensor,
        sent: Sent,
        *,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        is_real: Tensor | None,
        group: ExpertGroup,
    ) -> Tensor:
        assist, received, received_tp, expanded_weights = sent.handle
        total: Tensor = torch.ops.npu.npu_moe_distribute_combine_v2(
            y,
            expert_ids.int(),
            assist,
            received,
            weights,
            tp_send_counts=received_tp,
            x_active_mask=is_real,
            expand_scales=expanded_weights if variant.is_bare else None,
            shared_expert_x=None,
            ori_x=x if group.num_copies else None,
            comm_quant_mode=0,
            **_common(settings, group),
        )
        return total

    return combine


def _common(settings: NpuSettings, group: ExpertGroup) -> dict[str, Any]:
    """What both operators take. ``global_bs`` 0: all ranks hand in equally many rows."""
    return {
        "group_ep": group.communicator,
        "ep_world_size": group.size,
        "ep_rank_id": group.rank,
        "moe_expert_num": group.num_experts,
        "group_tp": "",
        "tp_world_size": 0,
        "tp_rank_id": 0,
        "expert_shard_type": 0,
        "shared_expert_num": 0,
        "shared_expert_rank_num": 0,
        "global_bs": 0,
        "comm_alg": settings.dispatch_algorithm,
        "zero_expert_num": 0,
        "copy_expert_num": group.num_copies,
        "const_expert_num": 0,
    }


def _check(variant: Variant, x: Tensor, expert_ids: Tensor, group: ExpertGroup, is_real: Tensor | None) -> None:
    (rows, hidden), topk = x.shape, expert_ids.shape[1]
    assert len(expert_ids) == rows, f"{rows} rows and ids of {len(expert_ids)}"
    sizes = {"hidden": hidden, "ep_size": group.size, "rows": rows, "num_experts": group.num_experts, "topk": topk}
    wrong = exceeded(variant, **sizes)
    assert not wrong, "; ".join(wrong)
    assert not variant.is_bare or (group.num_copies == 0 and is_real is None), "neither copies nor masks travel here"
    assert group.communicator, "the ranks of these experts have no communicator of their own"


def _with_copies_outside(dispatch: MoeDispatch, combine: MoeCombine) -> tuple[MoeDispatch, MoeCombine]:
    """The same for operators that know neither copies nor masks.

    The places of copies go to experts with weight 0, and what copies give is added here. Rows that are not real travel
    like others.
    """

    def dispatch_all(
        x: Tensor, expert_ids: Tensor, *, weights: Tensor, is_real: Tensor | None, group: ExpertGroup, is_int8: bool
    ) -> Sent:
        ids, routed = with_stand_ins(expert_ids, weights, group)
        bare = group._replace(num_copies=0)
        sent = dispatch(x, ids, weights=routed, is_real=None, group=bare, is_int8=is_int8)
        return sent._replace(handle=(*sent.handle, ids, routed))

    def combine_all(
        y: Tensor,
        sent: Sent,
        *,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        is_real: Tensor | None,
        group: ExpertGroup,
    ) -> Tensor:
        *handle, ids, routed = sent.handle
        bare = group._replace(num_copies=0)
        there = sent._replace(handle=tuple(handle))
        total = combine(y, there, x=x, expert_ids=ids, weights=routed, is_real=None, group=bare)
        if group.num_copies == 0:
            return total
        kept = torch.where(expert_ids >= group.num_experts, weights, 0.0).sum(-1, keepdim=True)
        return (total.float() + kept * x.float()).to(total.dtype)

    return dispatch_all, combine_all


def with_stand_ins(expert_ids: Tensor, weights: Tensor, group: ExpertGroup) -> tuple[Tensor, Tensor]:
    """Ids and weights [T, topk] in which experts that a row did not choose, with weight 0, stand for copies.

    Those are the first ones behind a place that is every row's own, so that they are spread over all experts. Ids stay
    distinct: of 2 topk candidates at most topk are taken.
    """
    if group.num_copies == 0:
        return expert_ids, weights
    ids = expert_ids.int()  # graphs compare numbers of one type only
    (rows, topk), device = ids.shape, ids.device
    is_copy = ids >= group.num_experts
    order = torch.arange(2 * topk, dtype=torch.int32, device=device)
    first = (torch.arange(rows, dtype=torch.int32, device=device) + group.rank * rows) * topk
    candidates = (first.unsqueeze(1) + order) % group.num_experts
    is_taken = (candidates.unsqueeze(1) == ids.unsqueeze(2)).any(1)
    free = torch.where(is_taken, order + 2 * topk, order).sort(-1).values[:, :topk] % (2 * topk)
    place = (is_copy.cumsum(-1) - 1).clamp(min=0)
    stand_ins = candidates.gather(1, free.long()).gather(1, place)
    return torch.where(is_copy, stand_ins, ids), torch.where(is_copy, 0.0, weights)
