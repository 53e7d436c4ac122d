"""The cluster that is rendered, and the memory that the plan gives its instances; without its checkpoint as far as it goes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from longcat_pd.config.checks import pools
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.resolve import instance_spec, load, unresolved
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.sizing.memory import instance_memory


def planned(path: Path, overrides: Sequence[str]) -> tuple[ClusterConfig, dict[str, int]]:
    """The cluster, and the bytes of each instance on its fullest node, if its checkpoint's config.json is here.

    Raises ConfigError.
    """
    config = unresolved(path, overrides)
    if not (Path(config.model.path) / "config.json").is_file():
        text = "holds no config.json here: pods ask for no memory, and compiled graphs count where buckets are given"
        sys.stderr.write(f"note: model.path={config.model.path} {text}\n")
        return config, {}
    config = load(path, overrides)
    model = ModelConfig.load(config.model.path)
    names = [instance.name for _, pool in pools(config) for instance in pool.instances]
    memory = {}
    for name in names:
        spec = instance_spec(config, name)
        sizes, share = [rank.total_bytes for rank in instance_memory(spec, model)], spec.ranks_per_node
        memory[name] = max(sum(sizes[first : first + share]) for first in range(0, len(sizes), share))
    return config, memory
