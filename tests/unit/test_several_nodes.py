"""The two sides of an instance over several machines, each against a scripted other: who may take part, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from longcat_pd.config.schema import EngineConfig, InstanceSpec, ModelSection, ParallelConfig, TransferConfig
from longcat_pd.engine.executor import OnExit, OnFailure
from longcat_pd.errors import ConfigError, EngineFault, LongcatError, RankLost
from longcat_pd.server.further_node import FurtherNode
from longcat_pd.server.node_records import (
    FROM_DRIVER,
    FROM_NODE,
    DriverBeat,
    DumpStacks,
    EndWanted,
    FromDriver,
    FromNode,
    NodeBeat,
    NodeHello,
    NodeLeft,
    NodeRefusal,
    RankExited,
    Rejected,
    StartRanks,
    StopRanks,
)
from longcat_pd.server.nodes import SeveralNodes
from longcat_pd.server.run import Signals
from longcat_pd.wire import Unsendable
from tests.manual_clock import ManualClock, settle

SPEC = InstanceSpec(
    name="p0", role="prefill", host="10.0.0.1", http_port=30000, device="cpu", model=ModelSection(path="/m"),
    parallel=ParallelConfig(pp_size=6), engine=EngineConfig(rank_lost_s=10.0, drain_timeout_s=60.0),
    transfer=TransferConfig(), nodes=("10.0.0.1", "10.0.0.2", "10.0.0.3"),
)  # fmt: skip
NODE_1, NODE_2 = "node 1 (10.0.0.2) of p0", "node 2 (10.0.0.3) of p0"
HELLO = NodeHello(node=0, instance="p0", configuration="c1", code_version="1.0", model_digest="m1")


class Wire:
    """A socket whose other end is the test."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self.sent: list[list[bytes]] = []
        self.broken: set[bytes] = set()  # identities whose connection has ended
        self.is_closed = False

    def send(self, frames: Sequence[bytes]) -> None:
        if frames[0] in self.broken:
            raise Unsendable("no route")
        self.sent.append(list(frames))

    async def recv(self) -> list[bytes]:
        return await self.inbox.get()

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Ranks:
    calls: list[object] = field(default_factory=list)
    prepared: asyncio.Event = field(default_factory=asyncio.Event)
    on_exit: OnExit = lambda rank, status: None

    def __post_init__(self) -> None:
        self.prepared.set()

    async def prepare(self) -> None:
        self.calls.append("prepare")
        await self.prepared.wait()

    async def start(self, on_exit: OnExit, on_loss: OnFailure) -> None:
        self.on_exit = on_exit
        self.calls.append("start")

    def loss(self) -> RankLost | None:
        return None

    def absent(self) -> Mapping[int, str]:
        return {}

    def dump_stacks(self) -> None:
        self.calls.append("dump_stacks")

    async def stop(self, grace_s: float, *, is_faulty: bool = False) -> None:
        self.calls.append(("stop", grace_s))


