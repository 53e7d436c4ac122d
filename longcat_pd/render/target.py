"""Everything that the manifests of one cluster are made from: its configuration, names, image, and where weights lie."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from longcat_pd.config.checks import pools
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.config.services import Service, start_limit_s
from longcat_pd.render.command import Launch
from longcat_pd.render.devices import POD_DEVICES, PodDevice
from longcat_pd.render.names import Names

Object = dict[str, Any]  # one object of Kubernetes, or a part of one, under its own field names


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Where a pod finds ``model.path``: in ``sub_path`` of a PersistentVolumeClaim, or without one on its machine."""

    claim: str = ""
    sub_path: str = ""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One cluster in one namespace.

    ``config_text``: the ConfigMap's. ``secret``: holds the key files, each under the name of its setting. ``memory_bytes``:
    by instance, what ranks hold of each of its nodes, cards apart; empty where there is no checkpoint to plan with.
    """

    config: ClusterConfig
    config_text: str
    config_digest: str
    names: Names
    image: str
    launch: Launch
    secret: str
    weights: Weights = field(default_factory=Weights)
    memory_bytes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def device(self) -> PodDevice:
        """What pods of this cluster's device need."""
        return POD_DEVICES[self.config.device]

    @property
    def start_limit_s(self) -> int:
        """As patient as ``run_pd.sh`` is."""
        return math.ceil(start_limit_s(self.config))

    def ranks_per_node(self, service: Service) -> int:
        """Ranks that a service of an instance runs."""
        return next(
            pool.parallel.world_size // len(instance.nodes)
            for role, pool in pools(self.config)
            for place, instance in enumerate(pool.instances)
            if f"{role}.instances[{place}]" == service.key
        )

    def labels(self, service: Service | None = None) -> dict[str, str]:
        """Of every object of this cluster; of a service's pods in addition who they are."""
        labels = {"app.kubernetes.io/name": "longcat-pd", "app.kubernetes.io/instance": self.names.release}
        if service is None:
            return labels
        instance = service.name.partition(".")[0]
        component = service.key.partition(".")[0].replace("_", "-")
        own = {"longcat-pd/instance": instance, "longcat-pd/process": service.kind}
        return {**labels, "app.kubernetes.io/component": component, **own}

    def metadata(self, name: str, service: Service | None = None) -> Object:
        """Name, namespace and labels of an object."""
        return {"name": name, "namespace": self.names.namespace, "labels": self.labels(service)}
