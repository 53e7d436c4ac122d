"""One rank's part of the model: its operators, its modules, its weights. Knows neither plans nor what is sampled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from longcat_pd import kernels
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.engine.operators import operators_of, refusals
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
        ops = operators_of(instance, config, dtype=dtype, int8=int8)
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


def data_type(instance: InstanceSpec, config: ModelConfig) -> torch.dtype:
    """What the model computes in: as configured, else as the checkpoint says."""
    name = config.torch_dtype if instance.model.dtype == "auto" else instance.model.dtype
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
