"""The entries of a mixture of experts in the table of an NPU, and how it wants weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from longcat_pd.kernels.npu import experts, fused, weights
from longcat_pd.kernels.npu.operators import has, require
from longcat_pd.kernels.npu.settings import NpuSettings
from longcat_pd.kernels.ops import Ops


def with_experts(made: Ops, settings: NpuSettings) -> Ops:
    """Experts, and weights as these operators want them."""
    require(*experts.OPERATORS, purpose="a mixture of experts")
    dispatch, combine = fused.fused_pair(settings) if all(map(has, fused.OPERATORS)) else (None, None)
    return replace(
        made,
        prepare=weights.preparing(settings.dtype),
        route_topk=experts.route_topk,
        grouped_experts=experts.experts_in(settings.dtype),
        expert_rows=experts.rows_in(settings.dtype),
        moe_dispatch=dispatch,
        moe_combine=combine,
        exact=torch.float32,  # a device computes fp64 on its host processor
    )
