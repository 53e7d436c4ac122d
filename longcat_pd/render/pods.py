"""Pod templates: the process of one service in a container, with its probes, volumes, rights and the time it has to end.

Knows a service's command and environment, and nothing of what creates its pods.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath

from longcat_pd.config.checks import pools, port_uses
from longcat_pd.config.services import Service
from longcat_pd.render.command import stop_limit_s
from longcat_pd.render.target import Object, Target

USER = 10001  # of deploy/Dockerfile
HOME = "/home/longcat"
_INDEX_NAME = "NODE_RANK"
INDEX = f"$({_INDEX_NAME})"  # filled by the kubelet; only pods of further nodes have it
_PLACE: Object = {  # from the label: LWS_WORKER_INDEX is younger than the API's v1, and was 0 everywhere at first
    "name": _INDEX_NAME,
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"}},
}
_OWN = "/own"  # where a pod's first container makes the folders of the others
NAMES_S = 300  # until names of pods resolve: DNS may remember for half a minute that they did not
PROBE_S = 5  # the answer takes a tenth of a second at any load
ROUTING_S = 5  # until no Service sends anything new to a pod that is about to end

_AWAIT_NAMES = 'for name; do until getent ahosts "$name" >/dev/null; do sleep 1; done; done'


def pod_template(
    target: Target, service: Service, *, resources: Object, names: Sequence[str] = (), is_routed: bool = False
) -> Object:
    """The pods of a service. ``names`` resolve before it starts. ``is_routed``: clients come through a Service."""
    device, volumes = target.device, list(_volumes(target, service))
    mounts = [mount for _, mount in volumes]
    first = [_await_names(target, service, names)] if names else []
    first += [_make_folders(target, folders)] if (folders := _own_folders(target, service)) else []
    container: Object = {
        "name": service.kind,
        "image": target.image,
        "command": _command(target, service),
        "workingDir": HOME,  # of the image may be one that cannot be written to, and compilers of operators write there
        "env": _environment(target, service),
        "ports": _ports(target, service),
        "resources": resources,
        "securityContext": _container_rights(),
        "volumeMounts": mounts,
        **(_probes(target) if service.url else {}),
    }
    if is_routed:
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": ROUTING_S}}}
    spec: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
            **({"supplementalGroups": list(device.groups)} if device.groups else {}),
        },
        "terminationGracePeriodSeconds": stop_limit_s(target.config) + (ROUTING_S if is_routed else 0),
        "initContainers": first,
        "containers": [container],
        "volumes": _once(volume for volume, _ in volumes),
    }
    if device.on_host_network and not is_routed:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    annotations = {"longcat-pd/config": target.config_digest}  # another configuration, other pods
    return {"metadata": {"labels": target.labels(service), "annotations": annotations}, "spec": spec}


def literal(text: str) -> str:
    """As the kubelet has to read it to mean ``text``."""
    return text.replace("$", "$$")


def _command(target: Target, service: Service) -> list[str]:
    """That of ``run_pd.sh``. Pods of further nodes are of one template: their place comes with the pod."""
    words = [literal(word) for word in target.launch.argv(service)]
    if "--node-rank" in words:
        words[words.index("--node-rank") + 1] = INDEX
    return words


def _environment(target: Target, service: Service) -> list[Object]:
    """The service's own, a home that can be written to, and which of several pods this is."""
    given = {key: value for key, value in service.env.items() if key not in target.device.assigned}
    return [{"name": key, "value": literal(value)} for key, value in {"HOME": HOME, **given}.items()] + _place(service)


def _place(service: Service) -> list[Object]:
    return [_PLACE] if service.kind == "ranks" else []


def _ports(target: Target, service: Service) -> list[Object]:
    """On the network of the machine these are its ports, which the scheduler then gives to one pod alone."""
    wanted = f"{service.key}.http_port" if service.kind != "balancer" else f"{service.key}.port"
    uses = (use for use in port_uses(target.config) if use.key == wanted and use.node == service.node)
    ports = [{"containerPort": use.port} for use in uses]
    return [{"name": "http", **ports[0]}, *ports[1:]] if service.url else ports


