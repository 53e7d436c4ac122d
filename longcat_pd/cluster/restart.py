"""``run_pd.sh restart``: stop, then start, if the configuration can work and nothing was left; of all or one service."""

from __future__ import annotations

import argparse

from longcat_pd.cluster import start, stop
from longcat_pd.cluster.machines import Cluster, cluster_of, running_cluster_of, running_part_of
from longcat_pd.cluster.telling import EXIT_FAILED, complain


def arguments(parser: argparse.ArgumentParser) -> None:
    """What restart takes."""
    start.arguments(parser)
    text = "this instance alone, or balancer, with the configuration as it was started; also where it has ended by itself"
    parser.add_argument("--instance", metavar="NAME", help=text)


def main(options: argparse.Namespace) -> int:
    """As start; 1 if the stop left something. ``--timeout-s`` is the start's."""
    if options.instance is not None:
        part = running_part_of(options)
        return start.begin(part, options.timeout_s) if _has_stopped(part) else EXIT_FAILED
    cluster_of(options)
    return start.main(options) if _has_stopped(running_cluster_of(options)) else EXIT_FAILED


def _has_stopped(cluster: Cluster) -> bool:
    """Stop it; whether nothing of it is left."""
    is_clear = stop.stop(cluster, cluster.machines, timeout_s=None).is_clear
    if not is_clear:
        complain("error: not started again, since not everything has stopped")
    return is_clear
