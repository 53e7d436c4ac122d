"""Everything that the plan of a cluster says, computed once; what it looks like is the business of its neighbours here.

Asks no machine: from the cluster YAML and the checkpoint's config.json alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from longcat_pd.config.checks import blocks_needed, num_shards, pools
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.resolve import instance_spec, load, unresolved
from longcat_pd.config.schema import ClusterConfig, InstanceSpec, ParallelConfig, PoolConfig, Role
from longcat_pd.errors import ConfigError
from longcat_pd.sizing.capacity import Capacity, capacity, card_findings
from longcat_pd.sizing.cards import card_of, usable_bytes
from longcat_pd.sizing.links import LinkBytes, between_nodes, full_chunk, full_step, link_bytes, looked_up, token_bytes
from longcat_pd.sizing.memory import GIB, RankMemory, instance_memory
from longcat_pd.sizing.placement import Machine, Place, machines, places
from longcat_pd.sizing.weights import DTYPE_BYTES, Weights

_MANY_BLOCKS = 1 << 40  # so many that every sequence fits: where a number is wrong or missing, to see what would fit
_ROLES: tuple[Role, ...] = ("prefill", "decode", "standalone")


@dataclass(frozen=True, kw_only=True)
class InstancePlan:
    """One instance. ``links``: by rank, of a full decode step, or of a full chunk that ends a prompt of full length.

    ``first_links``: of a chunk that begins one. ``pairs``: bytes from node to node, by their places, as in ``links``.
    """

    spec: InstanceSpec
    ranks: tuple[RankMemory, ...]
    places: tuple[Place, ...]
    capacity: Capacity
    links: tuple[LinkBytes, ...]
    first_links: tuple[LinkBytes, ...]
    pairs: Mapping[tuple[int, int], int]


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
    config, model, findings = _configuration(path, overrides)
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
    instances = tuple(_instance(config, model, name, usable=usable) for name in _names(config))
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
        copy_bytes=_copy_bytes(instances[0].spec, model),
        token_bytes=token_bytes(instances[0].spec, model),
        host_bytes=host,
    )


def _configuration(path: str, overrides: Sequence[str]) -> tuple[ClusterConfig | None, ModelConfig | None, tuple[str, ...]]:
    """The configuration as far as it is one, and all that is wrong with it.

    Where nothing but numbers of blocks is wrong, there is one for the longest sequence instead, for the plan to say how
    many there could be.
    """
    try:
        config = load(path, overrides)
        return config, ModelConfig.load(config.model.path), ()
    except ConfigError as error:
        findings = tuple(error.message.splitlines())
    roles = [role for role in _ROLES if any(line.startswith(f"{role}.engine.num_blocks") for line in findings)]
    try:
        large = load(path, [*overrides, *(f"{role}.engine.num_blocks={_MANY_BLOCKS}" for role in roles)])
        least = [f"{role}.engine.num_blocks={_least_blocks(pool)}" for role, pool in pools(large) if role in roles]
        config = load(path, [*overrides, *least])
    except ConfigError:
        return _without_model(path, overrides), None, findings
    return config, ModelConfig.load(config.model.path), findings


def _without_model(path: str, overrides: Sequence[str]) -> ClusterConfig | None:
    try:
        return unresolved(path, overrides)
    except ConfigError:
        return None


def _least_blocks(pool: PoolConfig) -> int:
    """Of a shard, for one sequence of full length."""
    return 1 + blocks_needed(pool.engine.max_model_len, pool.engine, num_shards=num_shards(pool.parallel))


def _names(config: ClusterConfig) -> list[str]:
    return [instance.name for _, pool in pools(config) for instance in pool.instances]


def _instance(config: ClusterConfig, model: ModelConfig, name: str, *, usable: int | None) -> InstancePlan:
    spec = instance_spec(config, name)
    ranks = instance_memory(spec, model, num_lanes=_num_lanes(config, spec.role))
    links, first, pairs = _links(spec, model)
    return InstancePlan(
        spec=spec,
        ranks=ranks,
        places=places(spec, model.num_layers),
        capacity=capacity(spec, model, ranks, usable_bytes=usable),
        links=links,
        first_links=first,
        pairs=pairs,
    )


def _num_lanes(config: ClusterConfig, role: Role) -> int:
    """Every rank of a prefill instance may send to every rank of every decode instance."""
    others = [(pool, other) for other, pool in pools(config) if other != role]
    return sum(pool.parallel.world_size * len(pool.instances) for pool, _ in others)


def _links(
    spec: InstanceSpec, model: ModelConfig
) -> tuple[tuple[LinkBytes, ...], tuple[LinkBytes, ...], dict[tuple[int, int], int]]:
    """Of all ranks: at full length, at the start of a prompt; and from node to node at full length."""
    parallel, engine = spec.parallel, spec.engine
    every = range(parallel.world_size)
    if spec.role != "prefill":
        step = full_step(spec, model, context=engine.max_model_len)
        num_rows = engine.max_num_seqs // parallel.dp_size * (1 + engine.num_draft_tokens)
        lookups = [looked_up(spec, model, rank, num_rows=num_rows) for rank in every]
        found = tuple(
            link_bytes(step, spec, rank, to_host=to, from_host=back)
            for rank, (to, back) in zip(every, lookups, strict=True)
        )
        return found, found, between_nodes(step, spec, every)
    stages = range(parallel.pp_size)
    full = [full_chunk(spec, model, stage, context=engine.max_model_len) for stage in stages]
    short = min(engine.max_num_batched_tokens, engine.max_model_len)
    begun = [full_chunk(spec, model, stage, context=short) for stage in stages]
    num_rows = engine.max_num_batched_tokens // parallel.cp_size
    rows: list[list[LinkBytes]] = [[], []]
    pairs: dict[tuple[int, int], int] = {}
    for stage in stages:
        ranks = range(stage * parallel.stage_size, (stage + 1) * parallel.stage_size)
        for pair, count in between_nodes(full[stage], spec, ranks).items():
            pairs[pair] = pairs.get(pair, 0) + count
        for rank in ranks:
            to, back = looked_up(spec, model, rank, num_rows=num_rows)
            for items, exchanges in zip(rows, (full[stage], begun[stage]), strict=True):
                items.append(link_bytes(exchanges, spec, rank, to_host=to, from_host=back))
    return tuple(rows[0]), tuple(rows[1]), pairs


def _host_bytes(instances: Sequence[InstancePlan]) -> dict[str, int]:
    found: dict[str, int] = {}
    for instance in instances:
        for place, rank in zip(instance.places, instance.ranks, strict=True):
            found[place.node] = found.get(place.node, 0) + rank.machine_bytes
    return found


def _copy_bytes(spec: InstanceSpec, model: ModelConfig) -> int:
    """All that is read of a checkpoint, once."""
    whole = ParallelConfig(layers_per_stage=(model.num_layers,), ngram_embed_tp_size=1)
    weights = Weights(model=model, parallel=whole, width=DTYPE_BYTES[spec.model.dtype])
    drafts = weights.draft() if spec.engine.num_draft_tokens else 0
    return weights.layers(range(model.num_layers)) + weights.word() + weights.head() + weights.tables(0) + drafts


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
