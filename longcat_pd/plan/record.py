"""The plan as JSON: complete, with keys that stay. Bytes are numbers of bytes."""

from __future__ import annotations

from typing import Any

from longcat_pd.parallel.communicators import communicators
from longcat_pd.parallel.layout import ParallelLayout
from longcat_pd.plan.survey import InstancePlan, Survey
from longcat_pd.sizing.cards import card_of
from longcat_pd.sizing.links import LinkBytes
from longcat_pd.sizing.placement import Machine


def record(plan: Survey) -> dict[str, Any]:
    """Everything, ready for ``json.dumps``. What could not be worked out is null or empty."""
    config = plan.config
    card = card_of(config) if config is not None else None
    return {
        "model": None if config is None else {"path": config.model.path, "dtype": config.model.dtype},
        "device": None if config is None else config.device,
        "card": None
        if card is None
        else {
            "name": card.name,
            "usable_bytes": plan.usable_bytes,
            **{name: {"value": figure.value, "source": figure.source} for name, figure in card.figures.items()},
        },
        "findings": list(plan.findings),
        "advice": list(plan.advice),
        "totals": {
            "ranks": sum(len(instance.ranks) for instance in plan.instances),
            "device_bytes": sum(plan.parts.values()),
            "parts": plan.parts,
            "host_bytes": sum(plan.host_bytes.values()),
            "copy_bytes": plan.copy_bytes,
        },
        "handover": _handover(plan),
        "instances": [_instance(instance) for instance in plan.instances],
        "nodes": [_machine(machine, plan) for machine in plan.machines],
    }


def _instance(instance: InstancePlan) -> dict[str, Any]:
    spec, able = instance.spec, instance.capacity
    sizes = {name: value for name, value in vars(spec.parallel).items() if name.endswith("_size")}
    return {
        "name": spec.name,
        "role": spec.role,
        "nodes": list(spec.nodes),
        "parallel": {
            **sizes,
            "layers_per_stage": list(spec.parallel.layers_per_stage),
            "moe_dispatch": spec.parallel.moe_dispatch,
            "ngram_tables": spec.parallel.ngram_tables,
        },
        "capacity": {
            "num_blocks": able.num_blocks,
            "most_blocks": able.most_blocks,
            "block_size": spec.engine.block_size,
            "tokens": able.tokens,
            "slots": able.slots,
            "sequences": {str(length): count for length, count in able.sequences.items()},
        },
        "between_nodes": [
            {"from": spec.nodes[source], "to": spec.nodes[target], "bytes": count}
            for (source, target), count in sorted(instance.travel.pairs.items())
        ],
        "ranks": [_rank(instance, place) for place in range(len(instance.ranks))],
    }


def _rank(instance: InstancePlan, number: int) -> dict[str, Any]:
    spec, place, memory = instance.spec, instance.places[number], instance.ranks[number]
    layout = ParallelLayout.of(spec.parallel)
    shared: dict[tuple[object, ...], list[str]] = {}
    for axis, made in communicators(layout, place.rank, spec.npu).items():
        shared.setdefault(tuple(made), []).append(axis)
    return {
        "rank": place.rank,
        "node": place.node,
        "node_rank": place.node_rank,
        "device": place.device,
        "stage": place.stage,
        "layers": [place.layers.start, place.layers.stop],
        "coordinates": dict(place.coordinates),
        "groups": {name: list(ranks) for name, ranks in place.groups.items()},
        "communicators": list(shared.values()),
        "device_bytes": memory.total_bytes,
        "parts": dict(memory.parts),
        "host_parts": dict(memory.host_parts),
        "links": _links(instance.travel.links[number]),
        "first_links": _links(instance.travel.first_links[number]),
    }


def _links(links: LinkBytes) -> dict[str, Any]:
    return {**vars(links), "by_part": dict(links.by_part)}


def _handover(plan: Survey) -> dict[str, Any]:
    chunks = [i.spec.engine.max_num_batched_tokens for i in plan.instances if i.spec.role == "prefill"]
    return {
        "token_bytes": plan.token_bytes,
        "chunk_bytes": plan.token_bytes * max(chunks) if chunks else None,
    }


def _machine(machine: Machine, plan: Survey) -> dict[str, Any]:
    return {
        "node": machine.node,
        "services": [
            {"name": service.name, "kind": service.kind, "url": service.url, "env": dict(service.env)}
            for service in machine.services
        ],
        "ports": [{"port": use.port, "purpose": use.purpose, "key": use.key} for use in machine.ports],
        "hccl": {name: dict(told) for name, told in machine.hccl.items()},
        "host_bytes": plan.host_bytes.get(machine.node),
    }