class Driver:
    """The driver's side, and processes that come for its nodes 1 and 2."""

    def __init__(self) -> None:
        self.clock, self.wire, self.own = ManualClock(), Wire(), Ranks()
        self.exits: list[tuple[int, int]] = []
        self.losses: list[LongcatError] = []
        self.is_told_to_end = asyncio.Event()
        self.nodes = SeveralNodes(
            SPEC, HELLO, own=self.own, incarnation="i7", listen=lambda: self.wire, on_end=self.is_told_to_end.set,
            clock=self.clock,
        )  # fmt: skip
        self.starting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.starting = asyncio.ensure_future(
            self.nodes.start(lambda rank, status: self.exits.append((rank, status)), self.losses.append)
        )
        await settle()

    async def begun(self) -> None:
        """All nodes are there and ranks run."""
        await self.start()
        for number in (1, 2):
            await self.say(number, replace(HELLO, node=number))
        assert self.starting is not None
        await self.starting
        self.wire.sent.clear()

    async def say(self, number: int, record: FromNode, *, life: str = "a") -> None:
        self.wire.inbox.put_nowait([f"{number}.{life}".encode(), *FROM_NODE.encode(record)])
        await settle()

    def told(self, number: int, *, life: str = "a") -> list[FromDriver]:
        """What a process was told, beats apart."""
        mine = [FROM_DRIVER.decode(sent[1:]) for sent in self.wire.sent if sent[0] == f"{number}.{life}".encode()]
        return [record for record in mine if record != DriverBeat()]

    async def pass_by(self, seconds: int, *beating: int) -> None:
        """``seconds``, in which these nodes beat."""
        for _ in range(seconds):
            await self.clock.advance(1.0)
            for number in beating:
                await self.say(number, NodeBeat())

    async def error(self) -> LongcatError:
        """What the start ended with."""
        assert self.starting is not None
        with pytest.raises(LongcatError) as raised:
            await asyncio.wait_for(self.starting, 30.0)
        return raised.value


# -- the driver's side: the start


async def test_ranks_begin_everywhere_when_the_last_node_has_come() -> None:
    driver = Driver()
    await driver.start()
    assert driver.nodes.absent() == {2: NODE_1, 3: NODE_1, 4: NODE_2, 5: NODE_2}
    await driver.say(2, replace(HELLO, node=2))
    await driver.pass_by(50, 2)
    assert driver.own.calls == ["prepare"] and driver.told(2) == []
    assert driver.nodes.absent() == {2: NODE_1, 3: NODE_1}
    await driver.say(1, replace(HELLO, node=1))
    assert driver.starting is not None
    await driver.starting
    assert driver.own.calls == ["prepare", "start"]
    assert driver.told(1) == driver.told(2) == [StartRanks(incarnation="i7")]
    assert driver.nodes.absent() == {}


async def test_a_node_that_does_not_come_is_named() -> None:
    driver = Driver()
    await driver.start()
    await driver.say(1, replace(HELLO, node=1))
    await driver.pass_by(239, 1)
    assert driver.starting is not None and not driver.starting.done()
    await driver.pass_by(2, 1)
    error = await driver.error()
    assert isinstance(error, RankLost) and error.message == "node 2 (10.0.0.3) of p0 did not come within 240 s"
    stopping = asyncio.ensure_future(driver.nodes.stop(1.0))
    await settle()
    assert driver.told(1) == [StopRanks(grace_s=1.0, status=1)]
    await driver.say(1, NodeLeft())
    await asyncio.wait_for(stopping, 30.0)
    assert driver.wire.is_closed and "start" not in driver.own.calls


@pytest.mark.parametrize(
    "said, reason",
    [
        ({"configuration": "c2"}, "node 1 (10.0.0.2) of p0 reads another configuration: c2, the driver c1"),
        (
            {"configuration": "x" * 10_000_000},
            f"node 1 (10.0.0.2) of p0 reads another configuration: {'x' * 80}, the driver c1",
        ),
        ({"code_version": "0.9"}, "node 1 (10.0.0.2) of p0 has another code version: 0.9, the driver 1.0"),
        ({"model_digest": "m2"}, "node 1 (10.0.0.2) of p0 has another checkpoint: m2, the driver m1"),
        ({"instance": "p1"}, "node 1 (10.0.0.2) of p0 belongs to another instance: p1, the driver p0"),
        ({"node": 3}, "p0 has no further node 3"),
        ({"node": 0}, "p0 has no further node 0"),
        ({"node": -1}, "p0 has no further node -1"),
    ],
)
async def test_who_is_sent_away_is_told_why_and_the_right_one_may_still_come(said: dict[str, object], reason: str) -> None:
    driver = Driver()
    await driver.start()
    await driver.say(2, replace(HELLO, node=2))
    await driver.say(1, replace(HELLO, **{"node": 1, **said}), life="wrong")  # type: ignore[arg-type]
    assert driver.told(1, life="wrong") == [Rejected(reason=reason)]
    await driver.say(1, replace(HELLO, node=1))
    assert driver.starting is not None
    await driver.starting


