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
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.load_balancer.attempt import Means
from longcat_pd.load_balancer.face import Face, Keys, first_key
from longcat_pd.load_balancer.overview import Served
from longcat_pd.load_balancer.pool import Pool
from longcat_pd.load_balancer.targets import max_model_len, targets_of
from longcat_pd.load_balancer.workers import Workers
from longcat_pd.metrics import Metrics
from longcat_pd.server.tracing import make_tracer

NAME = "load_balancer"


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
        max_model_len=max_model_len(cluster),
        created=int(time.time()),
        instance=NAME,
        incarnation=secrets.token_hex(8),
        config_digest=hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode()).hexdigest()[:16],
    )
    metrics.build_info(version=served.version, model_digest="", wire_version="")
    tracer = make_tracer(cluster.tracing, role=NAME, instance=NAME, metrics=metrics, clock=clock)
    means = Means(pool=pool, workers=workers, clock=clock, metrics=metrics, tracer=tracer)
    return Face.of(means, settings, keys=Keys.load(settings), served=served, has_faults=cluster.faults)
