"""What a balancer takes from the configuration of its instances."""

from __future__ import annotations

from longcat_pd.config.checks import pools
from longcat_pd.config.resolve import instance_spec
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.load_balancer.pool import Target


def max_model_len(cluster: ClusterConfig) -> int:
    """Tokens of prompt and answer that both pools have room for."""
    return min(pool.engine.max_model_len for _, pool in pools(cluster))


def targets_of(cluster: ClusterConfig) -> tuple[Target, ...]:
    """The instances of both pools, with what each has to say of itself."""
    found = []
    for role, pool in pools(cluster):
        if role == "standalone":
            continue
        for instance in pool.instances:
            spec = instance_spec(cluster, instance.name)
            target = Target(
                name=instance.name,
                role=role,
                url=instance.url,
                config_digest=spec.config_digest,
                nodes=spec.nodes or (spec.host,),
                stages=spec.parallel.pp_size,
                groups=spec.parallel.dp_size,
                num_ranks=spec.parallel.world_size,
            )
            found.append(target)
    return tuple(found)
