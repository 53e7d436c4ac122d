"""The reader of configuration: what it fills in, and that everything wrong is named at once with its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longcat_pd.config.checks import blocks_needed
from longcat_pd.config.quantization import int8_section
from longcat_pd.config.resolve import (
    compile_cache,
    even_stages,
    instance_spec,
    load,
    standalone,
    standalone_cluster,
    unresolved,
)
from longcat_pd.config.shipped import SERVED_NAME, shipped_checkpoint
from longcat_pd.errors import ConfigError

CHECKPOINT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_layers": 5,
    "num_attention_heads": 4,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 8,
    "zero_expert_num": 4,
    "zero_expert_type": "identity",
    "moe_topk": 3,
    "routed_scaling_factor": 2.0,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 2048,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 64,
    "index_init_tokens": 4,
    "index_local_tokens": 16,
    "index_k_norm_type": "rms",
    "cli_factor": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

CLUSTER = """
model: {path: weights/longcat-tiny}
prefill:
  parallel: {pp_size: 2, cp_size: 2}
  engine: {block_size: 16, max_num_batched_tokens: 64}
  instances:
    - {name: p0, http_port: 30000}
decode:
  parallel: {kvp_size: 2, attn_tp_size: 2}
  engine: {block_size: 16, max_num_seqs: 8}
  instances:
    - {name: d0, http_port: 31000}
    - {name: d1, http_port: 31100}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    checkpoint = tmp_path / "weights" / "longcat-tiny"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text(json.dumps(CHECKPOINT))
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    return file


