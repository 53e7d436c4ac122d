"""engine/rank_model.py: in which order a rank takes memory, and that it asks before it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longcat_pd import kernels
from longcat_pd.config.schema import ParallelConfig
from longcat_pd.engine import rank_model, stage_model
from longcat_pd.engine.rank_model import load_rank_model
from longcat_pd.errors import ConfigError
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.parallel.platform import HostRuntime
from tests.parity.conftest import MakeCheckpoint
from tests.parity.gloo import rank_specs


class Noting(HostRuntime):
    """``free``: bytes of a device."""

    def __init__(self, free: int) -> None:
        self.calls: list[str] = []
        self._free = free

    def memory(self) -> tuple[int, int] | None:
        self.calls.append("memory")
        return self._free, 1 << 40

    def synchronise(self) -> None:
        self.calls.append("warmed up")


def mesh_of(runtime: Noting) -> Mesh:
    mesh = Mesh.single()
    mesh.platform = replace(mesh.platform, runtime=runtime)
    return mesh


def test_communicators_then_cache_then_weights(tiny: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Noting(1 << 30)
    make, fill = KVCache.__init__, stage_model.fill_weights

    def cache(*args: object) -> None:
        runtime.calls.append("cache")
        make(*args)  # type: ignore[arg-type]

    def weights(*args: object, **more: object) -> int:
        runtime.calls.append("weights")
        return fill(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(KVCache, "__init__", cache)
    monkeypatch.setattr(stage_model, "fill_weights", weights)
    loaded = load_rank_model(rank_specs(tiny("chat"), ParallelConfig())[0], mesh_of(runtime))
    assert runtime.calls == ["warmed up", "memory", "cache", "weights"]
    assert loaded.device == torch.device("cpu")


def test_a_cache_that_does_not_fit_is_refused_before_anything_is_loaded(
    tiny: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_model, "build_stage", None)
    with pytest.raises(ConfigError, match=r"engine\.num_blocks=64: a cache of \d+ bytes on a device of which 1000 of"):
        load_rank_model(rank_specs(tiny("chat"), ParallelConfig())[0], mesh_of(Noting(1000)))


def test_sizes_that_operators_do_not_take_are_refused_before_anything_is_allocated(
    tiny: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise kernels.Unsupported("hidden_size=8: at least 1024", param="hidden_size")

    monkeypatch.setattr(stage_model, "operators_of", refuse)
    runtime = Noting(1 << 30)
    with pytest.raises(ConfigError, match="hidden_size=8: at least 1024"):
        load_rank_model(rank_specs(tiny("chat"), ParallelConfig())[0], mesh_of(runtime))
    assert runtime.calls == []
