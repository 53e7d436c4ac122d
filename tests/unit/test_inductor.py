"""engine/inductor.py up to where it would compile: what a machine and a folder must have, and what a graph depends on."""

from __future__ import annotations

import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longcat_pd.engine import inductor
from longcat_pd.engine.compile_cache import CacheEntry
from longcat_pd.errors import ConfigError


class Step(nn.Module):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, 2))
        self.state = nn.Buffer(torch.zeros(4, dtype=torch.int64))
        self.part = nn.Linear(2, 2)
        self.again = self.part  # a part that two others share

    def examples(self, num_seqs: int) -> tuple[Tensor, ...]:
        return (torch.zeros(num_seqs, dtype=torch.int64),)


def compiled(part: Any, entry: CacheEntry) -> tuple[Any, bool]:
    return inductor.compiled(part, 2, entry)


class Graph:
    def save(self, path: str, **_: Any) -> None:
        Path(path).write_bytes(b"")


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each graph that would have been compiled, after which there is one that cannot be run."""
    found: list[None] = []

    def noting(*_: Any) -> Graph:
        found.append(None)
        return Graph()

    monkeypatch.setattr(inductor, "_compile", noting)
    monkeypatch.setattr(inductor.CompiledArtifact, "load", lambda **_: None)
    return found


def test_a_machine_without_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"engine\.exe_mode=inductor: needs g\+\+ on this machine") as caught:
        compiled(Step(), CacheEntry(tmp_path / "c", "m", {}))
    assert caught.value.param == "engine.exe_mode"
    assert not (tmp_path / "c").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"engine\.compile_cache=.*file/c: Not a directory") as caught:
        compiled(Step(), CacheEntry(tmp_path / "file" / "c", "m", {}))
    assert caught.value.param == "engine.compile_cache"


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_compiled(
    tmp_path: Path, compilations: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is fresh in it may be used all the same."""
    entry = CacheEntry(tmp_path, "m", {"code": "0"})
    compiled(Step(), entry)

    def refused(dir: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    _, is_new = compiled(Step(), entry)
    assert not is_new and len(compilations) == 1
    with pytest.raises(ConfigError, match=r"engine\.compile_cache=.*: Permission denied"):
        compiled(Step(), CacheEntry(tmp_path, "m", {"code": "1"}))
    assert len(compilations) == 1


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c").chmod(mode)
    with pytest.raises(ConfigError, match="writable by nobody else"):
        compiled(Step(), CacheEntry(tmp_path / "c", "m", {}))


def test_a_new_folder_is_this_user_s_alone(tmp_path: Path, compilations: list[None]) -> None:
    compiled(Step(), CacheEntry(tmp_path / "a" / "b", "m", {}))
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_shapes_of_tensors_and_versions_are_facts(tmp_path: Path, compilations: list[None]) -> None:
    entry = CacheEntry(tmp_path, "m", {"code": "0"})
    assert compiled(Step(), entry)[1]
    facts = stored(entry)
    assert not compiled(Step(), entry)[1]
    assert compiled(Step(4), entry)[1]
    assert {*facts} == {"code", "torch", "python", "compiler", "processor", "options", "tensors"}
    assert facts["torch"] == torch.__version__ and all(facts.values())
    # each tensor once, parameters of a module before its buffers
    described = "float32(3, 2)(2, 1) int64(4,)(1,) float32(2, 2)(2, 1) float32(2,)(1,)"
    assert facts["tensors"] == described
    assert {name for name in facts if facts[name] != stored(entry)[name]} == {"tensors"}


def stored(entry: CacheEntry) -> dict[str, str]:
    with zipfile.ZipFile(entry.path) as parts:
        return dict(json.loads(parts.read("facts.json")))
