"""Which processor cores the ranks of a machine are bound to: neighbours, in the order of the instances and their ranks.

Cores are those that the process may run on, so what narrows them already (a container, ``taskset``) counts.
"""

from __future__ import annotations

import os

from longcat_pd.config.schema import InstanceSpec, RankSpec
from longcat_pd.errors import ConfigError


def core_finding(spec: InstanceSpec, node_rank: int, num_cores: int) -> str | None:
    """Why the ranks of a node cannot be bound on a machine with so many cores; None: they can, or nobody wants it."""
    before = _ranks_before(spec, node_rank)
    wanted = (before + spec.ranks_per_node) * spec.cores_per_device
    if wanted <= num_cores:
        return None
    beside = f" beside {before} of other instances" if before else ""
    text = f"{spec.ranks_per_node} ranks a node{beside} need {wanted} cores, {num_cores} are available here"
    return f"hosts.cores_per_device={spec.cores_per_device}: {text}"


def bind_to_cores(spec: RankSpec) -> None:
    """Bind this process, and threads that start later, to the cores of its rank. Raises ConfigError for too few cores."""
    each = spec.instance.cores_per_device
    if not each:
        return
    cores = sorted(os.sched_getaffinity(0))
    finding = core_finding(spec.instance, spec.node_rank, len(cores))
    if finding is not None:
        raise ConfigError(finding, param="hosts.cores_per_device")
    first = (_ranks_before(spec.instance, spec.node_rank) + spec.local_rank) * each
    os.sched_setaffinity(0, cores[first : first + each])


def _ranks_before(spec: InstanceSpec, node_rank: int) -> int:
    return spec.ranks_before[node_rank] if spec.ranks_before else 0
