"""The plan that is printed, and refusals by memory. Ports are in ``tests/integration/test_preflight_ports.py``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.resolve import instance_spec, load, standalone
from longcat_pd.sizing.memory import instance_memory
from longcat_pd.sizing.preflight import (
    compiler_findings,
    free_memory_bytes,
    key_findings,
    memory_findings,
    plan_lines,
    total_memory_findings,
)
from tests.unit.test_resolve import cluster

__all__ = ["cluster"]


def plan(file: Path, *overrides: str, name: str = "p0") -> list[str]:
    spec = instance_spec(load(file, overrides), name)
    return list(plan_lines(spec, instance_memory(spec, ModelConfig.load(spec.model.path))))


def test_the_key_file_is_there_on_each_machine_and_belongs_to_the_user_alone(cluster: Path, tmp_path: Path) -> None:
    file = tmp_path / "cluster.key"
    spec = instance_spec(load(cluster, [f"cluster_key_file={file}"]), "p0")
    (line,) = key_findings(spec)
    assert line == f"cluster_key_file={file}: key file {file}: No such file or directory"
    file.write_text("\n")
    (line,) = key_findings(spec)
    assert line.endswith("holds no key")
    file.write_text("key\n")
    file.chmod(0o644)
    assert not list(key_findings(spec))
    assert f"  advice: others on this machine can use {file}, mode 0644; chmod 0400" in plan(
        cluster, f"cluster_key_file={file}"
    )
    file.chmod(0o400)
    assert not any("advice" in line for line in plan(cluster, f"cluster_key_file={file}"))


def test_the_plan_names_layout_ports_and_the_bytes_of_every_rank(cluster: Path) -> None:
    text = "\n".join(plan(cluster))
    assert "prefill p0: pp 2 x cp 2, 4 ranks on cpu, bfloat16" in text
    assert "layers per stage [3, 2]; block_size 16" in text
    assert "30000 HTTP, 30001 control records" in text
    assert "30005 rendezvous of the lanes" in text
    assert "rank 0 (stage 0): " in text
    assert "rank 3 (stage 1): " in text
    assert "advice" not in text


def test_the_plan_tells_ranks_from_sizes_that_share_them(cluster: Path) -> None:
    assert not any("split" in line for line in plan(cluster))
    wide = "prefill.parallel={pp_size: 1, cp_size: 4, ep_size: 4, moe_dispatch: two_level, node_size: 2, embed_tp_size: 2}"
    assert plan(cluster, wide)[:2] == [
        "prefill p0: cp 4, 4 ranks on cpu, bfloat16",
        "  split: ep 4 by two_level over 2 nodes, embed_tp 2, ngram_embed_tp 2",
    ]
    groups = "decode.parallel={dp_size: 2, kvp_size: 2, attn_tp_size: 2, dense_tp_size: 2, ep_size: 4, lmhead_tp_size: 4}"
    assert plan(cluster, groups, name="d0")[:2] == [
        "decode d0: dp 2 x kvp 2, 4 ranks on cpu, bfloat16",
        "  split: attn_tp 2, dense_tp 2, ep 4 by gather, lmhead_tp 4",
    ]
    path = str(cluster.parent / "weights" / "longcat-tiny")
    whole = standalone(path, ["parallel.attn_tp_size=4", "parallel.dp_size=2"], host="127.0.0.1", port=8081)
    lines = list(plan_lines(whole, instance_memory(whole, ModelConfig.load(path))))
    assert lines[0] == "standalone standalone: dp 2 x attn_tp 4, 8 ranks on cpu, bfloat16"
    assert "split" not in lines[1]


def test_a_chunk_that_is_not_level_is_worth_a_word(cluster: Path) -> None:
    assert "multiple of 32" in plan(cluster, "prefill.engine.max_num_batched_tokens=48")[-1]


def test_two_levels_of_which_one_is_idle_are_worth_a_word(cluster: Path) -> None:
    sizes = "prefill.parallel={pp_size: 1, cp_size: 4, ep_size: 4, moe_dispatch: two_level%s}"
    assert "advice: two_level on one node is all_to_all" in plan(cluster, sizes % "")[-1]
    assert not any("two_level on" in line for line in plan(cluster, sizes % ", node_size: 2"))


def test_too_little_memory_is_refused_with_its_parts(cluster: Path) -> None:
    spec = instance_spec(load(cluster), "p0")
    ranks = instance_memory(spec, ModelConfig.load(spec.model.path))
    (line,) = memory_findings(spec, ranks, available_bytes=100 << 20)
    assert line.startswith("prefill p0 needs 0.")
    assert "for its 4 ranks, 0.1 available: " in line
    assert "process 0.2" in line
    assert not list(memory_findings(spec, ranks, available_bytes=sum(rank.total_bytes for rank in ranks)))


def test_instances_that_fit_alone_may_not_fit_together(cluster: Path) -> None:
    config = load(cluster)
    specs = [instance_spec(config, name) for name in ("p0", "d0", "d1")]
    model = ModelConfig.load(config.model.path)
    needs = [sum(rank.total_bytes for rank in instance_memory(spec, model)) for spec in specs]
    (line,) = total_memory_findings(specs, available_bytes=sum(needs) - 1)
    assert line.startswith("all instances need 0.")
    assert "p0 0." in line
    assert "d1 0." in line
    assert not list(total_memory_findings(specs, available_bytes=sum(needs)))


def test_free_memory_is_a_sane_number() -> None:
    assert 1 << 20 < free_memory_bytes() < 1 << 50


def test_a_compiled_step_wants_a_compiler_and_a_folder(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def findings(folder: Path) -> list[str]:
        settings = ["decode.engine.exe_mode=inductor", f"decode.engine.compile_cache={folder}"]
        return list(compiler_findings(instance_spec(load(cluster, settings), "d0")))

    assert not findings(tmp_path / "not" / "yet" / "there")
    assert not list(compiler_findings(instance_spec(load(cluster), "d0")))
    (tmp_path / "file").write_text("")
    (line,) = findings(tmp_path / "file" / "folder")
    assert line.startswith("decode.engine.compile_cache=") and "no folder that this user can write to" in line
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    (line,) = findings(tmp_path)
    assert line == "decode.engine.exe_mode=inductor: compiles with g++, which is not on PATH; install it or use eager"
