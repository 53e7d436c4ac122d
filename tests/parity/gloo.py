"""Ranks of one instance in processes of their own, joined by gloo on loopback, for tests without a driver."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

from longcat_pd.config.schema import EngineConfig, InstanceSpec, ModelSection, ParallelConfig, RankSpec, TransferConfig
from longcat_pd.engine.plan import StepOutput, StepPlan
from longcat_pd.engine.runner import ModelRunner
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.parallel.platform import platform_of
from tests import pretend
from tests.forks import start_server
from tests.ports import free_base

R = TypeVar("R")
BLOCK_SIZE = 8


def rank_specs(
    path: Path,
    parallel: ParallelConfig,
    *,
    num_blocks: int = 64,
    timeout_s: float = 30.0,
    num_drafts: int = 0,
    device: Literal["cpu", "npu"] = "cpu",
) -> list[RankSpec]:
    """What the ranks of an instance in fp32 are told. ``npu``: the processor under that name, see ``pretend``."""
    port = free_base()
    engine = EngineConfig(
        block_size=BLOCK_SIZE,
        max_model_len=512,
        max_num_seqs=16,
        num_blocks=num_blocks,
        num_draft_tokens=num_drafts,
        step_timeout_s=timeout_s,
        rank_lost_s=0.0,
    )
    instance = InstanceSpec(
        name="x0",
        role="standalone",
        host="127.0.0.1",
        http_port=1,
        device=device,
        model=ModelSection(path=str(path), dtype="float32"),
        parallel=parallel,
        engine=engine,
        transfer=TransferConfig(),
    )
    return [
        RankSpec(
            instance=instance,
            rank=rank,
            incarnation="t",
            plan_endpoint="",
            output_endpoint="",
            rendezvous_host="127.0.0.1",
            rendezvous_port=port,
        )
        for rank in range(parallel.world_size)
    ]


def on_ranks(
    specs: Sequence[RankSpec], task: Callable[..., R], *arguments: object, collectives: str = "pairwise"
) -> list[R]:
    """``task(spec, mesh, *arguments)`` on every rank; the results by rank. ``collectives``: of device cpu."""
    start_server()
    with ProcessPoolExecutor(len(specs), mp_context=multiprocessing.get_context("forkserver")) as pool:
        futures = [pool.submit(_joined, spec, task, arguments, collectives) for spec in specs]
        return [future.result(timeout=900) for future in futures]  # a rank may have to compile its step


def run_plans(spec: RankSpec, mesh: Mesh, plans: Sequence[StepPlan]) -> list[StepOutput]:
    """A rank's answers to all plans, one after the other."""
    runner = ModelRunner(spec, mesh)
    outputs = [runner.execute(plan) for plan in plans]
    runner.close()
    return outputs


def _joined(spec: RankSpec, task: Callable[..., R], arguments: tuple[object, ...], collectives: str) -> R:
    pretend.host("cpu", collectives)
    pretend.host("npu", "native")
    platform_of(spec.instance.device).prepare_rank()
    mesh = Mesh.join(spec)
    try:
        return task(spec, mesh, *arguments)
    finally:
        mesh.leave()