async def test_if_all_that_is_missing_was_sent_away_the_start_is_refused() -> None:
    driver = Driver()
    await driver.start()
    await driver.say(2, replace(HELLO, node=2))
    await driver.say(1, replace(HELLO, node=1, configuration="c2"))
    await driver.pass_by(241, 2)
    error = await driver.error()
    assert isinstance(error, ConfigError)
    assert "node 1 (10.0.0.2) of p0 did not come within 240 s; node 1 (10.0.0.2) of p0 reads another" in error.message


async def test_two_processes_for_one_node() -> None:
    driver = Driver()
    await driver.start()
    await driver.say(1, replace(HELLO, node=1))
    await driver.say(1, replace(HELLO, node=1), life="b")
    reason = "node 1 (10.0.0.2) of p0 is there already, as another process"
    assert driver.told(1, life="b") == [Rejected(reason=reason, is_for_now=True)]
    await driver.pass_by(6)  # the first has fallen silent
    await driver.say(1, replace(HELLO, node=1), life="b")
    assert len(driver.told(1, life="b")) == 1
    await driver.say(2, replace(HELLO, node=2))
    assert driver.told(1, life="b")[-1] == StartRanks(incarnation="i7") and driver.told(1) == []


async def test_a_node_that_goes_before_all_are_there_is_waited_for_again() -> None:
    driver = Driver()
    await driver.start()
    await driver.say(1, replace(HELLO, node=1))
    await driver.say(1, NodeLeft(reason="told to end"))
    await driver.say(2, replace(HELLO, node=2))
    assert driver.starting is not None and not driver.starting.done() and driver.losses == []
    await driver.say(1, replace(HELLO, node=1), life="b")
    await driver.starting
    assert driver.told(1, life="b") == [StartRanks(incarnation="i7")]


async def test_a_node_that_goes_while_the_driver_gets_ready_is_waited_for_too() -> None:
    driver = Driver()
    driver.own.prepared.clear()
    await driver.start()
    for number in (1, 2):
        await driver.say(number, replace(HELLO, node=number))
    await driver.say(1, NodeLeft(reason="told to end"))
    driver.own.prepared.set()
    await settle()
    assert driver.told(2) == [] and driver.own.calls == ["prepare"]
    await driver.say(1, replace(HELLO, node=1), life="b")
    assert driver.told(1, life="b") == driver.told(2) == [StartRanks(incarnation="i7")]


async def test_a_refusal_of_a_node_refuses_the_start_and_names_it() -> None:
    driver = Driver()
    await driver.start()
    await driver.say(9, NodeRefusal(node=2, instance="p1", reason="not of this instance"))
    await driver.say(2, NodeRefusal(node=2, instance="p0", reason="needs 9.0 GiB\nneeds 5 cores"))
    error = await driver.error()
    assert isinstance(error, ConfigError)
    assert error.message == "node 2 (10.0.0.3) of p0: needs 9.0 GiB\nnode 2 (10.0.0.3) of p0: needs 5 cores"
    assert len(driver.told(2)) == 1, "it is answered, so that it can go"
    await driver.nodes.stop(0.0)


async def test_a_port_that_is_taken_refuses_the_start() -> None:
    def taken() -> Wire:
        raise OSError("tcp://10.0.0.1:30006: Address already in use")

    driver = Driver()
    nodes = SeveralNodes(SPEC, HELLO, own=driver.own, incarnation="i", listen=taken, on_end=list, clock=driver.clock)
    with pytest.raises(ConfigError, match="30006"):
        await nodes.start(lambda *_: None, driver.losses.append)
    await nodes.stop(0.0)


# -- the driver's side: in service


