"""The variables of a deployment script as overrides of a cluster YAML: a list of machines in the order of ranks, and so on.

Decode nodes first, then prefill nodes, the balancer on the last one. Checks that the number of addresses is right; all else
is checked like the file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from longcat_pd.config.checks import RANGES, pools
from longcat_pd.config.node_checks import is_loopback
from longcat_pd.config.reader import Findings, Reader
from longcat_pd.config.resolve import as_json
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.errors import ConfigError


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options; each is short for keys of the YAML."""
    parser.add_argument(
        "--iplist", metavar='"IP …"', help="machines: decode nodes, then prefill nodes; balancer on the last"
    )
    parser.add_argument("--ssh-port", type=int, metavar="PORT", help="hosts.port")
    parser.add_argument("--testpath", metavar="DIR", help="hosts.path: folder of each machine for code, logs and records")
    parser.add_argument("--logdir", metavar="DIR", help="log_dir")
    parser.add_argument("--cluster-key", metavar="FILE", help="cluster_key_file, which each machine has")
    parser.add_argument("--model-path", metavar="DIR", help="model.path")


def overrides(config: Path, options: argparse.Namespace) -> list[str]:
    """What the options say as ``key.path=value``, those of ``--set`` behind them. Raises ConfigError."""
    plain = {
        "hosts.port": options.ssh_port,
        "hosts.path": options.testpath,
        "log_dir": options.logdir,
        "cluster_key_file": options.cluster_key,
        "model.path": options.model_path,
    }
    laid = [f"{key}={json.dumps(value)}" for key, value in plain.items() if value is not None]
    given: list[str] = options.overrides
    if options.iplist is not None:
        laid += _of_addresses(config, [*laid, *given], options.iplist.replace(",", " ").split())
    return [*laid, *given]


def _of_addresses(config: Path, settings: Sequence[str], addresses: Sequence[str]) -> Iterator[str]:
    cluster = _as_far_as_readable(config, settings)
    wanted = dict(_num_nodes(cluster))
    total = sum(wanted.values())
    if total != len(addresses):
        parts = ", ".join(f"{key.rsplit('.', 1)[0]} {count}" for key, count in wanted.items())
        raise ConfigError(f"--iplist: has {len(addresses)} addresses, {config.name} needs {total}: {parts}", param="iplist")
    first = 0
    for key, count in wanted.items():
        yield f"{key}={json.dumps(list(addresses[first : first + count]))}"
        first += count
    if addresses:
        yield f"load_balancer.node={json.dumps(addresses[-1])}"
        if is_loopback(cluster.load_balancer.host) and not is_loopback(addresses[-1]):
            yield f"load_balancer.host={json.dumps(addresses[-1])}"


def _as_far_as_readable(config: Path, settings: Sequence[str]) -> ClusterConfig:
    """Before it has its nodes; what is wrong otherwise is found when it has them."""
    tree = json.loads(as_json(config, settings))
    return Reader(Findings(), RANGES).record(ClusterConfig, tree)


def _num_nodes(cluster: ClusterConfig) -> Iterator[tuple[str, int]]:
    """Key of each instance's nodes, decode first, and how many it has: as many as the file says, or its ranks need."""
    for role, pool in sorted(pools(cluster), key=lambda item: item[0]):
        needed = -(-pool.parallel.world_size // cluster.devices_per_node)
        for place, instance in enumerate(pool.instances):
            yield f"{role}.instances.{place}.nodes", max(needed, len(instance.nodes))
