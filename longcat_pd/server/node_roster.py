"""What a driver knows of the further nodes of its instance: who has come, who was sent away and why, who is silent.

Judges only; ``nodes.py`` feeds it and acts. Pure but for the log.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from longcat_pd.clock import RANK_SILENT_S
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.errors import ConfigError, LongcatError, RankLost
from longcat_pd.log import logger
from longcat_pd.server.node_records import GONE_S, NODES_COME_S, NodeHello, Rejected, node_title, silence_limit_s

_MOST_SHOWN = 80
_DIFFERENCES = {
    "instance": "belongs to another instance",
    "configuration": "reads another configuration",
    "code_version": "has another code version",
    "model_digest": "has another checkpoint",
}


@dataclass
class NodeEntry:
    """One further node. ``identity``: of the process that has come for it; ``refusal``: why the last one was sent away."""

    number: int
    title: str
    heard_at: float
    identity: bytes | None = None
    refusal: str = ""
    is_reachable: bool = True


class NodeRoster:
    """The further nodes of one instance.

    Args:
        ours: what each must say, apart from its number.
    """

    def __init__(self, spec: InstanceSpec, ours: NodeHello, now: float) -> None:
        self._spec = spec
        self._ours = ours
        self._entries = {k: NodeEntry(k, node_title(spec, k), now) for k in range(1, len(spec.nodes))}
        self.has_begun = False  # the ranks: from then on nobody comes, and nobody goes unnoticed

    def greet(self, identity: bytes, hello: NodeHello, now: float) -> Rejected | None:
        """Take the node in, or say why not."""
        entry = self._entries.get(hello.node)
        if entry is None:
            return Rejected(reason=f"{hello.instance} has no further node {hello.node}")
        difference = self._difference(hello)
        refusal = difference or self._rival(entry, identity, now)
        if refusal:
            entry.refusal = refusal
            logger().warning("node_refused", node=entry.number, reason=refusal)
            return Rejected(reason=refusal, is_for_now=not difference)
        if entry.identity != identity:
            logger().info("node_came", node=entry.number)
        entry.identity, entry.heard_at, entry.is_reachable = identity, now, True
        return None

    def present(self) -> list[NodeEntry]:
        """Those that have come and not gone."""
        return [entry for entry in self._entries.values() if entry.identity is not None]

    def known(self, identity: bytes) -> NodeEntry | None:
        """The node that this process came for; None for strangers."""
        return next((entry for entry in self.present() if entry.identity == identity), None)

    def title(self, instance: str, number: int) -> str:
        """A node that is expected; "" for one that is not of this instance."""
        return self._entries[number].title if instance == self._ours.instance and number in self._entries else ""

    def absent(self) -> list[NodeEntry]:
        """Those that are waited for."""
        return [entry for entry in self._entries.values() if entry.identity is None]

    def absence(self) -> LongcatError:
        """Not all have come in time. A ConfigError if all that did not were sent away."""
        absent = self.absent()
        lines = [
            f"{entry.title} did not come within {NODES_COME_S:g} s" + (f"; {entry.refusal}" if entry.refusal else "")
            for entry in absent
        ]
        kind = ConfigError if all(entry.refusal for entry in absent) else RankLost
        return kind("\n".join(lines))

    def forgive(self, seconds: float) -> None:
        """This process itself stood still for so long."""
        for entry in self._entries.values():
            entry.heard_at += seconds

    def silence(self, now: float) -> RankLost | None:
        """The loss of a node that has been silent for too long. Before the ranks have begun it is waited for again."""
        for entry in self.present():
            silent_s = now - entry.heard_at
            if not entry.is_reachable and silent_s > GONE_S:
                error = RankLost(f"{entry.title} is gone: its connection ended {silent_s:.0f} s ago")
            elif silent_s > silence_limit_s(self._spec):
                error = RankLost(f"{entry.title} has been silent for {silent_s:.0f} s")
            else:
                continue
            entry.identity = None
            if self.has_begun:
                return error
            logger().warning("node_lost", node=entry.number, reason=error.message)
        return None

    def unreachable(self) -> RankLost | None:
        """A node whose connection has ended, which it may still take up again."""
        for entry in self.present():
            if not entry.is_reachable:
                return RankLost(f"{entry.title} is gone: its connection ended")
        return None

    def _difference(self, hello: NodeHello) -> str:
        said, ours = asdict(hello), asdict(self._ours)
        for name, difference in _DIFFERENCES.items():
            if said[name] != ours[name]:
                title = node_title(self._spec, hello.node)
                shown = str(said[name])[:_MOST_SHOWN]  # anybody can connect
                return f"{title} {difference}: {shown}, the driver {ours[name]}"
        return ""

    def _rival(self, entry: NodeEntry, identity: bytes, now: float) -> str:
        if entry.identity == identity:
            return ""
        if self.has_begun:
            return f"{entry.title} comes too late: the ranks have begun without this process"
        if entry.identity is not None and entry.is_reachable and now - entry.heard_at <= RANK_SILENT_S:
            return f"{entry.title} is there already, as another process"
        return ""
