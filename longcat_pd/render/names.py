"""Names of a cluster's objects in Kubernetes, and of its pods in DNS as a LeaderWorkerSet gives them.

Owns the configuration that pods read: the cluster's own with addresses of pods in it. Knows no manifest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longcat_pd.config.checks import pools
from longcat_pd.config.reader import Findings
from longcat_pd.config.resolve import as_json, check_tree
from longcat_pd.config.schema import ClusterConfig, InstanceConfig
from longcat_pd.config.services import BALANCER

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST = 50  # of 63: the controllers append a group, an index and a revision
_IMAGE = re.compile(r"[^\s@]+@sha256:[0-9a-f]{64}|[^\s@]*[^\s@:/]:(?!latest$)[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True)
class Names:
    """``release``: what every object of this cluster begins with."""

    release: str
    namespace: str

    @property
    def balancer(self) -> str:
        """The balancer's Deployment and Service."""
        return f"{self.release}-{BALANCER}"

    @property
    def config(self) -> str:
        """The ConfigMap with the cluster YAML."""
        return f"{self.release}-config"

    @property
    def balancer_address(self) -> str:
        """Where pods find the balancer."""
        return f"{self.balancer}.{self.namespace}"

    def instance(self, name: str) -> str:
        """The LeaderWorkerSet of an instance, which is the name of its headless Service too."""
        return f"{self.release}-{name}"

    def address(self, name: str, place: int | str) -> str:
        """The pod of an instance's node: of one group, the leader without an index and the others with theirs."""
        group = self.instance(name)
        pod = f"{group}-0-{place}" if place else f"{group}-0"
        return f"{pod}.{group}.{self.namespace}"

    def addresses(self, instance: InstanceConfig) -> list[str]:
        """Those of all nodes of an instance, in their order."""
        return [self.address(instance.name, place) for place in range(len(instance.nodes))]


def check_names(config: ClusterConfig, names: Names, *, image: str, found: Findings) -> None:
    """What Kubernetes would refuse, or start as something else."""
    for option, value in (("--name", names.release), ("--namespace", names.namespace)):
        if not _LABEL.fullmatch(value) or len(value) > _LONGEST:
            found.add(option, f"{option} {value}: lower-case letters, digits and '-', a letter first, {_LONGEST} at most")
    if not _IMAGE.fullmatch(image):
        found.add("--image", f"--image {image}: must be pinned: NAME:TAG with a tag other than latest, or NAME@sha256:…")
    taken = {names.balancer: "the balancer"}
    for role, pool in pools(config):
        for place, instance in enumerate(pool.instances):
            key, name = f"{role}.instances[{place}].name", names.instance(instance.name)
            if not _LABEL.fullmatch(instance.name) or len(name) > _LONGEST:
                text = (
                    f"Kubernetes wants lower-case letters, digits and '-', a letter first, and {name} of {_LONGEST} at most"
                )
                found.add(key, f"{key}={instance.name}: {text}")
            for object_name in (name, f"{name}-http", f"{name}-0"):  # the last: of further pods, by the LeaderWorkerSet
                if object_name in taken:
                    found.add(key, f"{key}={instance.name}: {object_name} is already the name of {taken[object_name]}")
                taken[object_name] = instance.name


def pod_tree(path: Path, overrides: Sequence[str], *, config: ClusterConfig, names: Names) -> dict[str, Any]:
    """The cluster YAML as pods read it: overrides laid over, every address that of a pod, all else as it is.

    Raises ConfigError for what pods would refuse because of their addresses.
    """
    tree: dict[str, Any] = json.loads(as_json(path, overrides))
    for role, pool in pools(config):
        for given, instance in zip(tree[role]["instances"], pool.instances, strict=True):
            given["nodes"] = names.addresses(instance)
    host = "::" if ":" in config.load_balancer.host else "0.0.0.0"
    tree["load_balancer"] = {**(tree.get("load_balancer") or {}), "host": host, "node": names.balancer_address}
    check_tree(tree)
    return tree