async def test_exits_of_ranks_are_passed_on() -> None:
    driver = Driver()
    await driver.begun()
    await driver.say(2, RankExited(rank=5, status=-9))
    assert driver.exits == [(5, -9)] and driver.losses == []
    await driver.say(2, RankExited(rank=2, status=1))
    assert driver.exits == [(5, -9)], "a rank of another node"
    assert isinstance(driver.losses[0], EngineFault)


async def test_a_silent_node_is_lost() -> None:
    driver = Driver()
    await driver.begun()
    await driver.pass_by(14, 1)
    assert driver.losses == []
    await driver.pass_by(3, 1)
    (error,) = driver.losses
    assert isinstance(error, RankLost) and error.message == "node 2 (10.0.0.3) of p0 has been silent for 16 s"
    await driver.say(2, NodeBeat())
    assert driver.told(2) == [Rejected(reason="nobody has said hello to this life of p0")], "and must not come back"


async def test_a_node_whose_connection_has_ended_is_lost_soon_but_not_at_once() -> None:
    driver = Driver()
    await driver.begun()
    driver.wire.broken.add(b"1.a")
    assert driver.nodes.loss() is not None and "node 1 (10.0.0.2) of p0 is gone" in str(driver.nodes.loss())
    driver.wire.broken.clear()
    assert driver.nodes.loss() is None
    driver.wire.broken.add(b"1.a")
    await driver.pass_by(3, 2)
    assert driver.losses == []
    await driver.pass_by(2, 2)
    assert [error.message.split(":")[0] for error in driver.losses] == ["node 1 (10.0.0.2) of p0 is gone"]


async def test_a_driver_that_stood_still_itself_blames_nobody() -> None:
    driver = Driver()
    await driver.begun()
    await driver.pass_by(2, 1, 2)
    driver.clock._now += 100.0
    await driver.pass_by(5, 1, 2)
    assert driver.losses == []


async def test_nobody_comes_after_the_ranks_have_begun() -> None:
    driver = Driver()
    await driver.begun()
    await driver.say(1, replace(HELLO, node=1), life="b")
    (told,) = driver.told(1, life="b")
    assert isinstance(told, Rejected) and "comes too late" in told.reason and told.is_for_now
    await driver.say(1, NodeRefusal(node=1, instance="p0", reason="too little memory"), life="c")
    assert driver.losses == []


async def test_a_node_that_is_told_to_end_has_the_driver_drain() -> None:
    driver = Driver()
    await driver.begun()
    assert not driver.is_told_to_end.is_set()
    await driver.say(1, EndWanted())
    assert driver.is_told_to_end.is_set() and driver.losses == []


async def test_a_node_that_ends_by_itself_is_lost_with_its_reason() -> None:
    driver = Driver()
    await driver.begun()
    await driver.say(1, NodeLeft(reason="told to end at once"))
    assert [error.message for error in driver.losses] == ["node 1 (10.0.0.2) of p0 has ended: told to end at once"]


@pytest.mark.parametrize("is_faulty, status", [(False, 0), (True, 1)])
async def test_the_end_on_all_nodes(is_faulty: bool, status: int) -> None:
    driver = Driver()
    await driver.begun()
    driver.nodes.dump_stacks()  # as for a step that was overdue, and may have ended
    stopping = asyncio.ensure_future(driver.nodes.stop(5.0, is_faulty=is_faulty))
    await settle()
    stacks: list[FromDriver] = [DumpStacks()]
    assert driver.own.calls[-2] == "dump_stacks"
    assert driver.told(1) == driver.told(2) == [*stacks, StopRanks(grace_s=5.0, status=status)]
    assert driver.own.calls[-1] == ("stop", 5.0)
    await driver.say(1, RankExited(rank=2, status=0))
    await driver.say(1, NodeLeft())
    assert not stopping.done()
    await driver.say(2, NodeLeft())
    await asyncio.wait_for(stopping, 30.0)
    assert driver.wire.is_closed and driver.losses == []


