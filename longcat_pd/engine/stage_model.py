"""One rank's part of the model: its operators, its modules, its weights. Knows neither plans nor what is sampled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from longcat_pd import kernels
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec, NpuConfig
from longcat_pd.errors import ConfigError
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.models.causal_lm import CausalLM
from longcat_pd.models.checkpoint import int8_modules, open_checkpoint
from longcat_pd.models.context import ModelContext
from longcat_pd.models.weights import fill_weights
from longcat_pd.parallel.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class StageModel:
    """What was built, with its weights."""

    model: CausalLM
    ops: kernels.Ops
    weight_bytes: int


def build_stage(
    instance: InstanceSpec, mesh: Mesh, *, config: ModelConfig, cache: KVCache, layers: range, has_draft: bool
) -> StageModel:
    """The modules of ``layers``, filled from the checkpoint, with what they compute with.

    Raises:
        ConfigError: the checkpoint, the device or the configuration do not fit.
    """
    pp = mesh.axis("pp")
    has_weights = instance.model.weights == "checkpoint"
    int8 = int8_modules(open_checkpoint(Path(instance.model.path))) if has_weights else frozenset()
    dtype = data_type(instance, config)
    with refusals():
        ops = _operators(instance, config, is_int8=bool(int8))
    context = ModelContext(
        config=config,
        ops=ops,
        mesh=mesh,
        cache=cache,
        layers=layers,
        is_first=pp.rank == 0,
        is_last=pp.rank == pp.size - 1,
        kv_access=mesh.cache_shard.access,
        dtype=dtype,
        device=mesh.device,
        int8=int8,
        moe_dispatch=instance.parallel.moe_dispatch,
        has_draft=has_draft,
    )
    model = CausalLM(context)
    weight_bytes = fill_weights(model.weight_specs(), instance.model, config=config)
    with refusals():
        model.prepare()
    return StageModel(model=model, ops=ops, weight_bytes=weight_bytes)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """What operators do not take is a ConfigError."""
    try:
        yield
    except kernels.Unsupported as error:
        raise ConfigError(error.message, param=error.param) from error


def _operators(instance: InstanceSpec, config: ModelConfig, *, is_int8: bool) -> kernels.Ops:
    engine, npu = instance.engine, npu_settings(instance.npu, data_type(instance, config))
    kernels.check_sizes(instance.device, sizes_of(instance, config, is_int8=is_int8), npu=npu)
    return kernels.load(instance.device, exe_mode=engine.exe_mode, is_steady=is_int8, unfused=engine.unfused, npu=npu)


def sizes_of(instance: InstanceSpec, config: ModelConfig, *, is_int8: bool) -> kernels.ModelSizes:
    """What operators are asked to take, of one rank of the instance."""
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
    """The most rows that a rank hands in to experts at once: its share of a decode step, or of a chunk of prompts."""
    parallel, engine = instance.parallel, instance.engine
    decoded = engine.max_num_seqs // parallel.dp_size * (1 + engine.num_draft_tokens)
    prompts = 0 if instance.role == "decode" else -(-engine.max_num_batched_tokens // parallel.cp_size)
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


def data_type(instance: InstanceSpec, config: ModelConfig) -> torch.dtype:
    """What the model computes in: as configured, else as the checkpoint says."""
    name = config.torch_dtype if instance.model.dtype == "auto" else instance.model.dtype
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
