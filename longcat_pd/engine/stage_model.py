"""One rank's part of the model: its operators, its modules, its weights. Knows neither plans nor what is sampled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from longcat_pd import kernels
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec, NpuConfig
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
    engine = instance.engine
    ops = kernels.load(
        instance.device,
        exe_mode=engine.exe_mode,
        is_steady=bool(int8),
        unfused=engine.unfused,
        npu=npu_settings(instance.npu),
    )
    context = ModelContext(
        config=config,
        ops=ops,
        mesh=mesh,
        cache=cache,
        layers=layers,
        is_first=pp.rank == 0,
        is_last=pp.rank == pp.size - 1,
        kv_access=mesh.cache_shard.access,
        dtype=data_type(instance, config),
        device=mesh.device,
        int8=int8,
        moe_dispatch=instance.parallel.moe_dispatch,
        has_draft=has_draft,
    )
    model = CausalLM(context)
    weight_bytes = fill_weights(model.weight_specs(), instance.model, config=config)
    model.prepare()
    return StageModel(model=model, ops=ops, weight_bytes=weight_bytes)


def npu_settings(npu: NpuConfig) -> kernels.NpuSettings:
    """The part of the configuration that operators know."""
    return kernels.NpuSettings(
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