async def test_a_node_that_does_not_end_is_not_waited_for_longer_than_its_ranks_could_take() -> None:
    driver = Driver()
    await driver.begun()
    stopping = asyncio.ensure_future(driver.nodes.stop(5.0))
    await driver.pass_by(11, 1, 2)
    assert not stopping.done()
    await driver.pass_by(2, 1, 2)
    await asyncio.wait_for(stopping, 30.0)


async def test_nonsense_of_a_stranger_is_passed_over() -> None:
    driver = Driver()
    await driver.begun()
    driver.wire.inbox.put_nowait([b"x", b"nonsense"])
    driver.wire.inbox.put_nowait([b"x"])
    await driver.say(1, NodeBeat())
    assert driver.losses == []


# -- the side of a node


class Node:
    """A further node, and a driver that is the test."""

    def __init__(self) -> None:
        self.clock, self.wire, self.signals = ManualClock(), Wire(), Signals()
        self.own, self.incarnations = Ranks(), list[str]()
        self.node = FurtherNode(
            SPEC, replace(HELLO, node=2), socket=self.wire, launcher=self, signals=self.signals, clock=self.clock
        )
        self.running: asyncio.Task[int] | None = None

    async def prepare(self) -> None:
        await self.own.prepare()

    def ranks(self, incarnation: str) -> Ranks:
        self.incarnations.append(incarnation)
        return self.own

    async def start(self) -> None:
        self.running = asyncio.ensure_future(self.node.run())
        await settle()

    async def begun(self) -> None:
        await self.start()
        await self.say(DriverBeat())
        await self.say(StartRanks(incarnation="i7"))

    async def say(self, record: FromDriver) -> None:
        self.wire.inbox.put_nowait(FROM_DRIVER.encode(record))
        await settle()

    def said(self) -> list[FromNode]:
        return [FROM_NODE.decode(sent) for sent in self.wire.sent]

    async def pass_by(self, seconds: int, *, is_beating: bool) -> None:
        for _ in range(seconds):
            await self.clock.advance(1.0)
            if is_beating:
                await self.say(DriverBeat())

    async def status(self) -> int:
        assert self.running is not None
        return await asyncio.wait_for(self.running, 30.0)

    def reason(self) -> str:
        last = self.said()[-1]
        assert isinstance(last, NodeLeft) and self.wire.is_closed
        return last.reason


async def test_a_node_says_hello_until_its_ranks_begin_then_beats() -> None:
    node = Node()
    await node.start()
    await node.pass_by(3, is_beating=False)
    assert node.said() == 4 * [replace(HELLO, node=2)] and node.own.calls == ["prepare"]
    await node.say(StartRanks(incarnation="i7"))
    await node.say(StartRanks(incarnation="i7"))
    assert node.own.calls == ["prepare", "start"] and node.incarnations == ["i7"]
    await node.pass_by(1, is_beating=True)
    assert node.said()[-1] == NodeBeat()
    node.own.on_exit(5, -11)
    assert node.said()[-1] == RankExited(rank=5, status=-11)
    await node.say(DumpStacks())
    assert node.own.calls[-1] == "dump_stacks"


@pytest.mark.parametrize("status", [0, 1, 2])
async def test_a_node_ends_as_the_driver_says(status: int) -> None:
    node = Node()
    await node.begun()
    await node.say(StopRanks(grace_s=5.0, status=status))
    assert await node.status() == status
    assert node.own.calls[-1] == ("stop", 5.0) and node.reason() == ""