def _probes(target: Target) -> Object:
    def ask(path: str, *, every_s: int, times: int) -> Object:
        asked = {"httpGet": {"path": path, "port": "http"}, "timeoutSeconds": PROBE_S}
        return {**asked, "periodSeconds": every_s, "failureThreshold": times}

    return {
        "startupProbe": ask("/health", every_s=10, times=-(-target.start_limit_s // 10)),
        "livenessProbe": ask("/health", every_s=10, times=6),
        "readinessProbe": ask("/ready", every_s=5, times=2),
    }


def _await_names(target: Target, service: Service, names: Sequence[str]) -> Object:
    """A pod's name is known to DNS some time after it has begun; a service that cannot find its own is refused."""
    return {
        "name": "names",
        "image": target.image,
        "command": ["timeout", str(NAMES_S), "sh", "-c", literal(_AWAIT_NAMES), "names", *names],
        "env": _place(service),
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "64Mi"}},
        "securityContext": _container_rights(),
    }


def _container_rights() -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _volumes(target: Target, service: Service) -> Iterator[tuple[Object, Object]]:
    """Each volume with one of its mounts. What the configuration names lies at that path in the container too."""
    config_file = PurePosixPath(target.launch.config_file)
    configuration = {"name": "config", "configMap": {"name": target.names.config}}
    yield configuration, {"name": "config", "mountPath": str(config_file.parent), "readOnly": True}
    yield _weights(target)
    secret = {"name": "keys", "secret": {"secretName": target.secret, "defaultMode": 0o444}}
    for key, path in _key_files(target, service).items():
        yield secret, {"name": "keys", "mountPath": path, "subPath": key, "readOnly": True}
    yield {"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "shm", "mountPath": "/dev/shm"}
    yield {"name": "tmp", "emptyDir": {}}, {"name": "tmp", "mountPath": "/tmp"}
    yield {"name": "home", "emptyDir": {}}, {"name": "home", "mountPath": HOME}
    if service.kind == "balancer":
        return
    for name, path in _own_folders(target, service).items():
        yield {"name": "own", "emptyDir": {}}, {"name": "own", "mountPath": path, "subPath": name}
    for place, path in enumerate(target.device.host_paths):
        name = f"driver-{place}"
        yield {"name": name, "hostPath": {"path": path}}, {"name": name, "mountPath": path, "readOnly": True}


def _own_folders(target: Target, service: Service) -> dict[str, str]:
    """Folders that a service writes to and lets nobody else into, with their paths."""
    if service.kind == "balancer":
        return {}
    (pool,) = (pool for role, pool in pools(target.config) if service.key.startswith(f"{role}."))
    by_path = {pool.engine.compile_cache: "compiled"} if pool.engine.compile_cache else {}
    record = target.config.record
    if service.kind == "driver" and record is not None and not service.key.startswith("prefill."):
        by_path[record.dir] = "records"
    return {name: path for path, name in by_path.items()}


def _make_folders(target: Target, names: Iterable[str]) -> Object:
    """An emptyDir belongs to root and is open to all, which a service refuses of its own folders: they lie in it."""
    return {
        "name": "folders",
        "image": target.image,
        "command": ["mkdir", "-p", "-m", "700", *(f"{_OWN}/{name}" for name in names)],
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "64Mi"}},
        "securityContext": _container_rights(),
        "volumeMounts": [{"name": "own", "mountPath": _OWN}],
    }


def _weights(target: Target) -> tuple[Object, Object]:
    path, given = target.config.model.path, target.weights
    mount = {"name": "weights", "mountPath": path, "readOnly": True}
    if not given.claim:
        return {"name": "weights", "hostPath": {"path": path, "type": "Directory"}}, mount
    if given.sub_path:
        mount["subPath"] = given.sub_path
    claim = {"claimName": given.claim, "readOnly": True}
    return {"name": "weights", "persistentVolumeClaim": claim}, mount


def _key_files(target: Target, service: Service) -> dict[str, str]:
    """Settings and paths of the files that a service reads. Clients' keys are the balancer's alone."""
    config = target.config
    files = {"cluster_key_file": config.cluster_key_file}
    if service.kind == "balancer":
        files |= {
            "api_key_file": config.load_balancer.api_key_file,
            "admin_key_file": config.load_balancer.admin_key_file,
        }
    by_path = {path: key for key, path in files.items() if path}  # two settings may name one file
    return {key: path for path, key in by_path.items()}


def _once(volumes: Iterable[Object]) -> list[Object]:
    return list({volume["name"]: volume for volume in volumes}.values())
