"""A small model's context for unit tests of single modules: no checkpoint, no other ranks unless faked."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from longcat_pd import kernels
from longcat_pd.config.model import ModelConfig
from longcat_pd.kv_cache.spec import CacheSpec
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.models.context import ModelContext
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.tiny.configs import make_config


class FakeAxis:
    """Rank ``rank`` of ``size``; the others always contribute what ``others`` says to a sum."""

    def __init__(self, name: str, size: int, rank: int, others: float | Tensor = 0.0) -> None:
        self.name, self.size, self.rank, self._others = name, size, rank, others

    def all_reduce(self, x: Tensor) -> Tensor:
        return x + self._others


class FakeMesh:
    def __init__(self, *axes: FakeAxis) -> None:
        self._axes = {axis.name: axis for axis in axes}
        self._single = Mesh.single()

    def axis(self, name: Any) -> Any:
        return self._axes.get(name) or self._single.axis(name)


def make_context(
    variant: str = "2.0",
    *overrides: str,
    axes: tuple[FakeAxis, ...] = (),
    layers: range | None = None,
    dtype: torch.dtype = torch.float32,
) -> ModelContext:
    config = ModelConfig.from_dict(make_config(variant, overrides, dtype="float32"))
    layers = layers if layers is not None else range(config.num_layers)
    device = torch.device("cpu")
    return ModelContext(
        config=config,
        ops=kernels.load("cpu"),
        mesh=cast(Mesh, FakeMesh(*axes)),
        cache=KVCache(CacheSpec.of(config, layers, dtype), 4, 8, device),
        layers=layers,
        is_first=layers.start == 0,
        is_last=layers.stop == config.num_layers,
        kv_access="local",
        dtype=dtype,
        device=device,
    )
