"""What an instance's driver and the processes on its further nodes tell each other, and how long either waits.

A further node dials the driver, says hello once a second until it is answered, and then beats; so does the driver. The
driver lets ranks begin on all nodes at once, and ends them.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from longcat_pd.clock import HEARTBEAT_S, RANK_SILENT_S, Clock
from longcat_pd.config.checks import NODES_PORT
from longcat_pd.config.keys import admission
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.kv_transfer.messages import Hello
from longcat_pd.server.launch import KILL_LIMIT_S
from longcat_pd.wire import AsyncSocket, Codec, tcp, to_json

NODES_COME_S = 240.0  # the driver waits so long for all nodes, which may have to fetch an image or read a slow disk first
DRIVER_ANSWERS_S = 300.0  # a node for the driver, which may have been started later and reads the checkpoint first
REFUSAL_S = 10.0  # and for saying that it cannot take part
GONE_S = 3.0  # silence of a node whose connection has ended: time to come back after a fault of the network
STOP_MARGIN_S = 30.0  # behind the driver's drain, for its end
NODES_END_S = KILL_LIMIT_S + 2.0  # behind the grace of a stop: until ranks were killed, and for a node's last words
LINGER_S = 1.0  # for the last words of either side


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeHello:
    """A node wants to take part. What must be equal to the driver's: all but ``node``."""

    node: int
    instance: str
    configuration: str  # digest of the InstanceSpec that this node reads
    code_version: str
    model_digest: str

    @classmethod
    def of(cls, spec: InstanceSpec, node: int, hello: Hello) -> NodeHello:
        """Of a node of ``spec``. ``hello``: what an instance here would say to its peers."""
        return cls(
            node=node,
            instance=spec.name,
            configuration=hashlib.sha256(to_json(spec).encode()).hexdigest()[:16],
            code_version=hello.code_version,
            model_digest=hello.model_digest,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRefusal:
    """A node cannot take part, by its own judgement: ``reason``, a line for each finding."""

    node: int
    instance: str
    reason: str


@dataclass(frozen=True, slots=True)
class NodeBeat:
    """The node is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankExited:
    """The process of a rank has ended. ``status``: negative after a signal."""

    rank: int
    status: int


@dataclass(frozen=True, slots=True)
class EndWanted:
    """The node was told to end, and asks the driver to drain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLeft:
    """The last of a node: its ranks have ended. ``reason``: why, unless it was told to."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class DriverBeat:
    """The driver is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRanks:
    """All nodes are there. ``incarnation``: of the life of the instance that begins."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class DumpStacks:
    """Have every living rank write the stacks of its threads to its log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRanks:
    """Wait so long for ranks that were told to end, end them by force, then end with this exit status."""

    grace_s: float
    status: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """This node has no place in this life of the instance. Also the answer to a NodeRefusal.

    ``is_for_now``: another try may succeed, without anything being mended.
    """

    reason: str
    is_for_now: bool = False


FromNode = NodeHello | NodeRefusal | NodeBeat | RankExited | EndWanted | NodeLeft
FromDriver = DriverBeat | StartRanks | DumpStacks | StopRanks | Rejected

FROM_NODE = Codec[FromNode](NodeHello, NodeRefusal, NodeBeat, RankExited, EndWanted, NodeLeft)
FROM_DRIVER = Codec[FromDriver](DriverBeat, StartRanks, DumpStacks, StopRanks, Rejected)


class Socket(Protocol):
    """A socket of ``wire.py``, as far as it is used here."""

    def send(self, frames: Sequence[bytes]) -> None:
        """Raises Unsendable."""
        ...

    async def recv(self) -> list[bytes]:
        """Wait for the next message."""
        ...

    def close(self) -> None:
        """After what was sent has left, or LINGER_S."""
        ...


async def pulse(clock: Clock) -> float:
    """Sleep for one heartbeat; how much longer than that this process itself stood still, if that is worth a word.

    What the other side sent meanwhile is unread, so its silence must not be counted.
    """
    before = clock.now()
    await clock.sleep(HEARTBEAT_S)
    stood_still = clock.now() - before - HEARTBEAT_S
    return stood_still if stood_still > HEARTBEAT_S else 0.0


def nodes_endpoint(spec: InstanceSpec) -> str:
    """Where the driver listens for its further nodes."""
    return tcp(spec.host, spec.http_port + NODES_PORT)


def listen_for_nodes(spec: InstanceSpec) -> Socket:
    """The driver's side. Raises OSError when the port cannot be had, ConfigError for a key file that cannot be read."""
    place = admission(spec.cluster_key_file)
    return AsyncSocket("router", nodes_endpoint(spec), bind=True, admission=place, linger_s=LINGER_S)


def dial_driver(spec: InstanceSpec, node: int) -> Socket:
    """The side of a further node, under a name of this process. Raises ConfigError for a key file that cannot be read."""
    place, name = admission(spec.cluster_key_file), f"{node}.{secrets.token_hex(8)}".encode()
    return AsyncSocket("dealer", nodes_endpoint(spec), bind=False, admission=place, identity=name, linger_s=LINGER_S)


def silence_limit_s(spec: InstanceSpec) -> float:
    """Driver and nodes miss each other as a driver misses its ranks."""
    return RANK_SILENT_S + spec.engine.rank_lost_s


def node_title(spec: InstanceSpec, node: int) -> str:
    """A node, for people."""
    return f"node {node} ({spec.nodes[node]}) of {spec.name}"
