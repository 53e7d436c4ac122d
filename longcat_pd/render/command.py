"""The command line of a service, as ``run_pd.sh`` starts it, for whoever else starts it.

Knows neither Kubernetes nor systemd; what a ``$`` means to them is theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from longcat_pd.config.checks import pools
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.config.services import Service

DRAIN_MARGIN_S = 15.0  # after the drain, until ranks have ended and the process has
REFUSED = 2  # exit status of a start that was refused (docs/operations.md)
CONFIG_FILE = "/etc/longcat-pd/cluster.yaml"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How services are started on one kind of machine. ``setup_files``: sourced by a shell that becomes the service."""

    python: str
    config_file: str = CONFIG_FILE
    setup_files: tuple[str, ...] = ()

    def argv(self, service: Service) -> list[str]:
        """The command of a service, word by word; none of them has been escaped for anybody."""
        return [*self._shell(), self.python, *service.arguments, "--config", self.config_file]

    def _shell(self) -> Sequence[str]:
        if not self.setup_files:
            return ()
        sourced = "".join(f"source {file} || exit {REFUSED}; " for file in self.setup_files)  # no blanks or quotes in paths
        return ("/bin/bash", "-c", f'{sourced}exec "$0" "$@"')


def stop_limit_s(config: ClusterConfig) -> int:
    """How long a service may take from SIGTERM to its end: a drain, and what comes after it."""
    return math.ceil(max(pool.engine.drain_timeout_s for _, pool in pools(config)) + DRAIN_MARGIN_S)
