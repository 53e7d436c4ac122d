"""Ranks whose operators are the NPU's table, executed by CPU kernels of the real schemas: everything else is the product's.

A process that calls ``use_npu_table`` keeps it; in a test process use ``npu_table`` and have it taken away again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from longcat_pd import kernels, wire
from longcat_pd.config.schema import RankSpec
from longcat_pd.decode_worker.rank import arrival_lanes
from longcat_pd.engine.rank import run_rank
from longcat_pd.engine.runner import ModelRunner
from longcat_pd.kernels import Ops
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.prefill_worker.rank import push_lanes
from tests.compiled import Crowd, Life, Said, Work
from tests.npu import device
from tests.npu.kernels import groups

TABLE = kernels.load
SETTINGS = kernels.NpuSettings(dtype=torch.float32, is_overlapped=False, is_prefetched=False, is_series_a3=True)


def load_npu(device_kind: str, **options: object) -> Ops:
    """In place of ``kernels.load``: a rank on cpu asks for its operators and gets the NPU's."""
    assert device_kind == "cpu", device_kind
    return TABLE("npu", npu=SETTINGS)


@contextlib.contextmanager
def npu_table() -> Iterator[None]:
    """Models that are built here compute with the NPU's table."""
    device.install()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "load", load_npu)
        yield


def use_npu_table() -> None:
    """For the rest of this process's life."""
    device.install()
    kernels.load = load_npu


def join_experts(mesh: Mesh) -> None:
    """CPU kernels find the group of the fused pair by the name of its communicator."""
    mesh.warm_up()
    name = mesh.axis("ep").communicator
    if name:
        groups.register_group(name, groups.gloo_exchange(_resolve_process_group(name)))  # type: ignore[arg-type]


def live(spec: RankSpec, mesh: Mesh, work: Sequence[Work], crowd: Crowd, is_npu: bool) -> list[Said]:
    """A task for ``on_ranks``: a whole life of sequences on one rank."""
    if is_npu:
        use_npu_table()
        join_experts(mesh)
    engine, runner = spec.instance.engine, ModelRunner(spec, mesh)
    life = Life(
        runner,
        num_drafts=engine.num_draft_tokens,
        num_ranks=mesh.cache_shard.num_ranks,
        block_size=engine.block_size,
    )
    said = life.answers(work, crowd)
    runner.close()
    return said


def prefill_main(config: str) -> None:
    """Entry of a prefill rank."""
    use_npu_table()
    run_rank(wire.from_json(RankSpec, config), push_lanes)


def decode_main(config: str) -> None:
    """Entry of a decode rank."""
    use_npu_table()
    run_rank(wire.from_json(RankSpec, config), arrival_lanes)
