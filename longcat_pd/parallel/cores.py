"""Which processor cores the ranks of a machine are bound to: neighbours, in the order of the ranks.

Cores are those that the process may run on, so what narrows them already (a container, ``taskset``) counts.
"""

from __future__ import annotations

import os

from longcat_pd.config.schema import InstanceSpec, RankSpec
from longcat_pd.errors import ConfigError


def core_finding(spec: InstanceSpec, num_cores: int) -> str | None:
    """Why the ranks of one node cannot be bound on a machine with so many cores; None: they can, or nobody wants it."""
    wanted = spec.ranks_per_node * spec.cores_per_device
    if wanted <= num_cores:
        return None
    text = f"{spec.ranks_per_node} ranks a node need {wanted} cores, {num_cores} are available here"
    return f"hosts.cores_per_device={spec.cores_per_device}: {text}"


def bind_to_cores(spec: RankSpec) -> None:
    """Bind this process, and threads that start later, to the cores of its rank. Raises ConfigError for too few cores."""
    each = spec.instance.cores_per_device
    if not each:
        return
    cores = sorted(os.sched_getaffinity(0))
    finding = core_finding(spec.instance, len(cores))
    if finding is not None:
        raise ConfigError(finding, param="hosts.cores_per_device")
    first = spec.local_rank * each
    os.sched_setaffinity(0, cores[first : first + each])
