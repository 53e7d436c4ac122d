"""A cluster YAML as far as it is one, and what each of its instances is told."""

from __future__ import annotations

from collections.abc import Sequence

from longcat_pd.config.checks import blocks_needed, num_shards, pools
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.resolve import instance_spec, load, unresolved
from longcat_pd.config.schema import ClusterConfig, InstanceSpec, PoolConfig, Role
from longcat_pd.errors import ConfigError

_MANY_BLOCKS = 1 << 40  # so many that every sequence fits: where a number is wrong or missing, to see what would fit
_ROLES: tuple[Role, ...] = ("prefill", "decode", "standalone")


def read(path: str, overrides: Sequence[str]) -> tuple[ClusterConfig | None, ModelConfig | None, tuple[str, ...]]:
    """The configuration, its checkpoint's, and all that is wrong with them.

    Where nothing but numbers of blocks is wrong, there are enough for one sequence of full length instead. Without a model
    the configuration is not resolved.
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


def names(config: ClusterConfig) -> list[str]:
    """Of all instances, prefill first."""
    return [instance.name for _, pool in pools(config) for instance in pool.instances]


def told(config: ClusterConfig, name: str) -> tuple[InstanceSpec, int]:
    """What an instance is told, and how many ranks of the other pool each of its ranks may exchange cache with.

    Every rank of a prefill instance may send to every rank of every decode instance.
    """
    spec = instance_spec(config, name)
    others = [pool for role, pool in pools(config) if role != spec.role]
    return spec, sum(pool.parallel.world_size * len(pool.instances) for pool in others)
