"""config/npu_checks.py: what a cluster file says of NPU, and what of it cannot work, each with its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from longcat_pd.config.resolve import instance_spec, load
from longcat_pd.config.schema import HcclConfig, HcclOptions, InstanceSpec, NpuConfig
from longcat_pd.errors import ConfigError
from longcat_pd.tiny.configs import make_config
from longcat_pd.wire import from_json, to_json


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """Prefill of two stages and decode of two ranks on NPU, of a checkpoint with 8 heads."""
    (tmp_path / "model").mkdir()
    config = make_config("chat", ["num_attention_heads=8"], dtype="bfloat16")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    engine = {"block_size": 128, "num_blocks": 1000, "max_num_seqs": 8}
    tree = {
        "model": {"path": "model"},
        "cluster_key_file": "/etc/longcat_pd/cluster.key",
        "device": "npu",
        "devices_per_node": 2,
        "prefill": {
            "engine": engine,
            "parallel": {"pp_size": 2},
            "instances": [{"name": "p0", "http_port": 30000, "nodes": ["10.0.0.1"]}],
        },
        "decode": {
            "engine": dict(engine),
            "parallel": {"kvp_size": 2, "attn_tp_size": 2},
            "instances": [{"name": "d0", "http_port": 31000, "nodes": ["10.0.0.2"]}],
        },
    }
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def refusal(file: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(file, overrides)
    return caught.value.message.splitlines()


def told(file: Path, *overrides: str) -> InstanceSpec:
    """What a rank of the decode instance reads, from the text that it is given."""
    return from_json(InstanceSpec, to_json(instance_spec(load(file, overrides), "d0")))


def test_usual_settings(cluster: Path) -> None:
    spec = told(cluster)
    assert (spec.device, spec.npu) == ("npu", NpuConfig())
    assert (spec.npu.moe_cube_cores, spec.npu.moe_vector_cores) == (12, 24)
    assert (spec.npu.main_cube_cores, spec.npu.main_vector_cores) == (12, 24)
    assert (spec.npu.is_moe_overlapped, spec.npu.is_prefetched, spec.npu.soc) == (False, False, "A2")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("soc", "A3"),
        ("is_moe_overlapped", True),
        ("moe_cube_cores", 8),
        ("moe_vector_cores", 16),
        ("main_cube_cores", 0),
        ("main_vector_cores", 20),
        ("is_prefetched", True),
    ],
)
def test_every_setting_reaches_the_rank(cluster: Path, name: str, value: Any) -> None:
    assert told(cluster, f"npu.{name}={value}").npu == NpuConfig(**{name: value})


@pytest.mark.parametrize("alg", ["fullmesh_v1", "fullmesh_v2", "hierarchy"])
def test_the_way_of_the_fused_pair_reaches_the_rank(cluster: Path, alg: str) -> None:
    fused = "decode.parallel={kvp_size: 2, attn_tp_size: 2, ep_size: 2, moe_dispatch: fused}"
    assert told(cluster, fused, "npu.soc=A3", f"npu.comm_alg={alg}").npu.comm_alg == alg


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("buffer_mb", 400),
        ("buffer_name", "shared"),
        ("expansion_mode", "aiv"),
        ("algorithm", "level0:ring"),
        ("exec_timeout_s", 60),
        ("traffic_class", 132),
        ("service_level", 4),
    ],
)
def test_every_option_of_a_group_reaches_the_rank(cluster: Path, name: str, value: Any) -> None:
    spec = told(cluster, "npu.soc=A3", f"npu.hccl.kvp.{name}={value}")
    assert spec.npu.hccl == HcclConfig(kvp=HcclOptions(**{name: value}))


@pytest.mark.parametrize("mode", ["ge_graph", "npugraph_ex"])
def test_graphs_of_npu(cluster: Path, mode: str) -> None:
    config = make_config("2.0", ["num_attention_heads=8"], dtype="bfloat16")
    (cluster.parent / "model" / "config.json").write_text(json.dumps(config))
    spec = told(cluster, f"decode.engine.exe_mode={mode}")
    assert (spec.engine.exe_mode, spec.engine.buckets) == (mode, (1, 8))


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["npu.sock=A2"], "npu.sock: unknown key"),
        (
            ["decode.engine.exe_mode=npugraph_ex"],
            "decode.engine.exe_mode=npugraph_ex: captures no dense attention, and this checkpoint has no indexer",
        ),
        (["decode.engine.unfused=[norms, prolog]"], "decode.engine.unfused=['norms']: with device=npu only prolog"),
        (["npu.hccl.ep.service_level=3"], "npu.hccl.ep: has no effect, no pool has a group of this axis"),
        (["npu.hccl.fused.service_level=3"], "npu.hccl.fused: has no effect"),
        (["npu.hccl.local.service_level=3"], "npu.hccl.local: has no effect"),
        (["npu.hccl.tp.buffer_mb=1"], "npu.hccl.tp: unknown key"),
        (["npu.hccl.ep.hccl_buffer_size=1"], "npu.hccl.ep.hccl_buffer_size: unknown key"),
        (["npu.hccl.ep.buffer_mb=big"], "npu.hccl.ep.buffer_mb=big: must be a whole number"),
        (["npu.soc=A3", "npu.hccl.ep.buffer_mb=0"], "npu.hccl.ep.buffer_mb=0: must be at least 1"),
        (
            ["npu.soc=A3", "npu.hccl.ep.buffer_mb=2147483648"],
            "npu.hccl.ep.buffer_mb=2147483648: must be at most 2.14748e+09",
        ),
        (["npu.hccl.ep.exec_timeout_s=2147483648"], "npu.hccl.ep.exec_timeout_s=2147483648: must be at most 2.14748e+09"),
        (["devices_per_node=1000000000000"], "devices_per_node=1000000000000: must be at most 1024"),
        (["npu.hccl.ep.service_level=8"], "npu.hccl.ep.service_level=8: must be at most 7"),
        (["npu.hccl.ep.traffic_class=256"], "npu.hccl.ep.traffic_class=256: must be at most 255"),
        (["npu.hccl.ep.exec_timeout_s=0"], "npu.hccl.ep.exec_timeout_s=0: must be at least 1"),
        (["npu.hccl.ep.expansion_mode=fast"], "npu.hccl.ep.expansion_mode=fast: must be one of default, host_ts"),
        (["npu.soc=A5"], "npu.soc=A5: must be one of A2, A3"),
        (["npu.is_prefetched=1"], "npu.is_prefetched=1: must be true or false"),
        (["npu.moe_cube_cores=25"], "npu.moe_cube_cores=25: must be at most 24"),
        (["npu.main_vector_cores=49"], "npu.main_vector_cores=49: must be at most 48"),
        (
            ["npu.main_cube_cores=13"],
            "npu.moe_cube_cores=12: with npu.main_cube_cores=13 that is 25, of 24 cube cores",
        ),
        (
            ["npu.moe_vector_cores=30"],
            "npu.moe_vector_cores=30: with npu.main_vector_cores=24 that is 54, of 48 vector cores",
        ),
        (["npu.comm_alg=fullmesh"], "npu.comm_alg=fullmesh: has no effect without moe_dispatch=fused"),
        (["npu.comm_alg=fullmesh_v2"], "npu.comm_alg=fullmesh_v2: npu.soc=A2 has fullmesh, hierarchy"),
        (
            ["npu.hccl.ep.buffer_mb=400"],
            "npu.hccl.ep.buffer_mb=400: npu.soc=A2 has one size for all groups; set HCCL_BUFFSIZE in env",
        ),
        (["env={HCCL_BUFFSIZE: '0'}"], "env.HCCL_BUFFSIZE=0: must be a whole number of MB, from 1 to 2147483647"),
        (
            ["decode.env={P2P_HCCL_BUFFSIZE: 4M}"],
            "decode.env.P2P_HCCL_BUFFSIZE=4M: must be a whole number of MB, from 0 to",
        ),
        (
            [f"prefill.instances.0.env={{HCCL_BUFFSIZE: '{5000 * '9'}'}}"],
            "prefill.instances[0].env.HCCL_BUFFSIZE=99999999999999999999: must be",
        ),
        (
            ["decode.engine.exe_mode=inductor"],
            "decode.engine.exe_mode=inductor: device=npu has eager, ge_graph, npugraph_ex",
        ),
        (
            ["decode.engine.num_blocks=0"],
            "decode.engine.num_blocks: must be given with device=npu, whose memory is not known here",
        ),
        (
            ["model.dtype=float32"],
            "model.dtype=float32: the operators of device=npu compute in 16 bits; use bfloat16",
        ),
        (
            ["devices_per_node=3"],
            "prefill.parallel: pp_size 2 x cp_size 1 = 2, but prefill.instances[0] has 1 nodes x devices_per_node 3 = 3",
        ),
    ],
)
def test_what_cannot_work_on_npu(cluster: Path, overrides: list[str], line: str) -> None:
    assert refusal(cluster, *overrides)[0].startswith(line)


@pytest.mark.parametrize("size", [24, 2048, 8])
def test_blocks_that_attention_does_not_take(cluster: Path, size: int) -> None:
    both = [f"{role}.engine.block_size={size}" for role in ("prefill", "decode")]
    lines = refusal(cluster, *both, f"prefill.engine.max_num_batched_tokens={size * 8}")
    text = "must be a multiple of 16, 1024 at most, with device=npu; 128 is usual"
    assert lines == [f"{role}.engine.block_size={size}: {text}" for role in ("prefill", "decode")]


@pytest.mark.parametrize(("heads", "is_fit"), [(8, True), (12, False), (128, True), (256, False)])
def test_heads_of_a_rank_are_a_power_of_two(cluster: Path, heads: int, is_fit: bool) -> None:
    config = make_config("chat", [f"num_attention_heads={heads}"], dtype="bfloat16")
    (cluster.parent / "model" / "config.json").write_text(json.dumps(config))
    if is_fit:
        load(cluster)
        return
    text = f"attention on device=npu takes a power of two of heads, 128 at most; a rank has {heads}"
    assert refusal(cluster) == [
        f"prefill.parallel.attn_tp_size=1: {text}",
        f"decode.parallel.attn_tp_size=2: {text}",  # all heads of all ranks meet each rank's keys
    ]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("npu.soc=A3", "npu.soc=A3: has no effect with device=cpu; leave it out"),
        ("npu.is_prefetched=true", "npu.is_prefetched=True: has no effect with device=cpu; leave it out"),
        ("npu.hccl.ep.buffer_mb=400", "npu.hccl.ep.buffer_mb=400: has no effect with device=cpu; leave it out"),
        ("decode.engine.exe_mode=ge_graph", "decode.engine.exe_mode=ge_graph: device=cpu has eager, inductor"),
    ],
)
def test_settings_of_npu_elsewhere(cluster: Path, override: str, line: str) -> None:
    assert refusal(cluster, "device=cpu", override) == [line]


def test_one_captured_stream_has_nothing_beside_it(cluster: Path) -> None:
    both = ("npu.is_moe_overlapped=true", "decode.engine.exe_mode=npugraph_ex")
    assert any(
        "npu.is_moe_overlapped=true: decode.engine.exe_mode=npugraph_ex captures" in line
        for line in refusal(cluster, *both)
    )
    assert told(cluster, both[0], "decode.engine.exe_mode=ge_graph").npu.is_moe_overlapped


@pytest.mark.parametrize("key", ["model.path", "decode.engine.compile_cache", "log_dir"])
@pytest.mark.parametrize("path", ["a\0b", "~nobody-of-this-name/x"])
def test_what_is_no_path(cluster: Path, key: str, path: str) -> None:
    (line,) = refusal(cluster, f"{key}={json.dumps(path)}")
    assert line.startswith(f"{key}={path!r}: is no path: ")
