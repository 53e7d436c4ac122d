"""ProcessExecutor over real sockets against scripted ranks in this process; time runs twenty times as fast."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from longcat_pd import wire
from longcat_pd.config.schema import (
    EngineConfig,
    InstanceSpec,
    ModelSection,
    ParallelConfig,
    RankSpec,
    TransferConfig,
)
from longcat_pd.engine.executor import OnExit, OnFailure, ProcessExecutor, rank_specs
from longcat_pd.engine.plan import (
    RANK_MESSAGES,
    AxisCollectives,
    Heartbeat,
    PlanMessage,
    RankAccounts,
    RankMessage,
    RankProgress,
    RankReady,
    SlotOutput,
    StepOutput,
    StepPlan,
    Stop,
    plan_codec,
)
from longcat_pd.errors import ConfigError, EngineFault, LongcatError, RankLost
from longcat_pd.faults import FaultOrder
from longcat_pd.kv_transfer.messages import TransferClosed
from longcat_pd.progress.steps import stages
from tests.peers import OPEN
from tests.ports import free_base

T = TypeVar("T")
SPEED = 20.0
LATE_S = 60.0  # of fast time, in which a busy machine does what it is to do after 15


class FastClock:
    def now(self) -> float:
        return time.monotonic() * SPEED

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / SPEED)

    async def within(self, seconds: float, awaitable: Awaitable[T]) -> T:
        return await asyncio.wait_for(awaitable, seconds / SPEED)


class Rank:
    """One scripted rank. It beats until told not to."""

    PLANS = plan_codec()
    MESSAGES = wire.Codec[RankMessage](*RANK_MESSAGES)

    def __init__(self, spec: RankSpec) -> None:
        self.rank = spec.rank
        self.identity = spec.identity
        self.plans = wire.AsyncSocket("dealer", spec.plan_endpoint, bind=False, admission=OPEN, identity=spec.identity)
        self.messages = wire.AsyncSocket("push", spec.output_endpoint, bind=False, admission=OPEN, linger_s=1.0)
        self.beating: asyncio.Task[None] | None = None
        self.entered, self.stands_in = 0, ""

    def say(self, message: RankMessage) -> None:
        self.messages.send([self.identity, *self.MESSAGES.encode(message)])

    def ready(self) -> None:
        self.plans.send([b""])
        self.say(
            RankReady(
                rank=self.rank, load_s=0.0, weight_bytes=1, num_blocks=9, cache_entries=(), model_digest="m",
                accounts=RankAccounts(rank=self.rank),
            )
        )  # fmt: skip
        self.beat()

    def beat(self) -> None:
        self.beating = asyncio.create_task(self._beat())

    def fall_silent(self) -> None:
        assert self.beating is not None
        self.beating.cancel()

    async def hear(self) -> PlanMessage:
        return self.PLANS.decode(await asyncio.wait_for(self.plans.recv(), 5.0))

    def answer(self, step_id: int, *, fault: str | None = None) -> None:
        slots = (SlotOutput(slot=0, token_ids=(7,)),) if self.rank == 0 and fault is None else ()
        self.say(StepOutput(step_id=step_id, rank=self.rank, slots=slots, fault=fault, accounts=self.accounts()))

    def stand(self, axis: str, entered: int) -> None:
        """From its next heartbeat on it waits there, having entered so many collectives of kvp."""
        self.stands_in, self.entered = axis, entered

    def accounts(self) -> RankAccounts:
        collectives = (AxisCollectives("kvp", self.entered, self.entered),)
        return RankAccounts(rank=self.rank, blocks_total=8, collectives=collectives, stands_in=self.stands_in)

    def close(self) -> None:
        if self.beating is not None:
            self.beating.cancel()
        self.plans.close()
        self.messages.close()

    async def _beat(self) -> None:
        while True:
            self.say(Heartbeat(rank=self.rank, step_id=0, accounts=self.accounts()))
            await asyncio.sleep(1.0 / SPEED)


@dataclass
class Processes:
    on_exit: OnExit = lambda rank, status: None
    on_loss: OnFailure = lambda error: None
    calls: list[str] = field(default_factory=list)
    lost: RankLost | None = None
    is_faulty: bool | None = None

    async def start(self, on_exit: OnExit, on_loss: OnFailure) -> None:
        self.on_exit, self.on_loss = on_exit, on_loss
        self.calls.append("start")

    def loss(self) -> RankLost | None:
        return self.lost

    def absent(self) -> Mapping[int, str]:
        return {}

    def dump_stacks(self) -> None:
        self.calls.append("dump_stacks")

    async def stop(self, grace_s: float, *, is_faulty: bool = False) -> None:
        self.calls.append("stop")
        self.is_faulty = is_faulty


@dataclass
class Rig:
    executor: ProcessExecutor
    processes: Processes
    ranks: list[Rank]
    closed: list[TransferClosed] = field(default_factory=list)
    failures: list[LongcatError] = field(default_factory=list)
    num_news: int = 0

    def note_progress(self) -> None:
        self.num_news += 1

    async def start(self) -> None:
        starting = asyncio.create_task(self.executor.start(self.closed.append, self.failures.append))
        await asyncio.sleep(0)
        for rank in self.ranks:
            rank.ready()
        ready = await asyncio.wait_for(starting, 5.0)
        assert [r.rank for r in ready] == list(range(len(self.ranks)))

    async def until(self, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + 5.0
        while not condition():
            assert time.monotonic() < limit
            await asyncio.sleep(0.01)

    def states(self) -> list[str]:
        return [s.state for s in self.executor.rank_states()]


CONFIG = EngineConfig(step_timeout_s=20.0, rank_lost_s=10.0)


@asynccontextmanager
async def rig(num_ranks: int = 2, *, port: int = 0) -> AsyncIterator[Rig]:
    instance = InstanceSpec(
        name="s0", role="decode", host="127.0.0.1", http_port=port or free_base(), device="cpu",
        model=ModelSection(path="/m"), parallel=ParallelConfig(kvp_size=num_ranks), engine=CONFIG,
        transfer=TransferConfig(),
    )  # fmt: skip
    specs, processes = rank_specs(instance, "i"), Processes()
    news: list[Rig] = []
    executor = ProcessExecutor(
        specs, processes, config=CONFIG, clock=FastClock(), on_progress=lambda: [r.note_progress() for r in news] and None
    )
    made = Rig(executor, processes, [Rank(s) for s in specs])
    news.append(made)
    try:
        yield made
    finally:
        await made.executor.close()
        for rank in made.ranks:
            rank.close()


async def test_a_plan_reaches_all_ranks_and_is_done_with_the_last_answer() -> None:
    async with rig() as r:
        await r.start()
        first = r.executor.submit(StepPlan(step_id=1, phase="decode"))
        second = r.executor.submit(StepPlan(step_id=2, phase="decode"))
        for rank in r.ranks:
            assert await rank.hear() == StepPlan(step_id=1, phase="decode")
        r.ranks[1].answer(1)
        r.ranks[1].answer(2)
        await asyncio.sleep(0.05)
        assert not first.done()
        r.ranks[0].answer(1)
        outputs = await asyncio.wait_for(first, 5.0)
        assert [(o.rank, len(o.slots)) for o in outputs] == [(0, 1), (1, 0)]
        assert not second.done()
        r.ranks[0].answer(2)
        await asyncio.wait_for(second, 5.0)
        r.ranks[1].say(TransferClosed(transfer_id="t", rank=1, ok=True))
        await r.until(lambda: len(r.closed) == 1)
        assert r.executor.rank_states()[1].accounts.blocks_total == 8
    assert r.failures == [] and r.processes.calls == ["start", "stop"]


async def test_the_start_is_told_rank_by_rank_and_step_by_step() -> None:
    async with rig() as r:
        starting = asyncio.create_task(r.executor.start(r.closed.append, r.failures.append))
        await asyncio.sleep(0)

        def start() -> list[tuple[str, int, int, bool]]:
            told = stages([state.parts for state in r.executor.rank_states()], 1e9)
            return [(one.step, one.done, one.total, one.has_ended) for one in told]

        assert start() == [("processes", 0, 2, False)] and r.num_news == 1
        for rank in r.ranks:
            rank.plans.send([b""])
        await r.until(lambda: start() == [("processes", 2, 2, True)])
        r.ranks[1].say(RankProgress(rank=1, step="weights", done=10, total=40))
        await r.until(lambda: start()[1:] == [("weights", 10, 80, False)])
        for rank in r.ranks:
            rank.say(RankProgress(rank=rank.rank, step="weights", done=40, total=40))
            rank.ready()
        await asyncio.wait_for(starting, 5.0)
        assert start() == [("processes", 2, 2, True), ("weights", 80, 80, True)] and r.num_news >= 5
        assert r.executor.rank_states()[0].accounts.rank == 0 and r.failures == []


def is_gone(r: Rig, rank: int) -> bool:
    """Whether ZeroMQ has noticed that it has hung up."""
    try:
        r.executor.order(FaultOrder(clear="spin"), rank)
    except wire.Unsendable:
        return True
    return False


async def test_an_order_reaches_all_ranks_that_are_there() -> None:
    order = FaultOrder(clear="spin")
    async with rig(3) as r:
        with pytest.raises(wire.Unsendable, match=r"ranks \[0, 1, 2\]"):  # nothing listens yet
            r.executor.order(order, None)
        await r.start()
        r.ranks[0].plans.close()
        await r.until(lambda: is_gone(r, 0))
        with pytest.raises(wire.Unsendable, match=r"ranks \[0\]"):
            r.executor.order(order, None)
        r.executor.order(order, 2)
        assert [await r.ranks[1].hear(), await r.ranks[2].hear(), await r.ranks[2].hear()] == [order] * 3
        await r.executor.close()
        with pytest.raises(wire.Unsendable, match=r"ranks \[1\]"):
            r.executor.order(order, 1)


async def test_ranks_are_told_to_stop() -> None:
    async with rig() as r:
        await r.start()
        await r.executor.close()
        assert [await rank.hear() for rank in r.ranks] == [Stop(), Stop()]
        assert r.failures == [] and r.processes.is_faulty is False


async def test_a_fault_ends_the_step_and_everything_after_it() -> None:
    async with rig() as r:
        await r.start()
        step = r.executor.submit(StepPlan(step_id=1, phase="decode"))
        r.ranks[1].answer(1, fault="Traceback: /secret/path")
        with pytest.raises(EngineFault) as fault:
            await asyncio.wait_for(step, 5.0)
        assert "secret" not in fault.value.message
        assert "dump_stacks" in r.processes.calls and len(r.failures) == 1
        with pytest.raises(EngineFault):
            await r.executor.submit(StepPlan(step_id=2, phase="decode"))


async def test_a_killed_rank_is_the_cause_also_when_the_others_complain_first() -> None:
    async with rig(3) as r:
        await r.start()
        step = r.executor.submit(StepPlan(step_id=1, phase="decode"))
        r.ranks[0].answer(1, fault="connection closed by peer")
        r.ranks[1].answer(1, fault="connection closed by peer")
        await asyncio.sleep(0.002)
        r.processes.on_exit(2, -9)
        with pytest.raises(RankLost, match="rank 2 ended with status -9"):
            await asyncio.wait_for(step, 5.0)
        assert r.states()[2] == "lost"


async def test_a_machine_that_is_gone_is_the_cause_of_what_the_others_complain_of() -> None:
    async with rig(3) as r:
        await r.start()
        step = r.executor.submit(StepPlan(step_id=1, phase="decode"))
        r.processes.lost = RankLost("node 1 (10.0.0.2) of s0 is gone")
        r.ranks[0].answer(1, fault="connection closed by peer")
        with pytest.raises(RankLost, match="node 1"):
            await asyncio.wait_for(step, 5.0)


async def test_a_lost_machine_ends_the_instance_also_when_nothing_is_computed() -> None:
    async with rig() as r:
        await r.start()
        r.processes.on_loss(RankLost("node 1 (10.0.0.2) of s0 has been silent for 16 s"))
        assert [error.message for error in r.failures] == ["node 1 (10.0.0.2) of s0 has been silent for 16 s"]
        with pytest.raises(RankLost, match="node 1"):
            await r.executor.submit(StepPlan(step_id=1, phase="decode"))


async def test_a_machine_that_is_lost_in_the_start_ends_it() -> None:
    async with rig() as r:
        starting = asyncio.create_task(r.executor.start(r.closed.append, r.failures.append))
        await asyncio.sleep(0.05)
        r.processes.on_loss(RankLost("node 1 (10.0.0.2) of s0 is gone"))
        with pytest.raises(RankLost, match="node 1"):
            await asyncio.wait_for(starting, 1.0)


async def test_a_silent_rank_comes_back_or_is_lost() -> None:
    async with rig() as r:
        await r.start()
        r.ranks[1].fall_silent()
        await r.until(lambda: r.states() == ["ok", "silent"])
        assert r.failures == []
        r.ranks[1].beat()
        await r.until(lambda: r.states() == ["ok", "ok"])
        r.ranks[1].fall_silent()
        began = time.monotonic()
        await r.until(lambda: bool(r.failures))
        assert 14.0 <= (time.monotonic() - began) * SPEED <= LATE_S
        assert isinstance(r.failures[0], RankLost) and "rank 1 has been silent" in r.failures[0].message


async def test_a_step_that_does_not_end_is_overdue_then_lost() -> None:
    async with rig() as r:
        await r.start()
        step = r.executor.submit(StepPlan(step_id=1, phase="decode"))
        r.ranks[0].answer(1)
        await asyncio.sleep(10.0 / SPEED)
        assert r.executor.rank_states()[0].overdue_step is None
        await r.until(lambda: r.executor.rank_states()[0].overdue_step == 1)
        assert r.failures == []
        with pytest.raises(RankLost, match=r"no answer of ranks \[1\]"):
            await asyncio.wait_for(step, 5.0)


async def test_an_overdue_step_has_all_stacks_logged_once_and_its_cause_named_before_it_is_lost() -> None:
    async with rig(3) as r:
        await r.start()
        step = r.executor.submit(StepPlan(step_id=1, phase="decode"))
        for rank in (0, 2):
            r.ranks[rank].stand("kvp", 5)
        r.ranks[1].stand("", 4)
        await r.until(lambda: r.executor.rank_states()[0].overdue_step == 1)
        assert r.failures == [] and r.processes.calls == ["start", "dump_stacks"]
        missed = [state.missed for state in r.executor.rank_states()]
        where = "ranks [0, 2] are in number 5 of kvp, which ranks [1] have not entered (0: 5, 1: 4, 2: 5)"
        assert missed[0] == missed[2] == "" and missed[1].startswith("step 1 has waited 2") and missed[1].endswith(where)
        for rank in r.ranks:
            rank.stand("", 5)
            rank.answer(1)
        await asyncio.wait_for(step, 5.0)
        await r.until(lambda: r.executor.rank_states()[0].overdue_step is None)
        assert r.states() == ["ok"] * 3 and r.executor.rank_states()[1].missed == ""
        lost = r.executor.submit(StepPlan(step_id=2, phase="decode"))
        r.ranks[0].stand("kvp", 6)
        r.ranks[2].stand("kvp", 6)
        with pytest.raises(RankLost, match=r"no answer of ranks \[0, 1, 2\]; ranks \[0, 2\] are in number 6 of kvp"):
            await asyncio.wait_for(lost, 5.0)
        assert r.states() == ["ok", "lost", "ok"]
        assert r.processes.calls == ["start", *["dump_stacks"] * 3], "when it was overdue, and when it was lost"
    assert r.processes.is_faulty


async def test_ranks_that_have_parted_end_the_instance_behind_the_step() -> None:
    async with rig() as r:
        await r.start()
        step = r.executor.submit(StepPlan(step_id=1, phase="decode"))
        r.ranks[0].entered, r.ranks[1].entered = 7, 6
        for rank in r.ranks:
            rank.answer(1)
        with pytest.raises(EngineFault, match=r"behind step 1 collectives of kvp differ between ranks \(0: 7, 1: 6\)"):
            await asyncio.wait_for(step, 5.0)
        assert len(r.failures) == 1 and "dump_stacks" in r.processes.calls
    assert r.processes.is_faulty


async def test_a_step_behind_a_slow_one_has_its_own_time() -> None:
    async with rig(1) as r:
        await r.start()
        first = r.executor.submit(StepPlan(step_id=1, phase="decode"))
        second = r.executor.submit(StepPlan(step_id=2, phase="decode"))
        await asyncio.sleep(15.0 / SPEED)
        r.ranks[0].answer(1)
        await first
        await asyncio.sleep(15.0 / SPEED)
        assert r.executor.rank_states()[0].overdue_step is None
        r.ranks[0].answer(2)
        await second


@pytest.mark.parametrize(
    "frames",
    [
        [b"nonsense"],
        [b"StepOutput", b"\xc1"],
        [b"i.9", *Rank.MESSAGES.encode(TransferClosed(transfer_id="t", rank=9, ok=True))],
        [b"before.0", *Rank.MESSAGES.encode(StepOutput(step_id=7, rank=0))],
        [b"before.0", *Rank.MESSAGES.encode(StepOutput(step_id=1, rank=0, fault="a trace"))],
    ],
)
async def test_a_message_of_a_stranger_is_passed_over(frames: list[bytes]) -> None:
    async with rig(1) as r:
        await r.start()
        r.ranks[0].messages.send(frames)
        step = r.executor.submit(StepPlan(step_id=1, phase="decode"))
        r.ranks[0].answer(1)
        await asyncio.wait_for(step, 5.0)
        assert r.failures == []


async def test_a_rank_of_a_former_life_takes_no_plans() -> None:
    async with rig(1) as r:
        await r.start()
        former = wire.AsyncSocket("dealer", r.ranks[0].plans.endpoint, bind=False, admission=OPEN, identity=b"before.0")
        former.send([b""])
        await asyncio.sleep(0.05)
        r.executor.submit(StepPlan(step_id=1, phase="decode"))
        assert await r.ranks[0].hear() == StepPlan(step_id=1, phase="decode")
        former.close()


async def test_a_message_of_a_rank_that_cannot_be_read_is_a_fault() -> None:
    async with rig() as r:
        await r.start()
        r.ranks[1].messages.send([r.ranks[1].identity, b"StepOutput", b"\xc1"])
        await r.until(lambda: bool(r.failures))
        assert isinstance(r.failures[0], EngineFault) and "rank 1" in r.failures[0].message


async def test_a_rank_that_never_calls_ends_the_start_and_is_named() -> None:
    async with rig(3) as r:
        began = time.monotonic()
        starting = asyncio.create_task(r.executor.start(r.closed.append, r.failures.append))
        await asyncio.sleep(0.05)
        r.ranks[0].ready()
        r.ranks[2].plans.send([b""])
        with pytest.raises(RankLost, match=r"ranks \[1\] did not come up within 15 s"):
            await asyncio.wait_for(starting, 5.0)
        assert (time.monotonic() - began) * SPEED <= LATE_S
        assert len(r.failures) == 1 and r.processes.calls == ["start", "dump_stacks", "stop"]


async def test_an_answer_to_a_step_that_is_not_open_is_a_fault() -> None:
    async with rig() as r:
        await r.start()
        r.ranks[0].answer(5)
        await r.until(lambda: bool(r.failures))
        assert isinstance(r.failures[0], EngineFault)


async def test_a_taken_port_refuses_the_start() -> None:
    async with rig() as r:
        await r.start()
        taken = int(r.ranks[0].plans.endpoint.rsplit(":", 1)[1]) - 2
        async with rig(port=taken) as second:
            with pytest.raises(ConfigError, match="cannot listen"):
                await second.executor.start(second.closed.append, second.failures.append)
            assert second.processes.calls == []


async def test_a_rank_that_refuses_its_checkpoint_refuses_the_start() -> None:
    async with rig() as r:
        starting = asyncio.create_task(r.executor.start(r.closed.append, r.failures.append))
        await asyncio.sleep(0.05)
        r.ranks[0].answer(0, fault="model.norm.weight is missing")
        r.ranks[1].answer(0, fault="the rendezvous is gone")
        await asyncio.sleep(0.05)
        r.processes.on_exit(1, 1)
        r.processes.on_exit(0, 2)
        with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
            await asyncio.wait_for(starting, 5.0)
        assert "stop" in r.processes.calls


async def test_a_rank_that_dies_in_the_start_ends_it() -> None:
    async with rig() as r:
        starting = asyncio.create_task(r.executor.start(r.closed.append, r.failures.append))
        await asyncio.sleep(0.05)
        r.ranks[0].ready()
        r.processes.on_exit(1, -9)
        with pytest.raises(RankLost):
            await asyncio.wait_for(starting, 5.0)
