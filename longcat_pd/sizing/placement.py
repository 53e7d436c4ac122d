"""Where every rank is: its machine and card, its place on each axis, and with whom it shares each; what a machine runs.

Pure arithmetic on a resolved configuration. Knows no bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from longcat_pd.config.checks import PortUse
from longcat_pd.config.schema import ClusterConfig, InstanceSpec, Role
from longcat_pd.config.services import Service, nodes_of, ports_of_node, services
from longcat_pd.parallel.layout import AxisName, ParallelLayout, layers_of_stage


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank.

    Attributes:
        instance, role, rank: who it is.
        node: address of its machine; node_rank: the machine's place among those of the instance.
        device: its place on the machine, which is the number of its visible card.
        stage: pipeline stage; layers: decoder layers of the stage.
        coordinates, groups: by axis, of the axes with more than one rank: its place, and all ranks in their order.
    """

    instance: str
    role: Role
    rank: int
    node: str
    node_rank: int
    device: int
    stage: int
    layers: range
    coordinates: Mapping[AxisName, int]
    groups: Mapping[AxisName, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One node: the processes that are started on it, the ports that these listen on, and what its cards are told."""

    node: str
    services: tuple[Service, ...]
    ports: tuple[PortUse, ...]

    @property
    def hccl(self) -> Mapping[str, Mapping[str, str]]:
        """By service with cards: the variables of the collective library that its ranks inherit."""
        return {
            service.name: {name: value for name, value in service.env.items() if name.startswith(("HCCL_", "P2P_HCCL_"))}
            for service in self.services
            if service.kind != "balancer"
        }


def places(spec: InstanceSpec, num_layers: int) -> tuple[Place, ...]:
    """The ranks of one instance, in their order. ``spec`` is resolved."""
    parallel, layout = spec.parallel, ParallelLayout.of(spec.parallel)
    nodes, per_node = spec.nodes or (spec.host,), spec.ranks_per_node
    shared = [axis.name for axis in layout.axes if axis.size > 1]
    groups = {name: {rank: ranks for ranks in layout.groups(name) for rank in ranks} for name in shared}
    found = []
    for rank in range(parallel.world_size):
        stage = layout.coordinate(rank, "pp")
        found.append(
            Place(
                instance=spec.name,
                role=spec.role,
                rank=rank,
                node=nodes[rank // per_node],
                node_rank=rank // per_node,
                device=rank % per_node,
                stage=stage,
                layers=layers_of_stage(parallel, num_layers, stage),
                coordinates={name: layout.coordinate(rank, name) for name in shared},
                groups={name: groups[name][rank] for name in shared},
            )
        )
    return tuple(found)


def machines(config: ClusterConfig) -> tuple[Machine, ...]:
    """Every machine of a cluster, in the order of ``nodes_of``."""
    every = tuple(services(config))
    return tuple(
        Machine(
            node=node,
            services=tuple(service for service in every if service.node == node),
            ports=ports_of_node(config, node),
        )
        for node in nodes_of(config)
    )
