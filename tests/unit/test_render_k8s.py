"""Manifests of a cluster: accepted by the schemas, the same processes as everywhere, no rights that a pod does not need."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from longcat_pd.config.checks import pools
from longcat_pd.config.resolve import load, unresolved
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.config.services import services
from longcat_pd.plan.survey import survey
from longcat_pd.render.main import main
from longcat_pd.tiny.configs import make_config
from tests.manifests import complaints

IMAGE = "registry.example/longcat-pd:0.1.0"
NPU = (  # whose checkpoint is on its machines alone
    *("device=npu", "devices_per_node=1", "model.dtype=bfloat16", "model.path=/weights/far"),
    *("decode.engine.num_blocks=64", "prefill.engine.num_blocks=64"),
)
CLUSTER_FILES = sorted((Path(__file__).parents[2] / "deploy" / "config" / "cluster").glob("*.yaml"))
Manifest = dict[str, Any]


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """Prefill on three nodes, two times decode on two, with keys, and with values that a shell would read."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(make_config("2.0", [], dtype="float32")))
    tree: Manifest = {
        "model": {"path": "model"},
        "load_balancer": {"port": 9000, "api_key_file": "keys/clients", "admin_key_file": "keys/admin"},
        "cluster_key_file": "keys/cluster",
        "prefill": {
            "engine": {"block_size": 16, "max_num_batched_tokens": 64, "drain_timeout_s": 77.5},
            "parallel": {"pp_size": 3},
            "instances": [{"name": "p0", "http_port": 30000, "nodes": ["10.0.0.1", "10.0.0.2", "10.0.0.3"]}],
            "env": {"ROLE": "$(HOME) and $$ 'quoted'"},
        },
        "decode": {
            "engine": {"block_size": 16},
            "parallel": {"kvp_size": 2, "attn_tp_size": 2},
            "instances": [
                {"name": "d0", "http_port": 31000, "nodes": ["10.0.1.1", "10.0.1.2"]},
                {"name": "d1", "http_port": 31100, "nodes": ["10.0.1.3", "10.0.1.4"]},
            ],
        },
        "env": {"ASCEND_RT_VISIBLE_DEVICES": "0", "HCCL_BUFFSIZE": "512"},
    }
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def rendered(
    file: Path, capsys: pytest.CaptureFixture[str], *arguments: str, overrides: tuple[str, ...] = ()
) -> list[Manifest]:
    settings = [part for item in overrides for part in ("--set", item)]
    assert main(["k8s", str(file), "--image", IMAGE, "--namespace", "serving", *arguments, *settings]) == 0
    return list(yaml.load_all(capsys.readouterr().out, Loader=yaml.CSafeLoader))


