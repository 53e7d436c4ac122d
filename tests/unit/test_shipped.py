"""The trained checkpoint that comes with the package: whole, installed and distributed with it, and the default."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from longcat_pd.cluster.tree import tree_of
from longcat_pd.config import shipped
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.shipped import SERVED_NAME, Variant, shipped_checkpoint
from longcat_pd.errors import ConfigError
from longcat_pd.models.checkpoint import lacking
from longcat_pd.standalone import infer, serve
from longcat_pd.standalone.default_model import with_default
from tests.ports import free_base
from tools.tiny.card_runs import AS_SERVED

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "longcat_pd"
BOTH: tuple[Variant, ...] = ("bf16", "int8")
MAX_BYTES = 12_000_000  # of both together


def data_files() -> set[str]:
    """What is no code, relative to the root."""
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in files if path.suffix not in (".py", ".pyc")}


@pytest.mark.parametrize("variant", BOTH)
def test_it_is_a_whole_longcat2_with_every_part_on(variant: Variant) -> None:
    folder = shipped_checkpoint(variant)
    model = ModelConfig.load(folder)
    assert model.indexer is not None and model.over_embedding is not None and model.zero_expert_num
    assert (model.quantization is not None) == (variant == "int8")
    assert list(lacking(folder, has_draft=True)) == []
    assert not list(folder.glob(".*"))


def test_both_are_small() -> None:
    folders = [shipped_checkpoint(variant) for variant in BOTH]
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) <= MAX_BYTES


@pytest.mark.parametrize("gone", ["config.json", "chat_template.jinja", "model.safetensors.index.json", "*.safetensors"])
def test_an_installation_without_a_file_of_it_names_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gone: str
) -> None:
    folder = tmp_path / "tiny" / "trained" / "bf16"
    shutil.copytree(shipped_checkpoint(), folder)
    monkeypatch.setattr(shipped, "files", lambda package: tmp_path)
    assert shipped_checkpoint() == folder
    victim = min(folder.glob(gone))
    victim.unlink()
    with pytest.raises(ConfigError) as caught:
        shipped_checkpoint()
    assert caught.value.message.startswith(f"{folder}: ") and f"lacks {victim.name};" in caught.value.message


def has_setuptools() -> bool:
    """Not every environment of Python 3.12 or newer has it, nor one of 3.11 the release that pyproject.toml wants."""
    if importlib.util.find_spec("setuptools") is None:
        return False
    code = "import setuptools, sys; sys.exit(int(setuptools.__version__.split('.')[0]) < 77)"
    return subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_wheel_has_every_file_and_finds_the_checkpoint(tmp_path: Path) -> None:
    if not has_setuptools():
        pytest.skip("needs setuptools 77 or newer")
    tree, wheels, site = tmp_path / "tree", tmp_path / "wheels", tmp_path / "site"
    shutil.copytree(PACKAGE, tree / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    wheels.mkdir()
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(wheels)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=tree, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        assert data_files() <= set(archive.namelist())
        archive.extractall(site)
    ask = "from longcat_pd.config.shipped import shipped_checkpoint as s; print(s('bf16'), s('int8'))"
    told = subprocess.run([sys.executable, "-P", "-c", ask], cwd=site, env={"PYTHONPATH": str(site)}, capture_output=True)
    trained = site / "longcat_pd" / "tiny" / "trained"
    assert told.stdout.decode().split() == [str(trained / variant) for variant in BOTH], told.stderr.decode()


def test_every_machine_of_a_cluster_gets_it() -> None:
    ours = {path for path in data_files() if path.startswith("longcat_pd/tiny/trained/")}
    assert {path for path in ours if path.endswith(".safetensors")}
    assert ours <= set(tree_of(ROOT).paths)


def test_the_default_is_for_who_names_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert with_default("/weights", ["a=b"]) == ("/weights", ["a=b"])
    assert with_default(None, ["model.path=/weights"])[1] == ["model.path=/weights"]
    assert capsys.readouterr().err == ""
    folder = str(shipped_checkpoint())
    name = f"model.served_name={SERVED_NAME}"
    assert AS_SERVED == ("model.dtype=float32",), "the score card's"
    assert with_default(None, ["a=b"]) == (folder, [name, "model.dtype=float32", "a=b"])
    assert with_default(None, ["device=npu"]) == (folder, [name, "device=npu"])  # which computes in 16 bits
    assert capsys.readouterr().err == f"no --model: the small trained model of the package, {folder}\n" * 2


def test_serve_without_a_model_plans_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--check", "--port", str(free_base())]) == 0
    assert str(shipped_checkpoint()) in capsys.readouterr().err
    assert serve.main(["--check", "--port", str(free_base()), "--set", "model.path=/nowhere"]) == 2
    assert "error: model.path=/nowhere: " in capsys.readouterr().err


def test_an_offline_file_has_no_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        infer.main(["--yaml", "any.yaml"])
    assert caught.value.code == 2 and "--yaml needs --model" in capsys.readouterr().err