def refusal(file: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(file, overrides)
    return caught.value.message.splitlines()


def test_every_auto_is_filled_from_the_checkpoint(cluster: Path) -> None:
    config = load(cluster)
    assert config.model.path == str(cluster.parent / "weights" / "longcat-tiny")
    assert (config.model.served_name, config.model.dtype) == ("longcat-tiny", "bfloat16")
    assert config.prefill is not None
    assert config.decode is not None
    assert config.prefill.parallel.layers_per_stage == (3, 2)
    assert config.decode.parallel.layers_per_stage == (5,)
    assert config.decode.engine.max_model_len == 2048
    # 2048 tokens are 128 blocks, 64 on each of two shards, for 8 sequences, and block 0.
    assert config.decode.engine.num_blocks == 1 + 8 * 64


def test_blocks_stay_within_the_cpu_budget_but_always_hold_one_sequence(cluster: Path) -> None:
    long = load(cluster, ["decode.engine.max_model_len=1048576", "decode.engine.max_num_seqs=64"])
    assert long.decode is not None
    # Values of a token: 10 attentions of 32 + 8, 5 indexers of 16; in bfloat16, on two shards.
    block_bytes = (10 * 40 + 5 * 16) * 2 * 16
    assert long.decode.engine.num_blocks == 1 + max(1048576 // 16 // 2, (1 << 28) // block_bytes)


def test_blocks_are_those_of_one_group(cluster: Path) -> None:
    config = load(cluster, ["decode.parallel.dp_size=2"])
    assert config.decode is not None
    assert config.decode.engine.num_blocks == 1 + 4 * 64
    # Every rank of a group holds the whole cache: 128 blocks for each of the 2 sequences of a group.
    checkpoint = str(cluster.parent / "weights" / "longcat-tiny")
    lite = ["engine.max_num_seqs=4", "engine.block_size=16", "parallel.attn_tp_size=4", "parallel.dp_size=2"]
    assert standalone(checkpoint, lite, host="127.0.0.1", port=8081).engine.num_blocks == 1 + 2 * 128


def test_sizes_follow_from_others_unless_they_are_set(cluster: Path) -> None:
    def sizes(*overrides: str) -> tuple[int, int]:
        config = load(cluster, ["devices_per_node=4", *(f"prefill.parallel.{item}" for item in overrides)])
        assert config.prefill is not None
        return config.prefill.parallel.ngram_embed_tp_size, config.prefill.parallel.node_size

    assert sizes() == (1, 1)
    assert sizes("embed_tp_size=2", "ep_size=2") == (2, 1)
    assert sizes("embed_tp_size=2", "ngram_embed_tp_size=1") == (1, 1)
    assert sizes("ep_size=2", "moe_dispatch=two_level") == (1, 1)
    assert sizes("ep_size=2", "moe_dispatch=two_level", "node_size=2") == (1, 2)


def test_overrides_are_laid_over_the_file_and_lists_count_by_number(cluster: Path) -> None:
    config = load(
        cluster,
        [
            "prefill.parallel.cp_size=3",
            "prefill.parallel.layers_per_stage=[1, 4]",
            "decode.instances.1.http_port=31900",
            "transfer.digest=all",
            "load_balancer.request_timeout_s=90",
            'env.GLOO_SOCKET_IFNAME="lo"',
        ],
    )
    assert config.prefill is not None
    assert config.decode is not None
    assert config.prefill.parallel.cp_size == 3
    assert config.prefill.parallel.layers_per_stage == (1, 4)
    assert [instance.http_port for instance in config.decode.instances] == [31000, 31900]
    assert config.transfer.digest == "all"
    assert config.load_balancer.request_timeout_s == 90.0
    assert config.env == {"GLOO_SOCKET_IFNAME": "lo"}


def test_relative_paths_start_at_the_file_and_those_of_overrides_at_the_folder(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "weights")
    config = load(cluster, ["model.path=longcat-tiny", "load_balancer.api_key_file=keys"])
    assert config.model.path == str(tmp_path / "weights" / "longcat-tiny")
    assert config.load_balancer.api_key_file == str(tmp_path / "weights" / "keys")


def test_a_link_is_kept_for_it_may_be_none_on_another_machine(cluster: Path, tmp_path: Path) -> None:
    def told(file: Path, *overrides: str) -> tuple[str, str, str]:
        config = load(file, overrides)
        return config.model.path, config.model.served_name, instance_spec(config, "d0").config_digest

    model = tmp_path / "weights" / "longcat-tiny"
    with_folder = told(cluster)
    model.rename(tmp_path / "release-7")
    model.symlink_to(tmp_path / "release-7")
    assert told(cluster) == with_folder == told(cluster, f"model.path={model}")
    assert with_folder[:2] == (str(model), "longcat-tiny")


def test_parents_of_a_link_are_those_of_what_it_leads_to(cluster: Path, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "files").mkdir()
    (tmp_path / "far" / "weights").symlink_to(tmp_path / "weights")
    (tmp_path / "far" / "files" / "cluster.yaml").write_text(CLUSTER.replace("weights/", "../weights/./"))
    (tmp_path / "near").symlink_to(tmp_path / "far" / "files")
    assert load(tmp_path / "near" / "cluster.yaml").model.path == str(tmp_path / "far" / "weights" / "longcat-tiny")


def test_all_findings_come_at_once_each_with_its_key(cluster: Path) -> None:
    lines = refusal(
        cluster,
        "prefill.engine.block_sise=16",
        "prefill.engine.max_num_batched_tokens=many",
        "decode.engine.queue_timeout_s=0",
        "decode.engine.max_num_seqs=0",
        "decode.instances.0.http_port=70000",
        "transfer.digest=some",
        "load_balancer.retry=true",
        "model.path=7",
    )
    expected = [
        "model.path=7: must be a string",
        "prefill.engine.block_sise: unknown key",
        "prefill.engine.max_num_batched_tokens=many: must be a whole number",
        "decode.engine.queue_timeout_s=0.0: must be more than 0",
        "decode.engine.max_num_seqs=0: must be at least 1",
        "decode.instances[0].http_port=70000: must be at most 65535",
        "load_balancer.retry=True: must be a whole number",
        "transfer.digest=some: must be one of off, sample, all",
    ]
    for start in expected:
        assert any(line.startswith(start) for line in lines), (start, lines)
    assert len(lines) == len(expected), lines


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (
            ["decode.engine.num_draft_tokens=3"],
            "prefill.engine.num_draft_tokens=0, decode.engine.num_draft_tokens=3: both pools hold the draft layer's cache",
        ),
        (["decode.engine.block_size=32"], "block_size differs: prefill.engine.block_size=16, decode.engine.block_size=32"),
        (["prefill.engine.max_num_batched_tokens=72"], "prefill.engine.max_num_batched_tokens=72: must be a multiple of"),
        (["decode.parallel.attn_tp_size=4"], "decode.parallel.attn_tp_size=4: differs from decode.parallel.kvp_size=2"),
        (["decode.parallel.pp_size=2"], "decode.parallel.pp_size=2: must be 1 in a decode pool"),
        (["prefill.parallel.kvp_size=2"], "prefill.parallel.kvp_size=2: must be 1 in a prefill pool"),
        (
            ["prefill.parallel.layers_per_stage=[1, 1, 3]"],
            "prefill.parallel.layers_per_stage=[1, 1, 3]: 3 stages, pp_size is 2",
        ),
        (
            ["prefill.parallel.layers_per_stage=[2, 2]"],
            "prefill.parallel.layers_per_stage=[2, 2]: sums to 4, the checkpoint has 5",
        ),
        (["prefill.parallel.layers_per_stage=[5, 0]"], "prefill.parallel.layers_per_stage=[5, 0]: must be at least 1"),
        (["prefill.parallel.pp_size=6"], "prefill.parallel.pp_size=6: more stages than the checkpoint's 5 layers"),
        (
            ["decode.parallel={kvp_size: 3, attn_tp_size: 3}"],
            "decode.parallel.attn_tp_size=3: does not divide the checkpoint's 4",
        ),
        (["devices_per_node=3"], "prefill.parallel: pp_size 2 x cp_size 2 = 4, but prefill.instances[0] has 1 nodes"),
        (["decode.instances.1.name=p0"], "decode.instances[1].name=p0: already the name of prefill.instances[0]"),
        (["decode.instances.0.name=balancer"], "decode.instances[0].name=balancer: already the name of load_balancer"),
        (["decode.instances.1.name=d 1"], "decode.instances[1].name=d 1: letters, digits"),
        (
            ["decode.instances.1.http_port=31005"],
            "decode.instances[1].http_port: port 31005 of 127.0.0.1 (d1 HTTP) is also taken by",
        ),
        (
            ["load_balancer.port=30003"],
            "prefill.instances[0].http_port: port 30003 of 127.0.0.1 (p0 outputs) is also taken by load_bal",
        ),
        (["decode.instances.1.http_port=65533"], "decode.instances[1].http_port: d1 outputs would be port 65536"),
        (
            ["decode.engine.max_model_len=1024"],
            "decode.engine.max_model_len=1024: must be at least prefill.engine.max_model_len=2048",
        ),
        (
            ["decode.engine.num_blocks=64"],
            "decode.engine.num_blocks=64: one sequence of max_model_len=2048 needs 64 blocks",
        ),
        (["decode.instances=[]"], "decode.instances: at least one instance is needed"),
        (["decode=null"], "decode: missing; a cluster has a prefill and a decode pool"),
        (["transfer.transport=loopback"], "transfer.transport=loopback: joins pools inside one process only"),
        (["model.path=/nowhere"], "model.path=/nowhere: "),
        (["model=null"], "model.path: missing"),
        (["decode.instances.3.name=d3"], "--set decode.instances.3.name=d3: decode.instances is a list of 2"),
        (["decode.instances.².name=d3"], "--set decode.instances.².name=d3: decode.instances is a list of 2; '²' is not a"),
        ([f"decode.instances.{5000 * '9'}.name=x"], "--set decode.instances.999"),
        (["model.served_name=2026-13-01"], "--set model.served_name=2026-13-01: the value is not YAML"),
        ([f"decode.engine.num_blocks={5000 * '9'}"], "--set decode.engine.num_blocks=999"),
        (
            ["decode.engine.unfused=[norms, all]"],
            "decode.engine.unfused[1]=all: must be one of attention, experts, norms, prolog",
        ),
        (
            ["prefill.engine.num_draft_tokens=1000000000", "decode.engine.num_draft_tokens=64"],
            "prefill.engine.num_draft_tokens=1000000000: must be at most 64",
        ),
        (["device_memory_gib=.nan"], "device_memory_gib=nan: must be a number below 2^63"),
        (["device_memory_gib=.inf"], "device_memory_gib=inf: must be a number below 2^63"),
        ([f"device_memory_gib=1{400 * '0'}"], "device_memory_gib=1000"),
        ([f"decode.engine.num_blocks=1{400 * '0'}"], "decode.engine.num_blocks=1000"),
        (["device=tpu"], "device=tpu: must be one of cpu, cuda, npu"),
        (["device=cuda"], "device=cuda: is not supported yet; one of cpu, npu"),
        (["device=cuda", "decode.engine.num_blocks=200"], "device=cuda: is not supported yet; one of cpu"),
        (["faults=true", "load_balancer.host=0.0.0.0"], "faults=true: needs a load_balancer.admin_key_file, for load_bal"),
        (["tracing={}"], "tracing.endpoint: missing"),
        (["tracing.endpoint=4318"], "tracing.endpoint=4318: must be a string"),
        *(
            (
                [f"tracing.endpoint={endpoint}"],
                f"tracing.endpoint={endpoint}: must be http://HOST:PORT or https://HOST:PORT",
            )
            for endpoint in (
                "collector:4318",
                "ftp://c:1",
                "http://",
                "http://c:port",
                "http://c:65536",
                "http://[::1",
                "c d",
            )
        ),
        (
            ["tracing.endpoint=http://me:secret@c:4318"],
            "tracing.endpoint=c:4318: must hold no user, key, query or fragment",
        ),
        (["tracing.endpoint=http://c:4318/?key=1"], "tracing.endpoint=http://c:4318/?key=1: must hold no user, key, query"),
        (["tracing={endpoint: 'http://c:4318', sample: 1.5}"], "tracing.sample=1.5: must be at most 1"),
        (["decode"], "--set decode: must be key.path=value"),
        (["decode.engine.num_blocks=[1"], "--set decode.engine.num_blocks=[1: the value is not YAML"),
    ],
)
def test_what_cannot_work_is_refused_once_and_for_the_right_reason(cluster: Path, overrides: list[str], start: str) -> None:
    lines = refusal(cluster, *overrides)
    assert lines[0].startswith(start), lines
    assert len(lines) == 1, lines


