"""Manifests against published schemas: Kubernetes' own, and for LeaderWorkerSet, which has none in a package, a table.

The table is the resource's v1 API in our own words: its fields with their types. Pod templates in it are checked as such
by Kubernetes' schema. Unknown fields are errors everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kubernetes_validate

VERSIONS = ("1.30", "1.37")  # the first that has preStop.sleep without being asked; the last that is published
LWS = "leaderworkerset.x-k8s.io/v1"

_COUNT, _POD = "count", "pod"
_LWS_SPEC: dict[str, Any] = {
    "replicas": _COUNT,
    "startupPolicy": ("LeaderCreated", "LeaderReady"),
    "networkConfig": {"subdomainPolicy": ("Shared", "UniquePerReplica")},
    "rolloutStrategy": {
        "type": ("RollingUpdate",),
        "rollingUpdateConfiguration": {"partition": _COUNT, "maxUnavailable": _COUNT, "maxSurge": _COUNT},
    },
    "leaderWorkerTemplate": {
        "size": _COUNT,
        "restartPolicy": ("RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None", "Default"),
        "leaderTemplate": _POD,
        "workerTemplate": _POD,
        "subGroupPolicy": {"subGroupPolicyType": ("LeaderWorker", "LeaderExcluded"), "subGroupSize": _COUNT},
    },
}


def complaints(item: dict[str, Any]) -> list[str]:
    """What the schemas have against one object, in every version."""
    if item["apiVersion"] == LWS:
        return list(_lws(item))
    return [text for version in VERSIONS for text in _official(item, version)]


def _official(item: dict[str, Any], version: str) -> Iterator[str]:
    try:
        kubernetes_validate.validate(item, version, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        yield f"{version}: {item['kind']}: {error.message}"


def _lws(item: dict[str, Any]) -> Iterator[str]:
    if item["kind"] != "LeaderWorkerSet" or set(item) != {"apiVersion", "kind", "metadata", "spec"}:
        yield f"{item['kind']} with {sorted(item)}"
    for version in VERSIONS:
        yield from _official({"apiVersion": "v1", "kind": "ConfigMap", "metadata": item["metadata"]}, version)
    yield from _against(item["spec"], _LWS_SPEC, "spec")
    if "workerTemplate" not in item["spec"].get("leaderWorkerTemplate", {}):
        yield "spec.leaderWorkerTemplate.workerTemplate: is required"


def _against(value: Any, wanted: Any, path: str) -> Iterator[str]:
    if wanted == _COUNT:
        if type(value) is not int or value < 0:
            yield f"{path}={value!r}: no count"
    elif wanted == _POD:
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": value}
        for version in VERSIONS:
            yield from (f"{path}: {text}" for text in _official(template, version))
    elif isinstance(wanted, tuple):
        if value not in wanted:
            yield f"{path}={value!r}: not one of {wanted}"
    elif not isinstance(value, dict):
        yield f"{path}={value!r}: no mapping"
    else:
        for key, inner in value.items():
            if key not in wanted:
                yield f"{path}.{key}: no such field"
            else:
                yield from _against(inner, wanted[key], f"{path}.{key}")
