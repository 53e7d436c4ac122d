"""Which cores a rank is bound to, and which device it has: by its place on its node, not in its instance."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from longcat_pd.config.schema import EngineConfig, InstanceSpec, ModelSection, ParallelConfig, RankSpec, TransferConfig
from longcat_pd.engine.executor import rank_specs
from longcat_pd.errors import ConfigError
from longcat_pd.parallel import mesh
from longcat_pd.parallel.cores import bind_to_cores
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.parallel.platform import platform_of


def ranks(*, cores: int) -> list[RankSpec]:
    """Eight over two machines."""
    instance = InstanceSpec(
        name="d0", role="decode", host="10.0.0.1", http_port=31000, device="cpu", model=ModelSection(path="/m"),
        parallel=ParallelConfig(dp_size=8), engine=EngineConfig(), transfer=TransferConfig(),
        nodes=("10.0.0.1", "10.0.0.2"), cores_per_device=cores,
    )  # fmt: skip
    return rank_specs(instance, "i")


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What processes of a machine whose cores are the odd ones up to 23 bind themselves to."""
    calls: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(1, 24, 2)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: calls.append(list(cores)))
    return calls


def test_neighbouring_cores_by_the_place_on_the_node(bound: list[list[int]]) -> None:
    for spec in ranks(cores=3):
        bind_to_cores(spec)
    assert bound == 2 * [[1, 3, 5], [7, 9, 11], [13, 15, 17], [19, 21, 23]]


def test_instances_that_share_a_machine_do_not_share_cores(bound: list[list[int]]) -> None:
    shared = [replace(spec, instance=replace(spec.instance, ranks_before=(0, 2))) for spec in ranks(cores=2)]
    for spec in shared:
        bind_to_cores(spec)
    assert bound[4:] == [[9, 11], [13, 15], [17, 19], [21, 23]] and bound[0] == [1, 3]
    with pytest.raises(ConfigError, match="4 ranks a node beside 2 of other instances need 18 cores, 12 are available"):
        bind_to_cores(replace(shared[7], instance=replace(shared[7].instance, cores_per_device=3)))


def test_nobody_is_bound_unless_it_is_asked_for(bound: list[list[int]]) -> None:
    for spec in ranks(cores=0):
        bind_to_cores(spec)
    assert bound == []


def test_too_few_cores_are_refused_with_the_numbers(bound: list[list[int]]) -> None:
    with pytest.raises(
        ConfigError, match=r"hosts\.cores_per_device=4: 4 ranks a node need 16 cores, 12 are available here"
    ):
        bind_to_cores(ranks(cores=4)[7])
    assert bound == []


def test_a_rank_has_the_device_of_its_place_on_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    indexed = replace(platform_of("cpu"), torch_device="cuda", is_indexed=True)
    monkeypatch.setattr(mesh, "platform_of", lambda kind: indexed)
    monkeypatch.setattr(mesh, "join_groups", lambda *_: {})
    devices = [Mesh.join(spec).device for spec in ranks(cores=0)]
    assert devices == 2 * [torch.device("cuda", index) for index in range(4)]
