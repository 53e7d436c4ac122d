"""The rank processes of an instance, as its driver has them: on its own machine, or on that and others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from longcat_pd.clock import Clock
from longcat_pd.config.schema import RankSpec
from longcat_pd.engine.executor import RankProcesses
from longcat_pd.kv_transfer.messages import Hello
from longcat_pd.server.launch import ForkedRanks, network_environment
from longcat_pd.server.node_records import NodeHello, listen_for_nodes
from longcat_pd.server.nodes import SeveralNodes
from longcat_pd.wire import to_json


def processes_of(
    ranks: Sequence[RankSpec], entry: str, *, hello: Hello, on_end: Callable[[], None], clock: Clock
) -> RankProcesses:
    """Those of all ``ranks``; nothing is started. Raises ConfigError if this machine has not the driver's address.

    ``entry``: module:function. ``hello``: what the instance says of itself, and what further nodes have to say.
    ``on_end``: called when a further node was told to end.
    """
    spec = ranks[0].instance
    own = ForkedRanks(
        entry,
        [to_json(rank) for rank in ranks if rank.node_rank == 0],
        clock=clock,
        environment=network_environment(spec.host),
    )
    if len(spec.nodes) <= 1:
        return own
    return SeveralNodes(
        spec,
        NodeHello.of(spec, 0, hello),
        own=own,
        incarnation=hello.incarnation,
        listen=lambda: listen_for_nodes(spec),
        on_end=on_end,
        clock=clock,
    )
