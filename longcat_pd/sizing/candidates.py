"""Layouts that a pool could have on so many cards: all that the rules of the configuration allow, within stated bounds.

Owns what is tried. What goes together is not decided here: the findings of ``config`` are asked for every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from longcat_pd.config.checks import blocks_needed, check_blocks, num_shards, pools
from longcat_pd.config.layout_checks import check_layout, check_layout_fits, num_nodes
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.npu_checks import check_device, check_device_fits
from longcat_pd.config.reader import Findings
from longcat_pd.config.resolve import even_stages
from longcat_pd.config.schema import ClusterConfig, EngineConfig, ParallelConfig, PoolConfig, Role
from longcat_pd.errors import ConfigError

MOST_SPLITS_OF_EXPERTS = 4  # numbers of ranks that share experts, from the largest on: fewer ranks hold more of them
_WAYS: tuple[Literal["gather", "all_to_all", "two_level", "fused"], ...] = ("gather", "all_to_all", "two_level", "fused")
PROMPTS_IN_ROOM = 2  # prompts of full length that a prefill pool has blocks for


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a cluster is for: ``sequences`` at once, of ``context`` tokens each, answer included."""

    context: int
    sequences: int


def candidates(role: Role, base: ClusterConfig, *, cards: int, asked: Asked, model: ModelConfig) -> Iterator[PoolConfig]:
    """Every legal pool of one instance over ``cards`` cards, resolved, in a fixed order.

    ``base``: resolved; what is not a size of the layout, or follows from one, is taken from its pool of the same role.
    """
    pool = pool_of(base, role)
    layouts = _prefill_layouts if role == "prefill" else _decode_layouts
    for parallel in layouts(pool.parallel, base, cards=cards, model=model):
        found = completed(role, parallel, base, asked=asked)
        if is_legal(role, found, base, model=model):
            yield found


def pool_of(base: ClusterConfig, role: Role) -> PoolConfig:
    """The pool that ``base`` has. Raises ConfigError if it has none."""
    pool: PoolConfig | None = vars(base)[role]
    if pool is None:
        raise ConfigError(f"{role}: missing; layouts are looked for in clusters of a prefill and a decode pool", param=role)
    return pool


