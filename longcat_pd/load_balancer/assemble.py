"""From the configuration of a cluster to the parts of its balancer.

The one place that sees the whole configuration; every part is given its own section.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from dataclasses import asdict

from longcat_pd.clock import MonotonicClock
from longcat_pd.config.checks import pools
from longcat_pd.config.resolve import instance_spec
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.load_balancer.attempt import Means
from longcat_pd.load_balancer.face import Face, Keys, first_key
from longcat_pd.load_balancer.overview import Served
from longcat_pd.load_balancer.pool import Pool, Target
from longcat_pd.load_balancer.workers import Workers
from longcat_pd.metrics import Metrics

NAME = "load_balancer"


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


def build(cluster: ClusterConfig) -> Face:
    """The parts of the balancer of this cluster. Reads the key files. Raises ConfigError."""
    settings = cluster.load_balancer
    metrics = Metrics(role=NAME, instance=NAME)
    clock = MonotonicClock()
    workers = Workers(clock, key=first_key(cluster.cluster_key_file) if cluster.cluster_key_file else None)
    pool = Pool(targets_of(cluster), ask=workers.ask_ready, clock=clock, metrics=metrics)
    served = Served(
        name=cluster.model.served_name,
        path=cluster.model.path,
        max_model_len=min(pool.engine.max_model_len for _, pool in pools(cluster)),
        created=int(time.time()),
        instance=NAME,
        incarnation=secrets.token_hex(8),
        config_digest=hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode()).hexdigest()[:16],
    )
    metrics.build_info(version=served.version, model_digest="", wire_version="")
    means = Means(pool=pool, workers=workers, clock=clock, metrics=metrics)
    return Face.of(means, settings, keys=Keys.load(settings), served=served, has_faults=cluster.faults)
