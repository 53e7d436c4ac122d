"""What a process says of its plan before it loads anything. Knows where that is said, not how it is found."""

from __future__ import annotations

import sys

from longcat_pd.config.schema import InstanceSpec
from longcat_pd.log import logger
from longcat_pd.server.tracing import check_installed
from longcat_pd.sizing import preflight


def tell_plan(spec: InstanceSpec, *, node_rank: int = 0) -> None:
    """The plan on standard error, its figures in the log. Raises ConfigError with all findings of this machine,
    or for packages that the instance's driver needs and has not."""
    found = preflight.inspect(spec, node_rank=node_rank)
    for line in found.plan:
        sys.stderr.write(f"{line}\n")
    logger().info("plan", **found.facts)
    found.raise_if_refused()
    if not node_rank:
        check_installed(spec.tracing)