def test_faults_of_a_standalone_engine_that_others_reach_need_the_operator_s_key(cluster: Path, tmp_path: Path) -> None:
    model, keys = str(cluster.parent / "weights" / "longcat-tiny"), tmp_path / "keys"
    keys.write_text("chief")
    assert standalone(model, ["faults=true"], host="127.0.0.1", port=30000).faults
    with pytest.raises(ConfigError, match=r"faults=true: needs a load_balancer\.admin_key_file, for standalone\.instances"):
        standalone(model, ["faults=true"], host="0.0.0.0", port=30000)
    guarded = ["faults=true", f"load_balancer.admin_key_file={keys}", f"cluster_key_file={keys}"]
    assert standalone(model, guarded, host="0.0.0.0", port=30000).faults


def test_faults_are_for_cpu_alone(cluster: Path) -> None:
    found = refusal(cluster, "faults=true", "device=npu")
    assert any(line.startswith("faults=true: only for device cpu, not npu: the others of a rank that") for line in found)


def test_a_pool_that_is_spelled_wrong_does_not_produce_echoes(cluster: Path) -> None:
    assert refusal(cluster, "prefill.engine.block_size=large") == [
        "prefill.engine.block_size=large: must be a whole number"
    ]


def test_files_that_are_not_configurations(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("model: {path: x")
    listed = tmp_path / "list.yaml"
    listed.write_text("- 1")
    assert "cannot be read" in refusal(tmp_path / "missing.yaml")[0]
    assert "is not YAML" in refusal(broken)[0]
    assert "must be a mapping" in refusal(listed)[0]


def test_the_checkpoint_path_is_known_before_there_is_a_checkpoint(cluster: Path) -> None:
    assert unresolved(cluster, ["model.path=/models/later"]).model.path == "/models/later"
    with pytest.raises(ConfigError, match=r"decode\.parallel\.pp_size"):
        unresolved(cluster, ["model.path=/models/later", "decode.parallel.pp_size=2"])


def test_an_instance_knows_its_peers_and_a_digest_of_what_concerns_it(cluster: Path) -> None:
    config = load(cluster)
    p0, d0, d1 = (instance_spec(config, name) for name in ("p0", "d0", "d1"))
    assert d0.config_digest == d1.config_digest != p0.config_digest
    assert [(peer.name, peer.role, peer.http_port) for peer in p0.peers] == [
        ("d0", "decode", 31000),
        ("d1", "decode", 31100),
    ]
    assert [peer.name for peer in d1.peers] == ["p0"]
    assert (d1.role, d1.host, d1.http_port, d1.parallel.kvp_size) == ("decode", "127.0.0.1", 31100, 2)

    other_face = load(cluster, ["load_balancer.port=9000"])
    other_engine = load(cluster, ["decode.engine.max_num_seqs=4"])
    assert instance_spec(other_face, "d1").config_digest == d1.config_digest
    assert instance_spec(other_engine, "d1").config_digest != d1.config_digest
    assert instance_spec(other_engine, "p0").config_digest == p0.config_digest
    other_env = load(cluster, ["decode.instances.1.env={A: '1'}"])
    assert instance_spec(other_env, "d1").env == {**d1.env, "A": "1"}
    assert instance_spec(other_env, "d1").config_digest == d1.config_digest
    traced = load(cluster, ["tracing.endpoint=http://[::1]:4318/below", "tracing.sample=0.5"])
    assert instance_spec(traced, "d1").tracing == instance_spec(traced, "p0").tracing == traced.tracing is not None
    assert instance_spec(traced, "d1").config_digest == d1.config_digest
    with pytest.raises(ConfigError, match="known: p0, d0, d1"):
        instance_spec(config, "d2")


def test_standalone_needs_no_file(cluster: Path) -> None:
    checkpoint = str(cluster.parent / "weights" / "longcat-tiny")
    overrides = ["engine.max_num_seqs=2", "model.dtype=float32", "engine.block_size=16"]
    spec = standalone(checkpoint, overrides, host="127.0.0.1", port=8081)
    assert (spec.role, spec.http_port, spec.engine.max_num_seqs, spec.model.dtype) == ("standalone", 8081, 2, "float32")
    assert spec.engine.num_blocks == 1 + 2 * 128
    assert spec.peers == ()
    with pytest.raises(ConfigError, match=r"standalone\.engine\.block_size=0: must be at least 1"):
        standalone(checkpoint, ["engine.block_size=0"], host="127.0.0.1", port=8081)
    with pytest.raises(ConfigError, match=r"standalone\.parallel\.pp_size=2: must be 1 in a standalone pool"):
        standalone(checkpoint, ["parallel.pp_size=2"], host="127.0.0.1", port=8081)


def test_the_face_of_a_standalone_engine_has_its_settings(cluster: Path) -> None:
    checkpoint = str(cluster.parent / "weights" / "longcat-tiny")
    front = standalone_cluster(checkpoint, ["load_balancer.max_inflight=2"], host="127.0.0.2", port=9000).load_balancer
    assert (front.max_inflight, front.host, front.port) == (2, "127.0.0.2", 9000)
    with pytest.raises(ConfigError, match=r"load_balancer\.max_inflight=0"):
        standalone_cluster(checkpoint, ["load_balancer.max_inflight=0"], host="127.0.0.1", port=8081)


def test_a_standalone_engine_may_have_groups_and_the_whole_cache_on_every_rank(cluster: Path) -> None:
    checkpoint = str(cluster.parent / "weights" / "longcat-tiny")
    groups = ["parallel.dp_size=2", "parallel.attn_tp_size=2", "engine.max_num_seqs=4", "engine.block_size=16"]
    spec = standalone(checkpoint, groups, host="127.0.0.1", port=8081)
    assert (spec.parallel.world_size, spec.parallel.kvp_size) == (4, 1)
    whole = blocks_needed(spec.engine.max_model_len, spec.engine, num_shards=1)
    split = standalone(checkpoint, [*groups, "parallel.kvp_size=2"], host="127.0.0.1", port=8081)
    assert spec.engine.num_blocks > whole and split.parallel.world_size == 4
    with pytest.raises(ConfigError, match="dp_size 2 x attn_tp_size 2 = 4, but"):
        standalone(checkpoint, [*groups, "devices_per_node=2"], host="127.0.0.1", port=8081)
    with pytest.raises(ConfigError, match=r"parallel\.attn_tp_size=1: differs from standalone\.parallel\.kvp_size=2"):
        standalone(checkpoint, ["parallel.kvp_size=2"], host="127.0.0.1", port=8081)
    with pytest.raises(ConfigError, match=r"max_num_seqs=3: must be a multiple of standalone\.parallel\.dp_size=2"):
        standalone(checkpoint, [*groups, "engine.max_num_seqs=3"], host="127.0.0.1", port=8081)


@pytest.mark.parametrize(
    ("layers", "stages", "expected"), [(5, 2, (3, 2)), (38, 8, (5, 5, 5, 5, 5, 5, 4, 4)), (3, 3, (1, 1, 1))]
)
def test_stages_are_as_even_as_can_be(layers: int, stages: int, expected: tuple[int, ...]) -> None:
    assert even_stages(layers, stages) == expected


def test_int8_weights_want_a_hidden_size_that_a_group_divides(cluster: Path) -> None:
    path = cluster.parent / "weights" / "longcat-tiny" / "config.json"
    fields = {**CHECKPOINT, "num_attention_heads": 3}
    path.write_text(json.dumps(fields))
    load(cluster, ["decode.parallel={kvp_size: 3, attn_tp_size: 3}", "devices_per_node=4"])
    path.write_text(json.dumps({**fields, "quantization_config": int8_section(["lm_head"])}))
    (line,) = refusal(cluster, "decode.parallel={kvp_size: 3, attn_tp_size: 3}", "devices_per_node=4")
    assert line.startswith("decode.parallel.attn_tp_size=3: does not divide the checkpoint's hidden_size 64")


def test_another_quantisation_is_refused_before_anything_is_loaded(cluster: Path) -> None:
    path = cluster.parent / "weights" / "longcat-tiny" / "config.json"
    path.write_text(json.dumps({**CHECKPOINT, "quantization_config": {"quant_method": "fp8"}}))
    assert any("quantization_config.quant_method: fp8 is not supported" in line for line in refusal(cluster))


# -- compiled steps


def test_graphs_have_sizes_and_a_folder_only_where_they_are_compiled(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = load(cluster, ["decode.engine.exe_mode=inductor"])
    assert config.prefill is not None and config.decode is not None
    assert (config.prefill.engine.exe_mode, config.prefill.engine.buckets) == ("eager", ())
    assert config.prefill.engine.compile_cache == ""
    assert config.decode.engine.buckets == (1, 8)
    assert compile_cache(config.decode.engine) == tmp_path / "home" / ".cache" / "longcat_pd" / "compiled"
    digest = instance_spec(config, "d0").config_digest
    monkeypatch.setenv("HOME", "/elsewhere")  # of whoever runs the balancer
    again = load(cluster, ["decode.engine.exe_mode=inductor"])
    assert instance_spec(again, "d0").config_digest == digest


def test_sizes_are_ascending_and_each_once(cluster: Path) -> None:
    several = load(cluster, ["decode.engine.exe_mode=inductor", "decode.engine.buckets=[8, 2, 4, 2]"])
    assert several.decode is not None and several.decode.engine.buckets == (2, 4, 8)
    one = load(cluster, ["decode.engine.exe_mode=inductor", "decode.engine.max_num_seqs=1"])
    assert one.decode is not None and one.decode.engine.buckets == (1,)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["decode.engine.buckets=[1, 4]"],
            "decode.engine.buckets=[1, 4]: the largest must be the 8 slots of a group (decode.engine.max_num_seqs)",
        ),
        (
            ["decode.engine.buckets=[1, 16]"],
            "decode.engine.buckets=[1, 16]: the largest must be the 8 slots of a group (decode.engine.max_num_seqs)",
        ),
        (["decode.engine.buckets=[0, 8]"], "decode.engine.buckets=[0, 8]: must be at least 1"),
        (
            ["prefill.engine.exe_mode=inductor"],
            "prefill.engine.exe_mode=inductor: compiles decode steps; a prefill pool has none, leave it eager",
        ),
        (
            ["decode.engine.exe_mode=fast"],
            "decode.engine.exe_mode=fast: must be one of eager, inductor, ge_graph, npugraph_ex",
        ),
    ],
)
def test_what_cannot_be_compiled(cluster: Path, overrides: list[str], line: str) -> None:
    assert refusal(cluster, "decode.engine.exe_mode=inductor", *overrides) == [line]


