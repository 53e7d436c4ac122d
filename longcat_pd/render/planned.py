"""The cluster that is rendered, and the memory that its instances need by the plan; without its checkpoint if need be."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from longcat_pd.config.checks import pools
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.resolve import instance_spec, load, unresolved
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.errors import ConfigError
from longcat_pd.sizing.memory import instance_memory


def cluster(path: Path, overrides: Sequence[str]) -> ClusterConfig:
    """As far as it can be told without its checkpoint. Raises ConfigError, also for what is no cluster."""
    config = unresolved(path, overrides)
    if config.prefill is None or config.decode is None:
        raise ConfigError(
            "standalone: one process alone is not rendered; a cluster has prefill and decode", param="standalone"
        )
    return config


def planned(path: Path, overrides: Sequence[str]) -> tuple[ClusterConfig, dict[str, tuple[int, ...]]]:
    """The cluster, and what ranks of each instance hold of the memory of each of its nodes, if config.json is here.

    Raises ConfigError.
    """
    config = cluster(path, overrides)
    if not os.access(Path(config.model.path) / "config.json", os.F_OK):
        text = "holds no config.json here: pods ask for no memory, and compiled graphs count where buckets are given"
        sys.stderr.write(f"note: model.path={config.model.path} {text}\n")
        return config, {}
    config = load(path, overrides)
    model = ModelConfig.load(config.model.path)
    names = [instance.name for _, pool in pools(config) for instance in pool.instances]
    memory = {}
    for name in names:
        spec = instance_spec(config, name)
        sizes, share = [rank.machine_bytes for rank in instance_memory(spec, model)], spec.ranks_per_node
        memory[name] = tuple(sum(sizes[first : first + share]) for first in range(0, len(sizes), share))
    return config, memory