def completed(role: Role, parallel: ParallelConfig, base: ClusterConfig, *, asked: Asked) -> PoolConfig:
    """A pool with room for what is asked."""
    pool = pool_of(base, role)
    parallel = replace(parallel, node_size=0)
    parallel = replace(parallel, node_size=num_nodes(parallel, base.devices_per_node))
    engine = replace(pool.engine, max_model_len=asked.context)
    whole = blocks_needed(asked.context, engine, num_shards=num_shards(parallel))
    if role == "prefill":
        return replace(pool, parallel=parallel, engine=replace(engine, num_blocks=1 + PROMPTS_IN_ROOM * whole))
    slots = -(-asked.sequences // parallel.dp_size)
    engine = replace(engine, max_num_seqs=slots * parallel.dp_size, num_blocks=1 + slots * whole)
    return replace(pool, parallel=parallel, engine=replace(engine, buckets=_buckets(engine, slots)))


def is_legal(role: Role, pool: PoolConfig, base: ClusterConfig, *, model: ModelConfig) -> bool:
    """Whether the rules of layouts, of the device and of the checkpoint find nothing, the other pool being as it is."""
    config, found = with_pool(base, role, pool), Findings()
    check_layout(role, pool, config, found=found)
    check_layout_fits(role, pool.parallel, model, found=found)
    check_device(config, dict(pools(config)), found=found)
    check_device_fits(config, dict(pools(config)), model, found=found)
    check_blocks(role, pool, found=found)
    try:
        found.raise_if_any()
    except ConfigError:
        return False
    return True


def with_pool(base: ClusterConfig, role: Role, pool: PoolConfig) -> ClusterConfig:
    """The same cluster with another pool."""
    return replace(base, prefill=pool) if role == "prefill" else replace(base, decode=pool)


def _buckets(engine: EngineConfig, slots: int) -> tuple[int, ...]:
    return () if engine.exe_mode == "eager" else (slots,)


def _prefill_layouts(
    own: ParallelConfig, base: ClusterConfig, *, cards: int, model: ModelConfig
) -> Iterator[ParallelConfig]:
    """Grids pp x cp; parts over all ranks of a stage or whole on each."""
    for pp in divisors(cards):
        cp = cards // pp
        if pp > model.num_layers:
            continue
        grid = ParallelConfig(pp_size=pp, cp_size=cp)
        for sized in _with_ends(grid, own, whole=cp, model=model):
            for parallel in _with_experts(sized, own, base, ranks=cp, model=model):
                for dense in sorted({1, cp}):
                    for stages in _stages(model.num_layers, pp):
                        yield replace(parallel, dense_tp_size=dense, layers_per_stage=stages)


def _decode_layouts(
    own: ParallelConfig, base: ClusterConfig, *, cards: int, model: ModelConfig
) -> Iterator[ParallelConfig]:
    """Grids dp x kvp; dense MLPs over a group, or some ranks or groups more; the head over a group, or a node."""
    for kvp in divisors(cards):
        grid = ParallelConfig(dp_size=cards // kvp, kvp_size=kvp, attn_tp_size=kvp, layers_per_stage=(model.num_layers,))
        for sized in _with_ends(grid, own, whole=cards, model=model):
            for parallel in _with_experts(sized, own, base, ranks=cards, model=model):
                for dense in sorted({1, kvp, min(2 * kvp, cards), min(4 * kvp, cards)}):
                    yield replace(parallel, dense_tp_size=dense)


def _with_ends(grid: ParallelConfig, own: ParallelConfig, *, whole: int, model: ModelConfig) -> Iterator[ParallelConfig]:
    """Tables and head. Word table and head as they are, or over as many ranks as there are; n-gram tables over all."""
    sizes = {name: min(vars(own)[name], whole) for name in ("lmhead_tp_size", "embed_tp_size")}
    has_tables = model.over_embedding is not None
    ngram = whole if has_tables else sizes["embed_tp_size"]
    places: tuple[Literal["device", "host"], ...] = ("device", "host")
    for place in places[: 1 + (has_tables and own.ngram_tables == "host")]:
        yield replace(grid, **sizes, ngram_embed_tp_size=ngram, ngram_tables=place)


def _with_experts(
    sized: ParallelConfig, own: ParallelConfig, base: ClusterConfig, *, ranks: int, model: ModelConfig
) -> Iterator[ParallelConfig]:
    """Experts over the largest numbers of ranks that divide them, in the ways to reach them that do not need proof.

    The fused pair has limits that only its operators know: it is tried where the pool has it already, or with A3.
    """
    sizes = [size for size in divisors(ranks) if model.n_routed_experts % size == 0][-MOST_SPLITS_OF_EXPERTS:]
    for ep in sizes:
        if ep == 1:
            yield replace(sized, ep_size=1)
            continue
        ways = {own.moe_dispatch, "gather", "all_to_all"}
        if sized.attn_tp_size > 1 and base.npu.soc == "A3":
            ways.add("fused")
        if ep > base.devices_per_node:
            ways.add("two_level")
        yield from (replace(sized, ep_size=ep, moe_dispatch=way) for way in _WAYS if way in ways)


def _stages(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """Even ones, and the same with what is missing taken from both ends, which have embedding and head."""
    even = even_stages(num_layers, num_stages)
    small = even.count(even[-1]) if even[0] != even[-1] else 0
    light = (even[-1],) * (small - small // 2) + (even[0],) * (num_stages - small) + (even[-1],) * (small // 2)
    return [even] if not small or light == even else [even, light]


def divisors(number: int) -> list[int]:
    """Ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]
