"""The complete table of operators in plain torch: the definition that every backend is measured against."""

from __future__ import annotations

from dataclasses import replace

import torch

from longcat_pd.kernels.ops import Ops
from longcat_pd.kernels.reference import attention, indexer, int8, moe, ngram, norm, rows, sampling, steady


def table() -> Ops:
    """Every operator, on any device that torch has."""
    return Ops(
        rms_norm=norm.rms_norm,
        add_rms_norm=norm.add_rms_norm,
        layer_norm=norm.layer_norm,
        swiglu=norm.swiglu,
        linear=rows.linear,
        linear_int8=int8.linear_int8,
        head_linear=rows.head_linear,
        rope=norm.rope,
        store=attention.store,
        mla_prolog=attention.prolog_with(norm.rms_norm, norm.rope),
        select_positions=indexer.select_positions,
        index_candidates=indexer.index_candidates,
        paged_attention=attention.paged_attention,
        sparse_attention=attention.sparse_attention,
        merge_partials=attention.merge_partials,
        route_topk=moe.route_topk,
        grouped_experts=moe.experts_with(norm.swiglu),
        ngram_ids=ngram.ngram_ids,
        keyed_uniform=sampling.keyed_uniform,
        draw=sampling.draw,
        draw_edited=sampling.draw_edited,
        overlap=moe.overlap,
    )


def steady_table() -> Ops:
    """The same with bits that do not show how sums over keys and experts are spread, nor how a row was computed."""
    plain = table()
    return replace(
        plain,
        rms_norm=steady.rms_norm,
        add_rms_norm=steady.add_rms_norm,
        layer_norm=steady.layer_norm,
        swiglu=steady.swiglu,
        rope=steady.rope,
        mla_prolog=attention.prolog_with(steady.rms_norm, steady.rope),
        paged_attention=attention.wide(plain.paged_attention),
        sparse_attention=attention.wide(plain.sparse_attention),
        route_topk=steady.route_topk,
        grouped_experts=moe.experts_with(steady.swiglu, torch.float64),
    )
