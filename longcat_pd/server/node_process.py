"""The process of a further node put together, and the way in which it says that it cannot take part."""

from __future__ import annotations

import asyncio

from longcat_pd.clock import MonotonicClock
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.engine.executor import rank_specs
from longcat_pd.server.further_node import FurtherNode
from longcat_pd.server.identity import own_hello
from longcat_pd.server.launch import ForkedRanks, network_environment, prepare
from longcat_pd.server.node_records import FROM_NODE, REFUSAL_S, NodeHello, NodeRefusal, Socket, dial_driver, pulse
from longcat_pd.server.run import Signals
from longcat_pd.wire import to_json


class NodeRanks:
    """``further_node.Launcher``: rank processes of this machine. Raises ConfigError if it has not the node's address."""

    def __init__(self, spec: InstanceSpec, node: int, entry: str) -> None:
        self._spec = spec
        self._node = node
        self._entry = entry
        self._environment = network_environment(spec.nodes[node])

    async def prepare(self) -> None:
        """See Launcher."""
        await prepare(self._entry)

    def ranks(self, incarnation: str) -> ForkedRanks:
        """See Launcher."""
        specs = [rank for rank in rank_specs(self._spec, incarnation) if rank.node_rank == self._node]
        return ForkedRanks(
            self._entry,
            [to_json(rank) for rank in specs],
            clock=MonotonicClock(),
            first=specs[0].rank,
            environment=self._environment,
        )


async def serve_node(spec: InstanceSpec, node: int, entry: str) -> int:
    """Until the driver ends it; the exit status. ``entry``: module:function of ranks. Raises ConfigError."""
    launcher = NodeRanks(spec, node, entry)
    hello = NodeHello.of(spec, node, own_hello(spec, ModelConfig.load(spec.model.path)))
    with Signals() as signals:
        life = FurtherNode(
            spec, hello, socket=dial_driver(spec, node), launcher=launcher, signals=signals, clock=MonotonicClock()
        )
        return await life.run()


async def tell_refusal(spec: InstanceSpec, node: int, reason: str) -> bool:
    """Tell the driver that this node cannot take part, if it is there within REFUSAL_S; whether it has heard that."""
    clock, socket = MonotonicClock(), dial_driver(spec, node)
    telling = asyncio.ensure_future(_repeat(socket, NodeRefusal(node=node, instance=spec.name, reason=reason)))
    try:
        await clock.within(REFUSAL_S, socket.recv())
    except TimeoutError:
        return False
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        socket.close()
    return True


async def _repeat(socket: Socket, record: NodeRefusal) -> None:
    while True:
        socket.send(FROM_NODE.encode(record))
        await pulse(MonotonicClock())