def test_sizes_do_not_matter_to_who_compiles_nothing(cluster: Path) -> None:
    config = load(cluster, ["decode.engine.buckets=[1, 4]"])
    assert config.decode is not None and config.decode.engine.buckets == (1, 4)


def test_the_folder_of_graphs_is_anchored_where_it_is_written(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.write_text(CLUSTER.replace("max_num_seqs: 8}", "max_num_seqs: 8, exe_mode: inductor, compile_cache: graphs}"))
    monkeypatch.chdir(tmp_path / "weights")
    config = load(cluster)
    assert config.decode is not None and config.decode.engine.compile_cache == str(tmp_path / "graphs")
    config = load(cluster, ["decode.engine.compile_cache=here"])
    assert config.decode is not None and config.decode.engine.compile_cache == str(tmp_path / "weights" / "here")
    spec = standalone(
        str(tmp_path / "weights" / "longcat-tiny"),
        ["engine.exe_mode=inductor", "engine.compile_cache=there", "engine.max_num_seqs=4"],
        host="127.0.0.1",
        port=30000,
    )
    assert spec.engine.compile_cache == str(tmp_path / "weights" / "there") and spec.engine.buckets == (1, 4)


CLUSTERS = sorted((Path(__file__).parents[2] / "deploy" / "config" / "cluster").glob("*-cpu.yaml"))


@pytest.mark.parametrize("file", CLUSTERS, ids=lambda file: file.stem)
def test_the_files_for_cpu_serve_the_shipped_checkpoint(file: Path) -> None:
    place = unresolved(file).model.path
    assert Path(place.replace("/opt/longcat_pd/current", str(file.parents[3]))).resolve() == shipped_checkpoint()
    config = load(file, [f"model.path={shipped_checkpoint()}"])
    assert (config.model.served_name, config.model.dtype) == (SERVED_NAME, "float32")
    assert config.prefill is not None and config.decode is not None
    worlds = {"local-cpu": (4, 2), "twin-cpu": (4, 4), "hosts4-cpu": (2, 2)}
    assert (config.prefill.parallel.world_size, config.decode.parallel.world_size) == worlds[file.stem]


@pytest.mark.parametrize("size", ["pp_size", "cp_size"])
def test_sizes_beyond_everything_are_refused_at_once(cluster: Path, size: str) -> None:
    assert any("99999999999" in line for line in refusal(cluster, f"prefill.parallel.{size}=99999999999"))


def test_devices_are_counted_with_all_sizes(cluster: Path) -> None:
    lines = [line for line in refusal(cluster, "decode.parallel.cp_size=50") if "devices_per_node" in line]
    assert lines and all("cp_size 50" in line for line in lines)
