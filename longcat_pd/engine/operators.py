"""Which operators a rank computes with, and whether they take its part of the model. Knows no weights and no layers."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import torch

from longcat_pd import kernels
from longcat_pd.config.checks import chunk_rows
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec, NpuConfig
from longcat_pd.errors import ConfigError
from longcat_pd.log import logger


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """What operators do not take is a ConfigError."""
    try:
        yield
    except kernels.Unsupported as error:
        raise ConfigError(error.message, param=error.param) from error


def operators_of(instance: InstanceSpec, config: ModelConfig, *, dtype: torch.dtype, int8: Collection[str]) -> kernels.Ops:
    """The table of a rank. ``dtype``: of its model; ``int8``: names of what is multiplied as int8.

    Raises:
        kernels.Unsupported: the device, its software or the model's sizes do not fit.
    """
    engine, npu = instance.engine, npu_settings(instance.npu, dtype)
    has_int8_experts = any(".experts." in name for name in int8)
    num_bytes = kernels.check_sizes(instance.device, sizes_of(instance, config, is_int8=has_int8_experts), npu=npu)
    if num_bytes:  # who sets it, by HCCL_BUFFSIZE or npu.hccl.fused.buffer_mb, cannot be seen from here
        logger().info("fused_pair_needs_buffer", mb=-(-num_bytes // (1 << 20)), usual_mb=200)
    return kernels.load(instance.device, exe_mode=engine.exe_mode, is_steady=bool(int8), unfused=engine.unfused, npu=npu)


def sizes_of(instance: InstanceSpec, config: ModelConfig, *, is_int8: bool) -> kernels.ModelSizes:
    """What operators are asked to take, of one rank of the instance. ``is_int8``: its experts are."""
    parallel, engine, indexer = instance.parallel, instance.engine, config.indexer
    forced = 0 if indexer is None else indexer.index_init_tokens + indexer.index_local_tokens
    return kernels.ModelSizes(
        hidden=config.hidden_size,
        heads=config.num_attention_heads // (1 if parallel.kvp_size > 1 else parallel.attn_tp_size),
        block_size=engine.block_size,
        indexer=None
        if indexer is None
        else kernels.IndexerSizes(
            heads=indexer.index_n_heads,
            width=indexer.index_head_dim,
            init=indexer.index_init_tokens,
            budget=indexer.index_topk - forced,
        ),
        num_experts=config.n_routed_experts,
        num_copies=config.zero_expert_num,
        topk=config.moe_topk,
        inner_width=config.expert_ffn_hidden_size // parallel.moe_tp_size,
        is_int8=is_int8,
        fused_ranks=parallel.ep_size if parallel.moe_dispatch == "fused" and parallel.ep_size > 1 else 0,
        rows=most_rows(instance),
    )


def most_rows(instance: InstanceSpec) -> int:
    """The most rows that a rank hands in to experts at once: its share of a decode step, or of a chunk of prompts, of which
    a rank of ``cp`` has whole blocks."""
    parallel, engine = instance.parallel, instance.engine
    decoded = engine.max_num_seqs // parallel.dp_size * (1 + engine.num_draft_tokens)
    chunk = engine.max_num_batched_tokens
    prompts = 0 if instance.role == "decode" else min(chunk_rows(engine, parallel), chunk)
    return -(-max(decoded if instance.role != "prefill" else 0, prompts) // parallel.attn_tp_size)


def npu_settings(npu: NpuConfig, dtype: torch.dtype) -> kernels.NpuSettings:
    """The part of the configuration that operators know, and the type of the model."""
    return kernels.NpuSettings(
        dtype=dtype,
        is_overlapped=npu.is_moe_overlapped,
        cube_cores=npu.moe_cube_cores,
        vector_cores=npu.moe_vector_cores,
        main_cube_cores=npu.main_cube_cores,
        main_vector_cores=npu.main_vector_cores,
        is_prefetched=npu.is_prefetched,
        dispatch_algorithm=npu.comm_alg,
        is_series_a3=npu.soc == "A3",
    )
