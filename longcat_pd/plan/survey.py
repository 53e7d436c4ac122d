"""Everything that the plan of a cluster says, computed once; what it looks like is the business of its neighbours here.

Asks no machine: from the cluster YAML and the checkpoint's config.json alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import ClusterConfig, InstanceSpec
from longcat_pd.plan.reading import names, read, told
from longcat_pd.plan.travel import Travel, travel
from longcat_pd.sizing.capacity import Capacity, capacity, card_findings
from longcat_pd.sizing.cards import card_of, usable_bytes
from longcat_pd.sizing.memory import GIB, RankMemory, copy_bytes, instance_memory
from longcat_pd.sizing.placement import Machine, Place, machines, places


@dataclass(frozen=True, kw_only=True)
class InstancePlan:
    """One instance: what each rank holds and where it is, what fits, and what travels in a full step."""

    spec: InstanceSpec
    ranks: tuple[RankMemory, ...]
    places: tuple[Place, ...]
    capacity: Capacity
    travel: Travel


@dataclass(frozen=True, kw_only=True)
class Survey:
    """A cluster. ``usable_bytes`` of a card; None where ranks share the memory of their machine.

    Attributes:
        instances, model: () and None where the configuration could not be resolved.
        machines: () where it could not be read.
        findings: what stands against it; advice: what does not, but should be looked at.
        copy_bytes: of one copy of all weights that are read, spread over whatever.
        token_bytes: what the hand-over moves for each token.
        host_bytes: by node, what ranks hold of its memory beside their cards.
    """

    config: ClusterConfig | None
    model: ModelConfig | None
    usable_bytes: int | None
    instances: tuple[InstancePlan, ...]
    machines: tuple[Machine, ...]
    findings: tuple[str, ...]
    advice: tuple[str, ...]
    copy_bytes: int
    token_bytes: int
    host_bytes: Mapping[str, int]

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each part over all ranks of all instances."""
        found: dict[str, int] = {}
        for rank in (rank for instance in self.instances for rank in instance.ranks):
            for name, count in rank.parts.items():
                found[name] = found.get(name, 0) + count
        return found


def survey(path: str, overrides: Sequence[str]) -> Survey:
    """Of a cluster YAML: as much as can be said, whatever is wrong with it."""
    config, model, findings = read(path, overrides)
    if config is None or model is None:
        return Survey(
            config=config,
            model=None,
            usable_bytes=None,
            instances=(),
            machines=machines(config) if config is not None else (),
            findings=findings,
            advice=(),
            copy_bytes=0,
            token_bytes=0,
            host_bytes={},
        )
    usable = usable_bytes(config)
    instances = tuple(_instance(config, model, name, usable=usable) for name in names(config))
    host = _host_bytes(instances)
    refused = [
        line
        for instance in instances
        if usable is not None
        for line in card_findings(instance.spec, instance.ranks, usable_bytes=usable)
    ]
    return Survey(
        config=config,
        model=model,
        usable_bytes=usable,
        instances=instances,
        machines=machines(config),
        findings=(*findings, *refused),
        advice=tuple(_advice(config, instances, host)),
        copy_bytes=copy_bytes(instances[0].spec, model),
        token_bytes=instances[0].travel.token_bytes,
        host_bytes=host,
    )


def _instance(config: ClusterConfig, model: ModelConfig, name: str, *, usable: int | None) -> InstancePlan:
    spec, num_lanes = told(config, name)
    ranks = instance_memory(spec, model, num_lanes=num_lanes)
    return InstancePlan(
        spec=spec,
        ranks=ranks,
        places=places(spec, model.num_layers),
        capacity=capacity(spec, model, ranks, usable_bytes=usable),
        travel=travel(spec, model),
    )


def _host_bytes(instances: Sequence[InstancePlan]) -> dict[str, int]:
    found: dict[str, int] = {}
    for instance in instances:
        for place, rank in zip(instance.places, instance.ranks, strict=True):
            found[place.node] = found.get(place.node, 0) + rank.machine_bytes
    return found


def _advice(config: ClusterConfig, instances: Sequence[InstancePlan], host: Mapping[str, int]) -> Iterator[str]:
    card = card_of(config)
    if card is None:
        return
    available = card.host_memory_gib
    for node, count in host.items():
        if count > available.value * GIB:
            yield (
                f"{node} holds {count / GIB:.1f} GiB of its own memory for its ranks; a node has {available.value:g} GiB "
                f"by sizing/cards.py ({available.source})"
            )
    for instance in instances:
        spec, most = instance.spec, instance.capacity.most_blocks
        if most is not None and spec.engine.num_blocks <= most < spec.engine.num_blocks * 1.02:
            text = f"num_blocks {spec.engine.num_blocks} of {most} leaves next to nothing for what is estimated"
            yield f"{spec.role} {spec.name}: {text}"
