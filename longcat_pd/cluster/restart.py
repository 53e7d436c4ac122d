"""``run_pd.sh restart``: stop, then start, if the configuration can work and nothing was left."""

from __future__ import annotations

import argparse

from longcat_pd.cluster import start, stop
from longcat_pd.cluster.machines import cluster_of, running_cluster_of
from longcat_pd.cluster.telling import complain

arguments = start.arguments


def main(options: argparse.Namespace) -> int:
    """As start; 1 if the stop left something. ``--timeout-s`` is the start's."""
    cluster_of(options)
    running = running_cluster_of(options)
    outcome = stop.stop(running, running.machines, timeout_s=None)
    if not outcome.is_clear:
        complain("error: not started again, since not everything has stopped")
        return outcome.status
    return start.main(options)