async def test_a_driver_that_never_answers_is_named() -> None:
    node = Node()
    await node.start()
    await node.pass_by(299, is_beating=False)
    assert node.running is not None and not node.running.done()
    await node.pass_by(3, is_beating=False)
    assert await node.status() == 1
    assert node.reason() == "the driver of p0 at 10.0.0.1:30006 did not answer within 300 s"


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_driver_that_falls_silent(has_begun: bool) -> None:
    node = Node()
    if has_begun:
        await node.begun()
    else:
        await node.start()
        await node.say(DriverBeat())
    await node.pass_by(20, is_beating=True)
    await node.pass_by(14, is_beating=False)
    assert node.running is not None and not node.running.done()
    await node.pass_by(3, is_beating=False)
    assert await node.status() == 1
    assert node.reason() == "the driver of p0 at 10.0.0.1:30006 has been silent for 16 s"
    assert node.own.calls[-1] == (("stop", 0.0) if has_begun else "prepare"), "ranks end by force"


async def test_a_node_that_stood_still_itself_does_not_blame_the_driver() -> None:
    node = Node()
    await node.begun()
    await node.pass_by(2, is_beating=True)
    node.clock._now += 100.0
    await node.pass_by(5, is_beating=True)
    assert node.running is not None and not node.running.done()
    await node.say(StopRanks(grace_s=0.0, status=0))
    assert await node.status() == 0


@pytest.mark.parametrize("has_begun, is_for_now, status", [(False, False, 2), (False, True, 1), (True, False, 1)])
async def test_a_node_that_is_sent_away(has_begun: bool, is_for_now: bool, status: int) -> None:
    """In service only another life of the driver does that. Who is refused (2) is not started again by systemd."""
    node = Node()
    await (node.begun() if has_begun else node.start())
    await node.say(Rejected(reason="node 2 (10.0.0.3) of p0 reads another configuration", is_for_now=is_for_now))
    assert await node.status() == status
    assert "reads another configuration" in node.reason()


async def test_nonsense_of_the_driver_ends_a_node() -> None:
    node = Node()
    await node.begun()
    node.wire.inbox.put_nowait([b"StartRanks", b"\xc1"])
    assert await node.status() == 1
    assert "malformed" in node.reason()


async def test_the_first_signal_waits_for_the_driver() -> None:
    node = Node()
    await node.begun()
    node.signals.first.set()
    await settle()
    assert node.said()[-1] == EndWanted(), "and is told of it"
    await node.pass_by(60, is_beating=True)
    assert node.said().count(EndWanted()) == 1
    assert node.own.calls[-1] == "start", "the driver drains: ranks go on"
    await node.say(StopRanks(grace_s=5.0, status=0))
    assert await node.status() == 0


async def test_the_second_signal_does_not_wait() -> None:
    node = Node()
    await node.begun()
    node.signals.first.set()
    await settle()
    node.signals.second.set()
    await settle()
    assert await node.status() == 1
    assert node.own.calls[-1] == ("stop", 0.0) and node.reason() == "told to end at once"


async def test_a_driver_that_does_not_stop_a_signalled_node_is_not_waited_for_longer_than_its_drain() -> None:
    node = Node()
    await node.begun()
    node.signals.first.set()
    await node.pass_by(89, is_beating=True)
    assert node.running is not None and not node.running.done()
    await node.pass_by(2, is_beating=True)
    assert await node.status() == 1
    assert "did not say so within 90 s" in node.reason()


async def test_a_signal_before_the_ranks_have_begun_ends_a_node() -> None:
    node = Node()
    await node.start()
    node.signals.first.set()
    await settle()
    assert await node.status() == 0
    assert node.own.calls == ["prepare"]


async def test_ranks_that_cannot_be_started_end_the_node_with_its_reason() -> None:
    node = Node()

    async def fails(on_exit: OnExit, on_loss: OnFailure) -> None:
        raise BlockingIOError("no more processes")

    start: Callable[[OnExit, OnFailure], object] = fails
    node.own.start = start  # type: ignore[assignment,method-assign]
    await node.begun()
    with pytest.raises(BlockingIOError):
        await node.status()
    assert node.own.calls[-1] == ("stop", 0.0) and node.reason() == "by a defect of its own"