def of_kind(objects: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {item["metadata"]["name"]: item for item in objects if item["kind"] == kind}


def templates(objects: list[Manifest]) -> Iterator[tuple[str, int, Manifest]]:
    """Each pod that the objects make: the object's name, its place in the group, its template."""
    for name, item in of_kind(objects, "Deployment").items():
        yield name, 0, item["spec"]["template"]
    for name, item in of_kind(objects, "LeaderWorkerSet").items():
        group = item["spec"]["leaderWorkerTemplate"]
        yield name, 0, group.get("leaderTemplate", group["workerTemplate"])
        for place in range(1, group["size"]):
            yield name, place, group["workerTemplate"]


def as_kubelet_reads(text: str, variables: dict[str, str]) -> str:
    """``$$`` is a dollar, ``$(NAME)`` a variable that is known, and anything else itself."""
    out, rest = "", text
    while "$" in rest:
        before, _, rest = rest.partition("$")
        name = rest[1:].partition(")")[0] if rest.startswith("(") else ""
        if rest.startswith("$"):
            out, rest = f"{out}{before}$", rest[1:]
        elif name in variables:
            out, rest = f"{out}{before}{variables[name]}", rest[len(name) + 2 :]
        else:
            out = f"{out}{before}$"
    return out + rest


def processes(objects: list[Manifest]) -> list[tuple[list[str], dict[str, str]]]:
    """Command and environment of every container that stays, as they are when it runs."""
    found = []
    for _, place, template in templates(objects):
        (container,) = template["spec"]["containers"]
        variables, given = (
            variables_of(container, place),
            {item["name"]: item.get("value", "") for item in container["env"]},
        )
        command = [as_kubelet_reads(word, variables) for word in container["command"]]
        given.pop("NODE_RANK", None)
        found.append((command, {key: as_kubelet_reads(value, variables) for key, value in given.items()}))
    return found


def variables_of(container: Manifest, place: int) -> dict[str, str]:
    """What a container's environment says where the LeaderWorkerSet has labelled its pod."""
    labels = {"metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']": str(place)}
    return {
        i["name"]: i["value"] if "value" in i else labels[i["valueFrom"]["fieldRef"]["fieldPath"]] for i in container["env"]
    }


@pytest.mark.parametrize("overrides", [(), NPU], ids=["cpu", "npu"])
def test_the_schemas_accept_all(cluster: Path, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...]) -> None:
    claim = () if overrides else ("--weights-claim", "weights", "--weights-sub-path", "longcat")
    objects = rendered(cluster, capsys, *claim, overrides=overrides)
    assert len(objects) == 12 - bool(overrides) and [text for item in objects for text in complaints(item)] == []


@pytest.mark.parametrize("file", CLUSTER_FILES, ids=lambda file: file.stem)
def test_the_schemas_accept_the_cluster_files_that_come_along(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    objects = rendered(file, capsys, overrides=("model.path=/weights/far", "cluster_key_file=/keys/cluster"))
    assert [text for item in objects for text in complaints(item)] == []


@pytest.mark.parametrize(
    ("kind", "path", "key"),
    [
        ("LeaderWorkerSet", ("spec",), "startPolicy"),
        ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate"), "restartpolicy"),
        ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "leaderTemplate", "spec"), "hostNetworks"),
        ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "workerTemplate", "spec", "containers", 0), "comand"),
        ("Deployment", ("spec", "template", "spec", "containers", 0, "lifecycle", "preStop"), "wait"),
        ("NetworkPolicy", ("spec",), "ingres"),
        ("PodDisruptionBudget", ("spec",), "maxunavailable"),
        ("ConfigMap", (), "datas"),
    ],
)
def test_a_misspelt_field_is_found(
    cluster: Path, capsys: pytest.CaptureFixture[str], kind: str, path: tuple[str | int, ...], key: str
) -> None:
    item = copy.deepcopy(next(iter(of_kind(rendered(cluster, capsys), kind).values())))
    here: Any = item
    for step in path:
        here = here[step]
    assert complaints(item) == []
    here[key] = {}
    assert any(key in text for text in complaints(item))


@pytest.mark.parametrize("setup", [(), ("hosts.setup_files=[/opt/a.sh, /opt/b.sh]",)], ids=["plain", "sourced"])
def test_pods_run_the_processes_of_the_cluster(
    cluster: Path, capsys: pytest.CaptureFixture[str], setup: tuple[str, ...]
) -> None:
    shell = ["/bin/bash", "-c", 'source /opt/a.sh || exit 2; source /opt/b.sh || exit 2; exec "$0" "$@"'] if setup else []
    wanted = [
        ([*shell, "python", *service.arguments, "--config", "/etc/longcat-pd/cluster.yaml"], dict(service.env))
        for service in services(load(cluster, setup))
    ]
    assert len(wanted) == 8
    found = processes(rendered(cluster, capsys, overrides=setup))
    homes = [environment.pop("HOME") for _, environment in found]
    assert sorted(found, key=str) == sorted(wanted, key=str) and set(homes) == {"/home/longcat"}


