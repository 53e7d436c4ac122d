"""The plan that is printed, and refusals by memory. Ports are in ``tests/integration/test_preflight_ports.py``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.resolve import instance_spec, load
from longcat_pd.sizing.memory import instance_memory
from longcat_pd.sizing.preflight import (
    compiler_findings,
    free_memory_bytes,
    memory_findings,
    plan_lines,
    total_memory_findings,
)
from tests.unit.test_resolve import cluster

__all__ = ["cluster"]


def plan(file: Path, *overrides: str) -> list[str]:
    spec = instance_spec(load(file, overrides), "p0")
    return list(plan_lines(spec, instance_memory(spec, ModelConfig.load(spec.model.path))))


def test_the_plan_names_layout_ports_and_the_bytes_of_every_rank(cluster: Path) -> None:
    text = "\n".join(plan(cluster))
    assert "prefill p0: pp 2 x cp 2, 4 ranks on cpu, bfloat16" in text
    assert "layers per stage [3, 2]; block_size 16" in text
    assert "30000 HTTP, 30001 control records" in text
    assert "30005 rendezvous of the lanes" in text
    assert "rank 0 (stage 0): " in text
    assert "rank 3 (stage 1): " in text
    assert "advice" not in text


def test_a_chunk_that_is_not_level_is_worth_a_word(cluster: Path) -> None:
    assert "multiple of 32" in plan(cluster, "prefill.engine.max_num_batched_tokens=48")[-1]


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
