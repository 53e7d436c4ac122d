"""Whom the doctor looks at: for each machine of a cluster, what it is asked and what the configuration needs of it.

Asks no machine.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longcat_pd.cluster import packages
from longcat_pd.cluster.facts import Request
from longcat_pd.cluster.findings import Expected
from longcat_pd.cluster.shell import LocalShell, SshShell, shell_of
from longcat_pd.cluster.tree import Tree, tree_of
from longcat_pd.config.checks import pools
from longcat_pd.config.resolve import unresolved
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.config.services import nodes_of, ports_of_node, services

_INTERFACES = ("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
_WITH_TOOLS = frozenset({"npu"})  # devices with npu-smi and hccn_tool


@dataclass(frozen=True, kw_only=True)
class Patient:
    """One machine, what is needed of it, and what it is asked."""

    shell: LocalShell | SshShell
    config: ClusterConfig
    expected: Expected
    request: Request
    packages: Sequence[str]

    @property
    def python(self) -> str:
        """The interpreter that services run with."""
        hosts = self.config.hosts
        return hosts.python or (f"{hosts.path.rstrip('/')}/current/.venv/bin/python" if hosts.path else sys.executable)


def patients_of(root: Path, file: Path, overrides: Sequence[str]) -> list[tuple[str, Patient]]:
    """All machines of the cluster of a file, beside the tree at ``root``. Raises ConfigError."""
    config, tree, label = unresolved(file, overrides), tree_of(root), secrets.token_hex(16)
    return [(node, _patient(node, config, name=file.stem, tree=tree, label=label)) for node in nodes_of(config)]


def _patient(node: str, config: ClusterConfig, *, name: str, tree: Tree, label: str) -> Patient:
    """What one machine is asked, and what it must have."""
    path = config.hosts.path.rstrip("/")
    mine = [service for service in services(config) if service.node == node]
    counts = (
        pool.parallel.world_size // len(instance.nodes)
        for _, pool in pools(config)
        for instance in pool.instances
        if node in instance.nodes
    )
    num_ranks = sum(counts)
    num_devices = config.devices_per_node if config.device in _WITH_TOOLS and num_ranks else 0
    folders = tuple(dict.fromkeys(folder for folder in (path or str(tree.root), config.log_dir or "") if folder))
    expected = Expected(
        node=node,
        release=tree.digest if path else "",
        disk_bytes=tree.disk_bytes if path else 0,
        num_ranks=num_ranks,
        cores_per_device=config.hosts.cores_per_device,
        num_devices=num_devices,
        interfaces={name: service.env[name] for service in mine for name in _INTERFACES if name in service.env},
    )
    request = Request(
        node=node,
        path=path,
        run=f"{path}/run/{name}" if path else str(tree.root / ".run" / name),
        ports=tuple((use.host, use.port, use.purpose) for use in ports_of_node(config, node)),
        folders=folders,
        model=config.model.path if num_ranks else "",
        only_config=config.model.weights == "random",
        num_devices=num_devices,
        key_file=config.cluster_key_file or "",
        label=label,
    )
    names = packages.needed((tree.root / "pyproject.toml").read_text(encoding="utf-8"), config.device)
    return Patient(shell=shell_of(node, config.hosts), config=config, expected=expected, request=request, packages=names)
