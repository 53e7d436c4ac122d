"""The complete table of operators in plain torch: the definition that every backend is measured against."""

from __future__ import annotations

from dataclasses import replace

import torch

from longcat_pd.kernels.ops import Ops
from longcat_pd.kernels.reference import attention, indexer, int8, moe, ngram, norm, rows, sampling, steady


def table() -> Ops:
    """Every operator, on any device that torch has."""
    mla_prolog, mla_store = attention.prolog_with(norm.rms_norm, norm.rope)
    return Ops(
        prepare=rows.prepare,
        rms_norm=norm.rms_norm,
        add_rms_norm=norm.add_rms_norm,
        layer_norm=norm.layer_norm,
        swiglu=norm.swiglu,
        linear=rows.linear,
        linear_int8=int8.linear_int8,
        head_linear=rows.head_linear,
        prepare_rotation=norm.prepare_rotation,
        rotation=norm.rotation,
        rope=norm.rope,
        store=attention.store,
        prepare_prolog=rows.prepare_prolog,
        mla_prolog=mla_prolog,
        mla_store=mla_store,
        select_positions=indexer.select_positions,
        index_candidates=indexer.index_candidates,
        paged_attention=attention.paged_attention,
        sparse_attention=attention.sparse_attention,
        merge_partials=attention.merge_partials,
        route_topk=moe.route_topk,
        grouped_experts=moe.experts_with(norm.swiglu),
        expert_rows=moe.rows_with(norm.swiglu),
        ngram_ids=ngram.ngram_ids,
        keyed_uniform=sampling.keyed_uniform,
        draw=sampling.draw,
        draw_edited=sampling.draw_edited,
        overlap=moe.overlap,
        prefetch=moe.prefetch,
    )


def steady_table() -> Ops:
    """The same with bits that do not show how sums over keys and experts are spread, nor how a row was computed."""
    plain = table()
    mla_prolog, mla_store = attention.prolog_with(steady.rms_norm, steady.rope)
    return replace(
        plain,
        rms_norm=steady.rms_norm,
        add_rms_norm=steady.add_rms_norm,
        layer_norm=steady.layer_norm,
        swiglu=steady.swiglu,
        rope=steady.rope,
        mla_prolog=mla_prolog,
        mla_store=mla_store,
        paged_attention=attention.wide(plain.paged_attention),
        sparse_attention=attention.wide(plain.sparse_attention),
        route_topk=steady.route_topk,
        grouped_experts=moe.experts_with(steady.swiglu, torch.float64),
        expert_rows=moe.rows_with(steady.swiglu),
    )
