"""Slow, obvious twins of operators: what a step is made of before anything is fused. To compare with, never to serve.

Each is its formula in plain torch, one operator of torch for a step of it, and means what its entry of ``ops.Ops`` means.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from longcat_pd.kernels.ops import Ops
from longcat_pd.kernels.unfused.attention import Attention
from longcat_pd.kernels.unfused.experts import experts_in
from longcat_pd.kernels.unfused.norms import Norms
from longcat_pd.kernels.unfused.prolog import prolog_of


def unfused(ops: Ops, parts: Collection[str], *, is_steady: bool) -> Ops:
    """``ops`` with the operators of these parts replaced: attention, experts, norms, prolog.

    ``is_steady``: twins of a steady table add up in fp64 too.
    """
    sums = torch.float64 if is_steady else torch.float32
    norms, attention = Norms(sums), Attention(sums)
    if "norms" in parts:
        ops = replace(
            ops,
            rms_norm=norms.rms_norm,
            add_rms_norm=norms.add_rms_norm,
            layer_norm=norms.layer_norm,
            swiglu=norms.swiglu,
            rope=norms.rope,
        )
    if "attention" in parts:
        ops = replace(ops, paged_attention=attention.paged, sparse_attention=attention.sparse)
    if "experts" in parts:
        ops = replace(ops, grouped_experts=experts_in(sums))
    if "prolog" in parts:
        ops = replace(ops, mla_prolog=prolog_of(ops))
    return ops
