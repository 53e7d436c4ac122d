"""Which part of the model a rank has, and what its modules are told. Pure: nothing is read, allocated or communicated."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.kernels.ops import Ops
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.models.context import ModelContext
from longcat_pd.parallel.layout import layers_of_stage
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.parallel.platform import platform_of

_HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The decoder layers of one pipeline stage, and what stands at their ends: embedding, head, draft layer."""

    layers: range
    is_first: bool
    is_last: bool
    has_draft: bool  # last stage only

    @classmethod
    def of(cls, instance: InstanceSpec, config: ModelConfig, pp_rank: int) -> Stage:
        """Stage number ``pp_rank``. The draft layer is there where drafts are made, or their cache is filled."""
        is_last = pp_rank == instance.parallel.pp_size - 1
        return cls(
            layers=layers_of_stage(instance.parallel, config.num_layers, pp_rank),
            is_first=pp_rank == 0,
            is_last=is_last,
            has_draft=is_last and instance.engine.num_draft_tokens > 0,
        )

    @property
    def cached(self) -> range:
        """The layers that have cache entries; number ``num_layers`` is the draft layer."""
        return range(self.layers.start, self.layers.stop + self.has_draft)


def stage_context(
    stage: Stage,
    instance: InstanceSpec,
    *,
    config: ModelConfig,
    mesh: Mesh,
    ops: Ops,
    cache: KVCache,
    int8: Collection[str],
) -> ModelContext:
    """What the modules of the stage are told on this rank. ``int8``: names of what the checkpoint stores so."""
    return ModelContext(
        config=config,
        ops=ops,
        mesh=mesh,
        cache=cache,
        layers=stage.layers,
        is_first=stage.is_first,
        is_last=stage.is_last,
        kv_access=mesh.cache_shard.access,
        dtype=data_type(instance, config),
        device=mesh.device,
        int8=frozenset(int8),
        moe_dispatch=instance.parallel.moe_dispatch,
        host=_host_of(instance),
        has_draft=stage.has_draft,
    )


def _host_of(instance: InstanceSpec) -> torch.device | None:
    """Where the rows of n-gram tables are kept if not on the rank's device; None also where ranks have no devices."""
    has_devices = platform_of(instance.device).is_indexed
    return _HOST if has_devices and instance.parallel.ngram_tables == "host" else None


def data_type(instance: InstanceSpec, config: ModelConfig) -> torch.dtype:
    """What the model computes in: as configured, else as the checkpoint says."""
    name = config.torch_dtype if instance.model.dtype == "auto" else instance.model.dtype
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
