"""The objects of a cluster in Kubernetes: a LeaderWorkerSet for each instance, a Deployment for the balancer, and what goes
with them.

Pods are ``pods.py``'s. Nothing here was run on a cluster; the fields are those of the published schemas.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from longcat_pd.config.services import Service, services
from longcat_pd.render.pods import INDEX, pod_template
from longcat_pd.render.target import Object, Target

MIB = 1 << 20
DRIVER_BYTES = 2 << 30  # of a driver: requests, tokenizer, books of the cache
BALANCER_RESOURCES: Object = {"requests": {"cpu": "1", "memory": "512Mi"}}


def objects(target: Target) -> Iterator[Object]:
    """All of them, in an order in which they can be applied."""
    yield {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": target.metadata(target.names.config),
        "data": {"cluster.yaml": target.config_text},
    }
    yield from _policies(target)
    *workers, balancer = services(target.config)
    for _, group in groupby(workers, key=lambda service: service.key):
        driver, *ranks = group
        yield _http_service(target, driver, name=f"{target.names.instance(driver.name)}-http")
        yield _worker_set(target, driver, ranks=ranks)
    yield _http_service(target, balancer, name=target.names.balancer)
    yield _balancer(target, balancer)
    yield _disruption_budget(target, balancer)


def _worker_set(target: Target, driver: Service, *, ranks: list[Service]) -> Object:
    """One group of as many pods as the instance has nodes. It lives and dies as a whole, as an instance does."""
    names = target.names
    own = names.address(driver.name, 0)
    leader = pod_template(target, driver, resources=_resources(target, driver), names=[own])
    template: Object = {"size": 1 + len(ranks), "restartPolicy": "RecreateGroupOnPodRestart"}
    if ranks:
        further = [own, names.address(driver.name, INDEX)]
        worker = pod_template(target, ranks[0], resources=_resources(target, ranks[0]), names=further)
        template |= {"leaderTemplate": leader, "workerTemplate": worker}
    else:
        template |= {"workerTemplate": leader}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": target.metadata(names.instance(driver.name), driver),
        "spec": {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",  # a driver is ready when its ranks are: they must not wait for that
            "networkConfig": {"subdomainPolicy": "Shared"},
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},
            },
            "leaderWorkerTemplate": template,
        },
    }


def _resources(target: Target, service: Service) -> Object:
    """Devices by number; a processor for every rank and for the driver; and memory as planned, without a limit that would
    end a rank. Pods of further nodes are of one template, so that the fullest of these counts."""
    is_driver = service.kind == "driver"
    need = {"cpu": str(target.ranks_per_node(service) + is_driver)}
    planned = target.memory_bytes.get(service.name.partition(".")[0], ())
    if planned:
        total = planned[0] + DRIVER_BYTES if is_driver else max(planned[1:])
        need["memory"] = f"{-(-total // MIB)}Mi"
    if not target.device.resource:
        return {"requests": need}
    cards = {target.device.resource: str(target.config.devices_per_node)}
    return {"requests": {**need, **cards}, "limits": cards}


def _http_service(target: Target, service: Service, *, name: str) -> Object:
    port = int(service.url.rpartition(":")[2])
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": target.metadata(name, service),
        "spec": {
            "type": "ClusterIP",
            "selector": target.labels(service),
            "ports": [{"name": "http", "port": port, "targetPort": "http"}],
        },
    }


def _balancer(target: Target, service: Service) -> Object:
    """One pod; a new one serves before the old one drains."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": target.metadata(target.names.balancer, service),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "selector": {"matchLabels": target.labels(service)},
            "template": pod_template(target, service, resources=BALANCER_RESOURCES, is_routed=True),
        },
    }


def _disruption_budget(target: Target, service: Service) -> Object:
    """Nothing evicts the only balancer while it serves; a restart of the Deployment moves it without a gap."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": target.metadata(target.names.balancer, service),
        "spec": {
            "maxUnavailable": 0,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": target.labels(service)},
        },
    }


def _policies(target: Target) -> Iterator[Object]:
    """Who may open connections: everybody to the balancer's port, pods of the cluster to those of its instances.

    Pods on the network of their machine have no policy: its packets carry no pod's address.
    """
    balancer: Object = {"longcat-pd/process": "balancer"}
    port = {"protocol": "TCP", "port": target.config.load_balancer.port}
    yield _policy(
        target, target.names.balancer, chosen={"matchLabels": {**target.labels(), **balancer}}, ingress={"ports": [port]}
    )
    if not target.device.on_host_network:
        others = {"key": "longcat-pd/process", "operator": "NotIn", "values": ["balancer"]}
        yield _policy(
            target,
            f"{target.names.release}-instances",
            chosen={"matchLabels": target.labels(), "matchExpressions": [others]},
            ingress={"from": [{"podSelector": {"matchLabels": target.labels()}}]},
        )


def _policy(target: Target, name: str, *, chosen: Object, ingress: Object) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": target.metadata(name),
        "spec": {"podSelector": chosen, "policyTypes": ["Ingress"], "ingress": [ingress]},
    }
