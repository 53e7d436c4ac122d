"""Cluster files over the hosts, and small trees of code to distribute."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from tests.hosts.rig import Hosts

PYPROJECT = 'dependencies = [\n    "pyyaml>=6.0",\n    "pyzmq>=26",\n]\n'


def place(hosts: Hosts) -> str:
    """``hosts.path``: on the disk that each host has for itself."""
    return f"{hosts.disk}/longcat"


def key_file(hosts: Hosts) -> Path:
    """The key of the cluster, which every host sees at the same place."""
    file = hosts.identity.with_name("cluster.key")
    if not file.exists():
        file.touch(mode=0o600)
        file.write_text("a-key-of-this-rig-alone\n", encoding="ascii")
    return file


def cluster_tree(hosts: Hosts, *, model: Path = Path("/nowhere")) -> dict[str, Any]:
    """Decode over hosts 0 and 1, prefill over 2 and 3, the balancer on 3."""
    nodes = [hosts.address(number) for number in range(4)]
    decode = {
        "parallel": {"kvp_size": 2, "attn_tp_size": 2},
        "instances": [{"name": "d0", "http_port": 31000, "nodes": nodes[:2]}],
    }
    prefill = {"parallel": {"pp_size": 2}, "instances": [{"name": "p0", "http_port": 30000, "nodes": nodes[2:]}]}
    return {
        "model": {"path": str(model)},
        "cluster_key_file": str(key_file(hosts)),
        "decode": decode,
        "prefill": prefill,
        "load_balancer": {"host": "0.0.0.0", "port": 8081},
        "hosts": {
            "user": "root",
            "identity_file": str(hosts.identity),
            "known_hosts_file": str(hosts.known_hosts),
            "connect_timeout_s": 5,
            "path": place(hosts),
            "python": sys.executable,
        },
    }


def write_cluster(file: Path, tree: dict[str, Any]) -> Path:
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return file


def write_code(root: Path) -> Path:
    """Four small files, one of them in a folder, one that may be executed and one that is a link."""
    (root / "package").mkdir(parents=True)
    (root / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
    (root / "package" / "module with space.py").write_text("one = 1\n", encoding="utf-8")
    (root / "run.sh").write_text("#!/bin/sh\n", encoding="utf-8")
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("run.sh")
    (root / "__pycache__").mkdir()
    (root / "__pycache__" / "left.pyc").write_bytes(b"out")
    return root
