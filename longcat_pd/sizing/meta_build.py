"""Every rank of a cluster built at full size without memory, behind ``longcat-pd plan --meta``.

Reads ``config.json``, and the names in the checkpoint's table of contents if there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from longcat_pd.config.checks import pools
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.resolve import instance_spec
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.models.checkpoint import INDEX_FILE, open_checkpoint
from longcat_pd.sizing.meta_instance import InstanceReport, check_instance


@dataclass(frozen=True, kw_only=True)
class MetaReport:
    """What was seen of the first instance of each pool; the others of a pool are like it."""

    instances: tuple[InstanceReport, ...]

    @property
    def findings(self) -> tuple[str, ...]:
        """What does not agree, one line for each kind of disagreement."""
        return tuple(line for instance in self.instances for line in instance.findings)

    def lines(self) -> Iterator[str]:
        """For people, without the findings."""
        for instance in self.instances:
            yield from instance.lines()


def check_ranks(cluster: ClusterConfig) -> MetaReport:
    """Build every rank of the first instance of each pool of a resolved configuration.

    Raises:
        ConfigError: config.json cannot be read, or the configuration does not fit.
    """
    path = Path(cluster.model.path)
    config = ModelConfig.load(path)
    stored = open_checkpoint(path).shard_of.keys() if (path / INDEX_FILE).is_file() else ()
    reports = []
    for _, pool in pools(cluster):
        spec = instance_spec(cluster, pool.instances[0].name)
        reports.append(check_instance(spec, config, stored=stored, num_instances=len(pool.instances)))
    return MetaReport(instances=tuple(reports))
