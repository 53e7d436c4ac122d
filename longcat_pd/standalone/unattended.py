"""An instance that nobody has to find and nobody waits for: on any ports that are free, with time to wait in its queue."""

from __future__ import annotations

import random
import sys
from dataclasses import replace

from longcat_pd.config.checks import ports_of
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.errors import ConfigError
from longcat_pd.server.face import OFFLINE_LIMIT_S
from longcat_pd.sizing.preflight import port_findings

_BASES = range(20000, 32000, 10)  # below the range that outgoing connections take their ports from
_TRIES = 100


def unattended(spec: InstanceSpec) -> InstanceSpec:
    """The same instance on ports that nobody listens on now; nothing is refused for waiting. Raises ConfigError."""
    engine = replace(spec.engine, queue_timeout_s=OFFLINE_LIMIT_S, max_queued_requests=sys.maxsize)
    for base in random.sample(_BASES, _TRIES):
        moved = replace(spec, http_port=base, engine=engine)
        if not any(port_findings(ports_of(moved))):
            return moved
    raise ConfigError(f"no free ports on {spec.host} among {_TRIES} places tried in {_BASES.start} ... {_BASES.stop}")
