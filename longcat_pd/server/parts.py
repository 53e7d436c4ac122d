"""What a worker's driver is put together from. The role adds its service and its side of the control sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from longcat_pd.clock import Clock
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.engine.driver import Engine
from longcat_pd.engine.executor import Executor, ProcessExecutor, rank_specs
from longcat_pd.kv_transfer.messages import Hello
from longcat_pd.metrics import Metrics
from longcat_pd.server.fault_board import FaultBoard
from longcat_pd.server.identity import own_hello
from longcat_pd.server.instance_ranks import processes_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a role builds its service from. ``told_to_end``: by one of its machines, so that the instance drains.

    ``faults``: where the instance can be told to fail.
    """

    spec: InstanceSpec
    hello: Hello
    engine: Engine
    clock: Clock
    metrics: Metrics
    told_to_end: asyncio.Event
    vocab_size: int
    hidden_size: int
    faults: FaultBoard | None = None


def make_parts(
    spec: InstanceSpec,
    rank_entry: str,
    clock: Clock,
    *,
    watch: Callable[[Executor], Executor] | None = None,
    on_progress: Callable[[], None] = lambda: None,
) -> Parts:
    """An engine over rank processes that is not started. Raises ConfigError.

    ``rank_entry``: module:function. ``watch``: puts an executor that looks on in front of the ranks'.
    ``on_progress``: of the start, which ``Readiness.start`` tells.
    """
    model = ModelConfig.load(spec.model.path)
    hello = own_hello(spec, model)
    metrics = Metrics(role=spec.role, instance=spec.name)
    metrics.build_info(version=hello.code_version, model_digest=hello.model_digest, wire_version=str(hello.wire_version))
    ranks = rank_specs(spec, hello.incarnation)
    told_to_end = asyncio.Event()
    processes = processes_of(ranks, rank_entry, hello=hello, on_end=told_to_end.set, clock=clock)
    executor = ProcessExecutor(ranks, processes, config=spec.engine, clock=clock, on_progress=on_progress)
    engine = Engine(
        spec.engine,
        spec.parallel,
        executor=executor if watch is None else watch(executor),
        eos_token_ids=frozenset(model.eos_token_id),
        clock=clock,
        metrics=metrics,
    )
    return Parts(
        spec=spec,
        hello=hello,
        engine=engine,
        clock=clock,
        metrics=metrics,
        told_to_end=told_to_end,
        faults=FaultBoard(spec, executor.order) if spec.faults else None,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
    )
