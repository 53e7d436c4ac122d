"""engine/rank.py and outbox.py as real processes: ready, plans, heartbeats, faults, Stop."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Literal

import pytest

from longcat_pd import wire
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import ParallelConfig, RankSpec
from longcat_pd.engine import rank
from longcat_pd.engine.handover import Lanes
from longcat_pd.engine.plan import RANK_MESSAGES, Heartbeat, RankMessage, RankReady, Segment, StepOutput, StepPlan, Stop
from longcat_pd.kv_cache.block_pool import GroupPool
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.kv_transfer.messages import TransferClosed
from longcat_pd.sizing.memory import instance_memory
from longcat_pd.tiny.make import write_tiny
from tests.forks import start_server
from tests.parity.gloo import BLOCK_SIZE, rank_specs
from tests.peers import OPEN
from tests.slots import admit

LIMIT_S = 30.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "chat"
    write_tiny(path, "chat", seed=0, dtype="float32", with_tokenizer=False, overrides=("num_layers=2",))
    return path


def rank_with_a_defect(config: str) -> None:
    rank.run_rank(wire.from_json(RankSpec, config), lanes_with_a_defect)


def lanes_with_a_defect(_spec: RankSpec, _cache: KVCache, _report: Callable[[TransferClosed], None]) -> Lanes:
    def run() -> None:
        raise ZeroDivisionError("a defect of a lane")

    threading.Thread(target=run).start()
    return None, None


class Instance:
    """Rank processes, and this test as their driver."""

    def __init__(
        self,
        checkpoint: Path,
        parallel: ParallelConfig,
        entry: Callable[[str], None] = rank.main,
        device: Literal["cpu", "npu"] = "cpu",
    ) -> None:
        self.plans = wire.BlockingSocket("router", "tcp://127.0.0.1:*", bind=True, admission=OPEN)
        self.outputs = wire.BlockingSocket("pull", "tcp://127.0.0.1:*", bind=True, admission=OPEN)
        self.codec: wire.Codec[StepPlan | Stop] = wire.Codec(StepPlan, Stop)
        self.messages: wire.Codec[RankMessage] = wire.Codec(*RANK_MESSAGES)
        context = multiprocessing.get_context("forkserver")
        start_server()
        self.processes: list[ForkServerProcess] = []
        self.identities: list[bytes] = []
        for spec in rank_specs(checkpoint, parallel, device=device):
            spec = replace(spec, plan_endpoint=self.plans.endpoint, output_endpoint=self.outputs.endpoint)
            self.spec = spec.instance
            self.identities.append(spec.identity)
            self.processes.append(context.Process(target=entry, args=(wire.to_json(spec),)))
        for process in self.processes:
            process.start()

    def hear(self, kind: type[RankMessage], count: int) -> list[RankMessage]:
        """The next ``count`` messages of a kind; others are passed over, but a fault never is."""
        found: list[RankMessage] = []
        deadline = time.monotonic() + LIMIT_S
        while len(found) < count:
            frames = self.outputs.recv(max(0.0, deadline - time.monotonic()))
            assert frames is not None, f"{len(found)} of {count} {kind.__name__}"
            message = self.messages.decode(frames[1:])
            assert frames[0] == self.identities[message.rank]
            assert not isinstance(message, StepOutput) or message.fault is None or kind is StepOutput, message
            if isinstance(message, kind):
                found.append(message)
        return found

    def start(self) -> list[RankMessage]:
        ready = self.hear(RankReady, len(self.processes))
        for _ in self.processes:
            assert self.plans.recv(LIMIT_S) is not None
        return ready

    def send(self, message: StepPlan | Stop) -> None:
        for identity in self.identities:
            self.plans.send([identity, *self.codec.encode(message)])

    def statuses(self) -> list[int | None]:
        for process in self.processes:
            process.join(LIMIT_S)
        return [process.exitcode for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.plans.close()
        self.outputs.close()


@pytest.fixture
def instance(checkpoint: Path) -> Iterator[Instance]:
    made = Instance(checkpoint, ParallelConfig(kvp_size=2, attn_tp_size=2))
    yield made
    made.close()


def test_a_life_from_ready_to_stop(instance: Instance) -> None:
    ready = instance.start()
    assert sorted(message.rank for message in ready) == [0, 1]
    measured = {message.rank: dict(message.memory) for message in ready if isinstance(message, RankReady)}
    spec = replace(instance.spec, parallel=replace(instance.spec.parallel, layers_per_stage=(2,)))
    for planned in instance_memory(spec, ModelConfig.load(spec.model.path)):
        found = measured[planned.rank]
        assert found["weights"] > 0 and found.pop("n-gram tables on host") == 0 and not planned.host_parts
        assert {name: planned.parts[name] for name in found} == found
    pool = GroupPool(0, 2, 64)
    first = admit(pool, 0, list(range(3, 20)), block_size=BLOCK_SIZE, room=4)
    instance.send(
        StepPlan(
            step_id=1,
            phase="prefill",
            admit=(first,),
            segments=(Segment(slot=0, start=0, num_tokens=17, is_last=True),),
        )
    )
    outputs = {o.rank: o for o in instance.hear(StepOutput, 2) if isinstance(o, StepOutput)}
    assert len(outputs[0].slots) == 1 and outputs[1].slots == ()
    beats = [b for b in instance.hear(Heartbeat, 4) if isinstance(b, Heartbeat)]
    assert {b.rank for b in beats} == {0, 1}
    assert sum({b.rank: b.accounts.blocks_live for b in beats}.values()) == 3
    assert all(b.step_id == 0 for b in beats)
    instance.send(StepPlan(step_id=2, phase="decode", retire=(0,)))
    instance.hear(StepOutput, 2)
    instance.send(Stop())
    assert instance.statuses() == [0, 0]


def test_a_missing_plan_is_a_fault_that_ends_the_rank(instance: Instance) -> None:
    instance.start()
    instance.send(StepPlan(step_id=2, phase="decode"))
    faults = [o.fault for o in instance.hear(StepOutput, 2) if isinstance(o, StepOutput)]
    assert all(fault is not None and "plan 2 after plan 0" in fault for fault in faults)
    assert instance.statuses() == [1, 1]


def test_a_killed_rank_fails_the_others_at_once(instance: Instance) -> None:
    instance.start()
    instance.processes[1].kill()
    pool = GroupPool(0, 2, 64)
    first = admit(pool, 0, [5, 6, 7], block_size=BLOCK_SIZE, room=4)
    began = time.monotonic()
    plan = StepPlan(
        step_id=1, phase="prefill", admit=(first,), segments=(Segment(slot=0, start=0, num_tokens=3, is_last=True),)
    )
    instance.plans.send([instance.identities[0], *instance.codec.encode(plan)])
    (output,) = instance.hear(StepOutput, 1)
    assert isinstance(output, StepOutput) and output.step_id == 1 and output.fault is not None
    assert instance.statuses()[0] == 1
    assert time.monotonic() - began < 10.0


def test_a_checkpoint_that_is_not_there_is_said_in_one_line(checkpoint: Path) -> None:
    instance = Instance(checkpoint / "no", ParallelConfig())
    try:
        (output,) = instance.hear(StepOutput, 1)
        assert isinstance(output, StepOutput) and output.step_id == 0
        assert output.fault is not None and "\n" not in output.fault and "config.json" in output.fault
        assert instance.statuses() == [2]
    finally:
        instance.close()


def test_a_device_whose_software_is_not_there_is_said_in_one_line(checkpoint: Path) -> None:
    instance = Instance(checkpoint, ParallelConfig(), device="npu")
    try:
        (output,) = instance.hear(StepOutput, 1)
        assert isinstance(output, StepOutput) and output.fault is not None
        assert output.fault.startswith("device=npu: needs the package torch_npu (2.6.0.post5") and "\n" not in output.fault
        assert instance.statuses() == [2]
    finally:
        instance.close()


def test_a_thread_that_ends_by_a_defect_ends_the_rank(checkpoint: Path) -> None:
    instance = Instance(checkpoint, ParallelConfig(), rank_with_a_defect)
    try:
        (output,) = instance.hear(StepOutput, 1)
        assert isinstance(output, StepOutput)
        assert output.fault is not None and "Traceback" in output.fault and "a defect of a lane" in output.fault
        assert instance.statuses() == [1]
    finally:
        instance.close()


def test_ranks_run_in_the_class_for_batch_work(instance: Instance) -> None:
    instance.start()
    for process in instance.processes:
        assert process.pid is not None
        assert os.sched_getscheduler(process.pid) == os.SCHED_BATCH


DRIVER = """
import asyncio, sys
from longcat_pd.clock import MonotonicClock
from longcat_pd.server.launch import ForkedRanks

async def main():
    ranks = ForkedRanks("longcat_pd.engine.rank:main", [sys.argv[1]], clock=MonotonicClock())
    await ranks.start(print)
    print(ranks.pids[0], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_rank_ends_with_its_driver(checkpoint: Path) -> None:
    outputs = wire.BlockingSocket("pull", "tcp://127.0.0.1:*", bind=True, admission=OPEN)
    (spec,) = rank_specs(checkpoint, ParallelConfig())
    spec = replace(spec, plan_endpoint="tcp://127.0.0.1:9", output_endpoint=outputs.endpoint)
    with subprocess.Popen([sys.executable, "-c", DRIVER, wire.to_json(spec)], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        assert outputs.recv(LIMIT_S) is not None  # it is ready and waits for plans
        driver.kill()
        began = time.monotonic()
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() - began < LIMIT_S
            time.sleep(0.05)
    outputs.close()