def test_the_device_plugin_says_which_cards(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _, environment in processes(rendered(cluster, capsys, overrides=NPU)):
        assert "ASCEND_RT_VISIBLE_DEVICES" not in environment and environment["HCCL_BUFFSIZE"] == "512"


def with_addresses(config: ClusterConfig, other: ClusterConfig) -> ClusterConfig:
    """``config`` at the addresses of ``other``."""
    for role, pool in pools(config):
        there = dict(pools(other))[role].instances
        instances = [dataclasses.replace(mine, nodes=its.nodes) for mine, its in zip(pool.instances, there, strict=True)]
        config = dataclasses.replace(config, **{role: dataclasses.replace(pool, instances=tuple(instances))})
    balancer = dataclasses.replace(config.load_balancer, host=other.load_balancer.host, node=other.load_balancer.node)
    return dataclasses.replace(config, load_balancer=balancer)


def test_pods_read_the_same_configuration_at_their_own_addresses(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ("load_balancer.retry=0", "decode.engine.max_num_seqs=4")
    objects = rendered(cluster, capsys, "--name", "lc", overrides=overrides)
    (config_map,) = of_kind(objects, "ConfigMap").values()
    file = tmp_path / "elsewhere.yaml"
    file.write_text(config_map["data"]["cluster.yaml"])
    read = load(file)
    assert read == with_addresses(load(cluster, overrides), read) and read == load(file)
    assert read.load_balancer.host == "0.0.0.0"
    found = [
        (node, name)
        for _, pool in pools(read)
        for instance in pool.instances
        for node, name in zip(instance.nodes, [instance.name] * 9, strict=False)
    ]
    assert found == [
        ("lc-p0-0.lc-p0.serving", "p0"),
        ("lc-p0-0-1.lc-p0.serving", "p0"),
        ("lc-p0-0-2.lc-p0.serving", "p0"),
        ("lc-d0-0.lc-d0.serving", "d0"),
        ("lc-d0-0-1.lc-d0.serving", "d0"),
        ("lc-d1-0.lc-d1.serving", "d1"),
        ("lc-d1-0-1.lc-d1.serving", "d1"),
    ]
    host, _, namespace = read.load_balancer.node.partition(".")
    assert namespace == "serving" and of_kind(objects, "Service")[host]["spec"]["ports"][0]["port"] == 9000
    assert {name for name, _, _ in templates(objects)} == {"lc-balancer", "lc-p0", "lc-d0", "lc-d1"}


def test_another_configuration_makes_other_pods(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def marks(*overrides: str) -> set[str]:
        objects = rendered(cluster, capsys, overrides=overrides)
        return {template["metadata"]["annotations"]["longcat-pd/config"] for _, _, template in templates(objects)}

    assert len(marks()) == 1 and marks() == marks() != marks("load_balancer.retry=3")


def test_a_pod_starts_when_its_names_resolve(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    awaited = {}
    for name, place, template in templates(rendered(cluster, capsys)):
        for container in template["spec"]["initContainers"]:
            words = [as_kubelet_reads(word, variables_of(container, place)) for word in container["command"]]
            assert words[:4] == ["timeout", "300", "sh", "-c"] and '"$name"' in words[4]
            awaited[name, place] = words[6:]
    own = ["longcat-p0-0.longcat-p0.serving", "longcat-p0-0-1.longcat-p0.serving"]
    assert awaited["longcat-p0", 0] == own[:1] and awaited["longcat-p0", 1] == own
    assert len(awaited) == 7  # the balancer asks for nobody by name before it listens


def test_pods_have_time_to_drain(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The longest drain is decode's 300 s by default; SIGTERM is what begins it."""
    for name, _, template in templates(rendered(cluster, capsys)):
        (container,) = template["spec"]["containers"]
        routing = container.get("lifecycle", {"preStop": {"sleep": {"seconds": 0}}})["preStop"]["sleep"]["seconds"]
        assert (routing > 0) == (name == "longcat-balancer")
        assert template["spec"]["terminationGracePeriodSeconds"] == 315 + routing
    short = rendered(cluster, capsys, overrides=("decode.engine.drain_timeout_s=1.5",))
    assert next(templates(short))[2]["spec"]["terminationGracePeriodSeconds"] == 93 + 5


def test_probes_ask_those_who_answer(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probes = ("startupProbe", "livenessProbe", "readinessProbe")
    graphs = ("decode.engine.exe_mode=inductor", "decode.engine.compile_cache=/var/compiled")
    objects = rendered(cluster, capsys, overrides=graphs)
    for name, place, template in templates(objects):
        (container,) = template["spec"]["containers"]
        if place:
            assert not set(probes) & set(container)
            continue
        paths = [container[probe]["httpGet"] for probe in probes]
        assert paths == [{"path": path, "port": "http"} for path in ("/health", "/health", "/ready")]
        (port,) = [port["containerPort"] for port in container["ports"] if port.get("name") == "http"]
        assert port == {"balancer": 9000, "p0": 30000, "d0": 31000, "d1": 31100}[name.removeprefix("longcat-")]
        startup = container["startupProbe"]
        assert startup["failureThreshold"] * startup["periodSeconds"] == 300 + 2 * 300  # two sizes, each a graph


def test_a_pod_may_do_little(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _, _, template in templates(rendered(cluster, capsys, overrides=NPU)):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False and spec["securityContext"]["runAsNonRoot"] is True
        for container in (*spec["containers"], *spec["initContainers"]):
            rights = container["securityContext"]
            assert container["image"] == IMAGE
            assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
            assert rights["capabilities"] == {"drop": ["ALL"]}
        writable = [mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"] if not mount.get("readOnly")]
        assert sorted(writable) == ["/dev/shm", "/home/longcat", "/tmp"]
        assert spec["containers"][0]["workingDir"] in writable


def test_pods_without_cards_and_paths_pass_the_restricted_standard(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _, _, template in templates(rendered(cluster, capsys, "--weights-claim", "pvc")):
        spec = template["spec"]
        kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
        assert kinds == {"configMap", "secret", "emptyDir", "persistentVolumeClaim"}
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["securityContext"]["runAsUser"] and not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)


def test_key_files_come_from_the_secret_to_who_reads_them(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = cluster.parent / "keys"
    files = {"api_key_file": "clients", "admin_key_file": "admin", "cluster_key_file": "cluster"}
    for name, _, template in templates(rendered(cluster, capsys, "--secret", "mine")):
        spec = template["spec"]
        mounts = {m["subPath"]: m["mountPath"] for m in spec["containers"][0]["volumeMounts"] if m["name"] == "keys"}
        keys = files if name == "longcat-balancer" else {"cluster_key_file": "cluster"}
        assert mounts == {key: str(folder / file) for key, file in keys.items()}
        (secret,) = [volume["secret"]["secretName"] for volume in spec["volumes"] if volume["name"] == "keys"]
        assert secret == "mine"


def test_folders_that_a_service_lets_nobody_else_into_are_made_before_it(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = ("record.dir=/var/records", "decode.engine.compile_cache=/var/compiled")
    objects = rendered(cluster, capsys, overrides=kept)
    assert [text for item in objects for text in complaints(item)] == []
    wanted = {"longcat-p0": ({}, {}), "longcat-balancer": ({},)}
    compiled = {"/var/compiled": "compiled"}
    for name in ("longcat-d0", "longcat-d1"):
        wanted[name] = ({**compiled, "/var/records": "records"}, compiled)
    for name, place, template in templates(objects):
        spec = template["spec"]
        mounts = [m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "own"]
        folders = {m["mountPath"]: m["subPath"] for m in mounts}
        assert folders == wanted[name][min(place, 1)]
        made = [c["command"] for c in spec["initContainers"] if c["name"] == "folders"]
        assert made == ([["mkdir", "-p", "-m", "700", *(f"/own/{each}" for each in folders.values())]] if folders else [])
        assert ({"name": "own", "emptyDir": {}} in spec["volumes"]) == bool(folders)


def test_weights_lie_where_the_configuration_says(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(cluster.parent / "model")
    claim = {"claimName": "pvc", "readOnly": True}
    for arguments, wanted in (
        ((), {"name": "weights", "hostPath": {"path": path, "type": "Directory"}}),
        (("--weights-claim", "pvc", "--weights-sub-path", "v2"), {"name": "weights", "persistentVolumeClaim": claim}),
    ):
        for _, _, template in templates(rendered(cluster, capsys, *arguments)):
            assert wanted in template["spec"]["volumes"]
            (mount,) = [m for m in template["spec"]["containers"][0]["volumeMounts"] if m["name"] == "weights"]
            assert mount["mountPath"] == path and mount["readOnly"] and ("subPath" in mount) == bool(arguments)


def test_cards_are_asked_for_and_reached_over_the_network_of_their_machines(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = rendered(cluster, capsys, overrides=NPU)
    for name, place, template in templates(objects):
        spec, (container,) = template["spec"], template["spec"]["containers"]
        is_balancer = name == "longcat-balancer"
        assert spec.get("hostNetwork", False) == (not is_balancer)
        assert (spec.get("dnsPolicy") == "ClusterFirstWithHostNet") == (not is_balancer)
        assert ("limits" in container["resources"]) == (not is_balancer)
        if name == "longcat-p0":
            cards = {"huawei.com/Ascend910": "1"}
            assert container["resources"] == {"requests": {"cpu": "1" if place else "2", **cards}, "limits": cards}
            ports = {port["containerPort"] for port in container["ports"]}
            assert ports == ({30010} if place else {*range(30000, 30007), 30010})
    assert set(of_kind(objects, "NetworkPolicy")) == {"longcat-balancer"}


def test_processors_and_memory_are_those_of_the_plan(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {
        (name, place): template["spec"]["containers"][0]["resources"]["requests"]
        for name, place, template in templates(rendered(cluster, capsys, overrides=("decode.parallel.dp_size=2",)))
    }
    assert [asked["longcat-d0", place]["cpu"] for place in (0, 1)] == ["3", "2"]
    assert [asked["longcat-p0", place]["cpu"] for place in (0, 1, 2)] == ["2", "1", "1"]
    mebibytes = {key: int(value["memory"].removesuffix("Mi")) for key, value in asked.items()}
    assert mebibytes["longcat-d0", 0] - mebibytes["longcat-d0", 1] == 2048
    more = rendered(cluster, capsys, overrides=("decode.parallel.dp_size=2", "decode.engine.num_blocks=100000"))
    (grown,) = [t for name, place, t in templates(more) if (name, place) == ("longcat-d0", 1)]
    request = grown["spec"]["containers"][0]["resources"]["requests"]["memory"]
    assert int(request.removesuffix("Mi")) > 1000 + mebibytes["longcat-d0", 1]
    together = rendered(cluster, capsys, overrides=("decode.parallel.dp_size=2", "decode.instances.0.nodes=[10.0.1.1]"))
    (whole,) = [
        t["spec"]["containers"][0]["resources"]["requests"] for name, _, t in templates(together) if name == "longcat-d0"
    ]
    assert whole["cpu"] == "5"  # all four ranks, which are alike, and the driver
    assert abs(int(whole["memory"].removesuffix("Mi")) - 2048 - 2 * mebibytes["longcat-d0", 1]) <= 2


def memory_of(objects: list[Manifest], name: str) -> list[int]:
    """What the containers of an instance ask for, in MiB, by their place in the group."""
    found = [t["spec"]["containers"][0]["resources"]["requests"]["memory"] for n, _, t in templates(objects) if n == name]
    return [int(text.removesuffix("Mi")) for text in found]


def test_the_fullest_of_further_nodes_counts(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pods of further nodes have one template, that of the first node has its own."""

    def asked(layers: str) -> list[int]:
        parallel = ("prefill.parallel.pp_size=2", f"prefill.parallel.layers_per_stage={layers}")
        overrides = (*parallel, "prefill.instances.0.nodes=[a, b]", "prefill.engine.num_blocks=100000")
        return memory_of(rendered(cluster, capsys, overrides=overrides), "longcat-p0")

    (first, second), (full, light) = asked("[1, 2]"), asked("[2, 1]")
    assert second == pytest.approx(full - 2048, rel=0.05) and first - 2048 == pytest.approx(light, rel=0.1)
    assert second > 1.5 * light
    three = ("prefill.engine.num_draft_tokens=1", "decode.engine.num_draft_tokens=1", "prefill.engine.num_blocks=100000")
    plan = survey(str(cluster), three)
    middle, last = (plan.host_bytes[f"10.0.0.{node}"] >> 20 for node in (2, 3))
    assert memory_of(rendered(cluster, capsys, overrides=three), "longcat-p0")[1:] == [last + 1, last + 1] and last > middle


def test_tables_in_the_memory_of_the_first_node_are_asked_for_there(capsys: pytest.CaptureFixture[str]) -> None:
    objects = rendered(CLUSTER_FILES[0].parent / "longcat2-a2-192.yaml", capsys)
    ranks = 16 * 3 * 1024  # MiB beside the cards
    first, *others = memory_of(objects, "longcat-p0")
    assert first == pytest.approx(ranks + 2048 + 251.4 * 1024, rel=1e-4) and others == 3 * [ranks]
    assert memory_of(objects, "longcat-d0") == [ranks + 2048, *7 * [ranks]]


def is_chosen(selector: Manifest, labels: dict[str, str]) -> bool:
    """Whether a label selector chooses a pod."""
    outside = [item["values"] for item in selector.get("matchExpressions", ()) if item["operator"] == "NotIn"]
    assert len(outside) == len(selector.get("matchExpressions", ()))
    keys = [item["key"] for item in selector.get("matchExpressions", ())]
    is_out = any(labels.get(key) in values for key, values in zip(keys, outside, strict=True))
    return selector["matchLabels"].items() <= labels.items() and not is_out


def test_only_pods_of_the_cluster_reach_instances(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    objects = rendered(cluster, capsys)
    labels = {(name, place): template["metadata"]["labels"] for name, place, template in templates(objects)}
    policies = {name: item["spec"] for name, item in of_kind(objects, "NetworkPolicy").items()}
    chosen = {
        name: {pod for pod in labels if is_chosen(spec["podSelector"], labels[pod])} for name, spec in policies.items()
    }
    assert chosen["longcat-balancer"] == {("longcat-balancer", 0)}
    assert chosen["longcat-instances"] == labels.keys() - chosen["longcat-balancer"] and len(labels) == 8
    assert policies["longcat-balancer"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": 9000}]}]
    (rule,) = policies["longcat-instances"]["ingress"]
    (source,) = rule["from"]
    assert list(rule) == ["from"] and list(source) == ["podSelector"]  # of this namespace alone, on every port
    assert all(is_chosen(source["podSelector"], mine) for mine in labels.values())
    assert not is_chosen(source["podSelector"], {**labels["longcat-p0", 1], "app.kubernetes.io/instance": "another"})
    assert all(spec["policyTypes"] == ["Ingress"] for spec in policies.values())


def test_services_and_budgets_choose_their_pods(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    objects = rendered(cluster, capsys)
    selectors = {name: item["spec"]["selector"] for name, item in of_kind(objects, "Service").items()}
    budget, deployment = (next(iter(of_kind(objects, kind).values())) for kind in ("PodDisruptionBudget", "Deployment"))
    assert budget["spec"]["selector"] == deployment["spec"]["selector"] == {"matchLabels": selectors["longcat-balancer"]}
    for service, selector in selectors.items():
        chosen = [(n, p) for n, p, t in templates(objects) if selector.items() <= t["metadata"]["labels"].items()]
        assert chosen == [(service.removesuffix("-http"), 0)]


def test_without_a_checkpoint_pods_ask_for_no_memory(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("model.path=/weights/far",)
    objects = rendered(cluster, capsys, overrides=overrides)
    assert all(
        "memory" not in t["spec"]["containers"][0]["resources"]["requests"] for n, _, t in templates(objects) if "-p0" in n
    )
    assert main(["k8s", str(cluster), "--image", IMAGE, "--set", *overrides]) == 0
    assert "model.path=/weights/far holds no config.json here" in capsys.readouterr().err
    assert unresolved(cluster, overrides).model.path == "/weights/far"


@pytest.mark.parametrize(
    ("arguments", "overrides", "text"),
    [
        (("--image", "longcat-pd"), (), "--image longcat-pd: must be pinned"),
        (("--image", "host:5000/longcat-pd"), (), "must be pinned"),
        (("--image", "longcat-pd:latest"), (), "must be pinned"),
        (("--namespace", "A_b"), (), "--namespace A_b: lower-case letters"),
        (("--name", "9x"), (), "--name 9x: lower-case letters"),
        ((), ("prefill.instances.0.name=P_0",), "prefill.instances[0].name=P_0: Kubernetes wants lower-case"),
        ((), ("prefill.instances.0.name=p" + "0" * 60,), "of 50 at most"),
        (
            (),
            ("prefill.instances.0.name=balancer",),
            "prefill.instances[0].name=balancer: already the name of load_balancer",
        ),
        ((), ("decode.instances.1.name=d0-http",), "longcat-d0-http is already the name of d0"),
        ((), ("decode.instances.1.name=d0-0",), "longcat-d0-0 is already the name of d0"),  # the set of its further pods
        ((), ("decode.instances.0.http_port=0",), "decode.instances[0].http_port=0"),
    ],
)
def test_what_is_refused(
    cluster: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], overrides: tuple[str, ...], text: str
) -> None:
    image = () if "--image" in arguments else ("--image", IMAGE)
    settings = [part for item in overrides for part in ("--set", item)]
    assert main(["k8s", str(cluster), *image, *arguments, *settings]) == 2
    shown = capsys.readouterr()
    assert text in shown.err and not shown.out


def test_what_pods_would_refuse_at_their_own_addresses_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = (file for file in CLUSTER_FILES if file.stem == "local-cpu")
    assert main(["k8s", str(file), "--image", IMAGE, "--set", "faults=true"]) == 2
    shown = capsys.readouterr()
    wrong = [line.split(":")[1].strip() for line in shown.err.splitlines() if line.startswith("error:")]
    assert wrong == ["cluster_key_file", "cluster_key_file", "faults=true"] and not shown.out


def test_all_findings_come_at_once(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["k8s", str(cluster), "--image", "x:latest", "--name", "X", "--set", "prefill.instances.0.name=P"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


@pytest.mark.parametrize("image", ["a/b:1", "host:5000/a:v1.2", "a@sha256:" + "0" * 64])
def test_pinned_images(cluster: Path, capsys: pytest.CaptureFixture[str], image: str) -> None:
    assert main(["k8s", str(cluster), "--image", image]) == 0


def test_files_are_one_for_each_object(cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    objects = rendered(cluster, capsys)
    rendered(cluster, capsys, "--out", str(tmp_path / "out"))
    files = sorted((tmp_path / "out").iterdir())
    assert [yaml.safe_load(file.read_text()) for file in files] == objects
    assert main(["k8s", str(cluster), "--image", IMAGE, "--out", str(cluster)]) == 2
    assert f"--out {cluster}: " in capsys.readouterr().err
