"""Machines of a cluster: which process runs where and by which command, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from longcat_pd.cluster.__main__ import main as run_pd
from longcat_pd.config.resolve import as_json, instance_spec, load, unresolved
from longcat_pd.config.schema import RankSpec
from longcat_pd.config.services import balancer_url, nodes_of, ports_of_node, services, start_limit_s
from longcat_pd.errors import ConfigError
from longcat_pd.tiny.configs import make_config

P0, P1, D0, D1 = "10.0.0.1", "10.0.0.2", "10.0.1.1", "10.0.1.2"


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """Two nodes for prefill, two for decode, of one rank each."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(make_config("2.0", [], dtype="float32")))
    tree: dict[str, Any] = {
        "model": {"path": "model"},
        "cluster_key_file": "/etc/longcat_pd/cluster.key",
        "load_balancer": {"host": "0.0.0.0"},
        "prefill": {
            "engine": {"block_size": 16, "max_num_batched_tokens": 64},
            "parallel": {"pp_size": 2},
            "instances": [{"name": "p0", "http_port": 30000, "nodes": [P0, P1]}],
            "env": {"A": "pool", "B": "pool"},
        },
        "decode": {
            "engine": {"block_size": 16},
            "parallel": {"kvp_size": 2, "attn_tp_size": 2},
            "instances": [{"name": "d0", "http_port": 31000, "nodes": [D0, D1], "env": {"B": "mine"}}],
        },
        "env": {"A": "all", "C": "all"},
    }
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def refusal(file: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(file, overrides)
    return caught.value.message.splitlines()


def test_every_process_has_its_node(cluster: Path) -> None:
    config = load(cluster)
    found = [(service.name, service.kind, service.node, service.url) for service in services(config)]
    assert found == [
        ("d0", "driver", D0, f"http://{D0}:31000"),
        ("d0.1", "ranks", D1, ""),
        ("p0", "driver", P0, f"http://{P0}:30000"),
        ("p0.1", "ranks", P1, ""),
        ("balancer", "balancer", P1, f"http://{P1}:8081"),
    ]
    assert nodes_of(config) == (D0, D1, P0, P1)
    commands = {service.name: service.arguments for service in services(config)}
    assert commands["d0.1"] == ("-m", "longcat_pd.decode_worker", "--instance", "d0", "--node-rank", "1")
    assert commands["p0"] == ("-m", "longcat_pd.prefill_worker", "--instance", "p0")


def test_a_standalone_engine_has_no_balancer(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = yaml.safe_load(cluster.read_text())
    alone = {"model": tree["model"], "standalone": {"instances": [{"name": "s0", "http_port": 30000, "nodes": [P0]}]}}
    cluster.write_text(yaml.safe_dump(alone))
    config = load(cluster)
    assert [(service.name, service.node) for service in services(config)] == [("s0", P0)]
    assert nodes_of(config) == (P0,)
    assert next(use.purpose for use in ports_of_node(config, P0)) == "s0 HTTP"
    assert run_pd(["--root", str(cluster.parent), "status", str(cluster)]) == 2
    assert capsys.readouterr().err == (
        "error: standalone: one engine alone is not started here, see longcat-pd serve; a cluster has prefill and decode\n"
    )


def test_the_balancer_may_run_elsewhere(cluster: Path) -> None:
    config = load(cluster, ["load_balancer.node=10.0.9.9"])
    assert nodes_of(config)[-1] == "10.0.9.9" and balancer_url(config) == "http://10.0.9.9:8081"
    assert [use.purpose for use in ports_of_node(config, "10.0.9.9")] == ["balancer"]


def test_the_nearest_environment_counts(cluster: Path) -> None:
    given = {service.name: dict(service.env) for service in services(load(cluster))}
    assert given["d0"] == given["d0.1"] == {"A": "all", "B": "mine", "C": "all"}
    assert given["p0"] == {"A": "pool", "B": "pool", "C": "all"}
    assert given["balancer"] == {"A": "all", "C": "all"}


def test_a_start_has_time_to_compile(cluster: Path) -> None:
    compiled = ["decode.engine.exe_mode=inductor", "decode.engine.buckets=[1, 64]"]
    assert start_limit_s(load(cluster)) == 300.0
    assert start_limit_s(load(cluster, compiled)) == 900.0
    assert start_limit_s(unresolved(cluster, compiled[:1])) == 2100.0, "buckets follow from the checkpoint"


def test_ranks_of_a_node_are_neighbours(cluster: Path) -> None:
    four = load(cluster, ["prefill.parallel.cp_size=2"])
    spec = instance_spec(four, "p0")
    ranks = [
        RankSpec(
            instance=spec,
            rank=rank,
            incarnation="i",
            plan_endpoint="",
            output_endpoint="",
            rendezvous_host="",
            rendezvous_port=1,
        )
        for rank in range(4)
    ]
    assert [(rank.node_rank, rank.local_rank) for rank in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_ranks_of_other_instances_on_a_machine_come_first(cluster: Path) -> None:
    shared = load(cluster, ["prefill.parallel.cp_size=2", f"decode.instances.0.nodes=[{D0}, {P1}]"])
    assert [instance_spec(shared, name).ranks_before for name in ("p0", "d0")] == [(0, 0), (0, 2)]
    apart = load(cluster, ["prefill.parallel.cp_size=2"])
    assert instance_spec(shared, "d0").config_digest == instance_spec(apart, "d0").config_digest


def test_only_instances_over_several_nodes_have_a_port_for_them(cluster: Path) -> None:
    config = load(cluster)
    assert {use.port for use in ports_of_node(config, D0)} == set(range(31000, 31007))
    assert not ports_of_node(config, D1)
    single = load(cluster, [f"decode.instances.0.nodes=[{D0}]"])
    assert {use.port for use in ports_of_node(single, D0)} == set(range(31000, 31006))


def test_ports_of_the_balancer_count_on_its_node(cluster: Path) -> None:
    (line,) = refusal(cluster, "load_balancer.port=30000", f"load_balancer.node={P0}")
    assert line.startswith(
        "prefill.instances[0].http_port: port 30000 of 10.0.0.1 (p0 HTTP) is also taken by load_balancer"
    )
    load(cluster, ["load_balancer.port=30000"])  # another machine


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (f"prefill.instances.0.nodes=[{P0}, {P0}]", f"{P0} is there twice"),
        ("prefill.instances.0.nodes=[]", "at least one address is needed"),
        (
            f"prefill.instances.0.nodes=[{P0}, {P1}, 10.0.0.3]",
            "3 nodes cannot share the 2 ranks of prefill.parallel evenly",
        ),
        (
            "prefill.instances.0.name=d0.1",
            "decode.instances[0].name=d0: d0.1, its ranks on a further node, is already the name of prefill.instances[0]",
        ),
        ("prefill.instances.0.name=d0", "decode.instances[0].name=d0: already the name of prefill.instances[0]"),
        ("hosts.path=srv/longcat", "hosts.path=srv/longcat: must be an absolute path"),
        ("hosts.path=/", "hosts.path=/: must be an absolute path"),
        ("hosts.path=/srv/../etc", "must be an absolute path"),
        ("hosts.path='/srv/a b'", "letters, digits and"),
        ("hosts.setup_files=['/a;rm']", "hosts.setup_files[0]=/a;rm: letters, digits and"),
        ("env={'-i': x}", "env: '-i': letters, digits and '_' only, no digit first"),
        ("prefill.env={'A=B': x}", "prefill.env: 'A=B': letters, digits"),
        ("decode.instances.0.env={'': x}", "decode.instances[0].env: '': letters, digits"),
        ('env={A: "a\\0b"}', "env.A: must hold no null character (character 2 of 3)"),
        ("hosts.port=0", "hosts.port=0: must be at least 1"),
    ],
)
def test_what_is_refused(cluster: Path, setting: str, text: str) -> None:
    (line,) = refusal(cluster, setting)
    assert text in line


def test_two_npu_instances_on_a_machine_need_cards_and_ports_of_their_own(cluster: Path) -> None:
    npu = ("device=npu", "devices_per_node=1", "model.dtype=bfloat16")
    together = (*npu, f"prefill.instances.0.nodes=[{P0}, {D1}]")
    text = "shares 10.0.1.2 with decode.instances[0]; set ASCEND_RT_VISIBLE_DEVICES and HCCL_IF_BASE_PORT"
    assert any(text in line for line in refusal(cluster, *together))
    apart = (*together, "prefill.env={ASCEND_RT_VISIBLE_DEVICES: '1', HCCL_IF_BASE_PORT: '61000'}")
    assert not any("shares" in line for line in refusal(cluster, *apart))


def test_machines_that_others_reach_need_the_key_of_the_cluster(cluster: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(cluster, ["cluster_key_file=null"])
    lines = caught.value.message.splitlines()
    assert len(lines) == 2
    for line, nodes in zip(lines, ((P0, P1), (D0, D1)), strict=True):
        assert line.startswith("cluster_key_file: is needed where others reach ") and str(list(nodes)) in line
    here = ["prefill.instances.0.nodes=[127.0.0.1, 127.0.0.2]", "decode.instances.0.nodes=[localhost, '::1']"]
    load(cluster, ["cluster_key_file=null", *here])
    load(cluster, [*here])


@pytest.mark.parametrize(
    "setting",
    [
        "tracing={endpoint: 'http://c:4318', sample: 0.00001}",
        "tracing={endpoint: 'http://c:4318', sample: 0.000015}",
        "transfer.timeout_s=10000000000000000.0",
        "transfer.timeout_s=1234567890123456789",
        r"""env={A: '1e-05', B: 'x, 1e-05', C: '\" 1e-05', D: "\x7f\u2028\ufeff\x01", E: '你好 😀'}""",
    ],
)
def test_numbers_and_texts_are_the_same_on_another_machine(cluster: Path, tmp_path: Path, setting: str) -> None:
    text = as_json(cluster, [setting])
    json.loads(text)
    (tmp_path / "sent.yaml").write_text(text)
    assert unresolved(tmp_path / "sent.yaml") == unresolved(cluster, [setting])


def test_what_is_no_json_is_left_to_whoever_reads_it(cluster: Path) -> None:
    assert json.loads(as_json(cluster, ["env={A: 2026-01-01}"]))["env"] == {"A": "2026-01-01"}


def test_another_machine_reads_the_same(cluster: Path, tmp_path: Path) -> None:
    overrides = ["load_balancer.port=9000", "decode.engine.max_num_seqs=4"]
    elsewhere = tmp_path / "elsewhere" / "cluster.yaml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(as_json(cluster, overrides))
    assert load(elsewhere) == load(cluster, overrides)
    assert unresolved(elsewhere).model.path == str(cluster.parent / "model")
