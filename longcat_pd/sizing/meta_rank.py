"""One rank at full size on torch's meta device, where tensors have shapes and no memory: what it allocates and reads.

The modules are those that serve, told what they are told there. What is seen is what is loaded, not the form that a
device's operators give to weights afterwards. Reads no checkpoint; knows no plan.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from longcat_pd import kernels
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.models.causal_lm import CausalLM
from longcat_pd.models.stage import Stage, data_type, stage_context
from longcat_pd.models.weight_spec import WeightSpec
from longcat_pd.parallel.layout import ParallelLayout
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.parallel.platform import HostRuntime, Platform

_META = torch.device("meta")
_NOWHERE = Platform(
    kind="meta",
    torch_device="meta",
    is_indexed=False,
    collective_backend="",
    collectives="pairwise",
    runtime=HostRuntime(),
)


@dataclass(frozen=True, slots=True)
class Read:
    """One reading of a checkpoint tensor of some shape. ``part``: first and end in every dimension."""

    name: str
    shape: tuple[int, ...]
    part: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class BuiltRank:
    """What a rank reads, in its order, and allocates, in bytes by part of the plan.

    ``num_stored``: numbers that were stored in its ``num_parameters``.
    """

    rank: int
    reads: tuple[Read, ...]
    memory: Mapping[str, int]
    num_stored: int
    num_parameters: int


def build_rank(rank: int, spec: InstanceSpec, config: ModelConfig, *, int8: Collection[str]) -> BuiltRank:
    """A rank of an instance, alone. ``int8``: names, without ``.weight``, of what is stored so.

    Raises:
        RuntimeError: what a module asks for does not fit where it stores it.
        ConfigError: the configuration does not fit.
    """
    mesh = Mesh(ParallelLayout.of(spec.parallel), rank, {}, platform=_NOWHERE)
    stage, dtype = Stage.of(spec, config, mesh.axis("pp").rank), data_type(spec, config)
    cache = KVCache.of_layers(config, stage.cached, engine=spec.engine, dtype=dtype, device=_META)
    context = stage_context(stage, spec, config=config, mesh=mesh, ops=_operators(), cache=cache, int8=int8)
    model = CausalLM(replace(context, host=_META if context.host is not None else None))
    stored_as = {"float": dtype, "int8": torch.int8, "scale": torch.float32}
    reads, num_stored = [], 0
    for asked in model.weight_specs():
        read = _read(asked)
        sizes = [end - first for first, end in read.part]
        asked.store(torch.empty(sizes, dtype=stored_as[asked.kind], device=_META))
        num_stored += math.prod(sizes)
        reads.append(read)
    return BuiltRank(
        rank=rank,
        reads=tuple(reads),
        memory=dict(model.memory(cache)),
        num_stored=num_stored,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _read(asked: WeightSpec) -> Read:
    wanted = asked.region or (slice(None),) * len(asked.shape)
    ends = (part.indices(size) for part, size in zip(wanted, asked.shape, strict=True))
    return Read(asked.name, asked.shape, tuple((first, end) for first, end, _ in ends))


def _operators() -> kernels.Ops:
    """Those that modules find when they are built; nothing is computed with them."""
    return replace(kernels.load("cpu"), moe_dispatch=_never, moe_combine=_never)


def _never(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("nothing is computed on the meta device")
