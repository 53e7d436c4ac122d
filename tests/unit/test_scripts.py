"""The scripts of ``deploy/`` in the hands of two at once and in odd surroundings, with stand-ins for what takes minutes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clone import Clone

ROOT = Path(__file__).parents[2]
# makes slowly what it is asked to, and notes beginning and end; fails where the checkpoint is there, as the tool does
PYTHON = """\
#!/bin/bash
note() {{ echo "$1" >>{log}; }}
case " $* " in
  *" pip --version "*) ;;
  *" install "*) note "pip begins"; sleep 1; note "pip ends" ;;
  *longcat_pd.tiny*)
    note "tiny begins"
    [ ! -e "${{@: -1}}" ] || exit 1
    sleep 1; mkdir -p "${{@: -1}}"; touch "${{@: -1}}/config.json"
    note "tiny ends" ;;
  *) note "runs with $*"; pwd -P ;;
esac
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "a tree"
    shutil.copytree(ROOT / "deploy", root / "deploy")
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / ".venv" / "bin").mkdir(parents=True)
    python = root / ".venv" / "bin" / "python"
    python.write_text(PYTHON.format(log=tmp_path / "log"))
    python.chmod(0o755)
    return root


INFER = ("deploy/infer.sh", "--model", "longcat_flash_lite", "--yaml", "longcat_flash_lite_rank_8_8ep_cpu.yaml")


def test_of_two_first_uses_one_installs_and_makes_the_checkpoint_and_the_other_waits(tree: Path) -> None:
    two = [subprocess.Popen(["bash", *INFER], cwd=tree, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [each.communicate(timeout=120)[1] for each in two]
    assert [each.returncode for each in two] == [0, 0], said
    log = (tree.parent / "log").read_text().splitlines()
    assert log[:2] == ["pip begins", "pip ends"] and log.count("pip begins") == 1
    assert log.count("tiny begins") == 1 and sum("waiting for another" in each for each in said) >= 1
    assert sum("cli infer" in line for line in log) == 2


def test_without_flock_it_goes_on(tree: Path, tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bash", "dirname", "basename", "cat", "cut", "mkdir", "sha256sum", "sleep", "tail", "touch"):
        (programs / name).symlink_to(str(shutil.which(name)))
    done = subprocess.run(
        ["bash", *INFER], cwd=tree, env={"PATH": str(programs)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tree.parent / "log").read_text().count("begins") == 2


@pytest.mark.parametrize("script", [INFER, ("deploy/run_pd.sh", "status")], ids=["infer", "run_pd"])
def test_where_cd_searches_changes_nothing(tree: Path, tmp_path: Path, script: tuple[str, ...]) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(ROOT / "deploy", elsewhere / "deploy")
    for searched in (".", str(elsewhere)):
        done = subprocess.run(
            ["bash", *script], cwd=tree, env={**os.environ, "CDPATH": searched}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert not [path.name for path in elsewhere.iterdir() if path.name != "deploy"]


def test_a_folder_for_graphs_is_the_one_that_was_named(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "sub").mkdir(parents=True)
    searched = tmp_path / "searched"
    (searched / "my graphs * x").mkdir(parents=True)
    script = (ROOT / "longcat_pd" / "cluster" / "node" / "code.sh").read_text()
    asked = [f"cache {home}/my  graphs *", "cache my graphs * x"]
    done = subprocess.run(
        ["sh", "-c", script, "code.sh", str(tmp_path / "path")],
        input="\n".join(asked) + "\n",
        env={**os.environ, "HOME": str(home), "CDPATH": str(searched)},
        capture_output=True,
        text=True,
        check=False,
    )
    told = [line.removeprefix("folder=") for line in done.stdout.splitlines() if line.startswith("folder=")]
    assert told == [f"{home}/my  graphs *", f"{home}/my graphs * x"], done.stdout
    assert sorted(path.name for path in home.iterdir()) == ["my  graphs *", "my graphs * x", "sub"]


def test_code_of_the_current_folder_is_not_run(tmp_path: Path) -> None:
    """Another tree, and a module of the name of a library; the current folder stays what it is to paths of options."""
    clone = Clone(tmp_path / "clone")
    (tmp_path / "here" / "longcat_pd").mkdir(parents=True)
    for name in ("longcat_pd/__init__.py", "yaml.py", "runpy.py", "multiprocessing.py"):
        (tmp_path / "here" / name).write_text("raise SystemExit('this is foreign')")
    (tmp_path / "here" / "c.yaml").write_text("no_such_key: 1")
    for script, *words in (("run_pd.sh", "start", "c.yaml"), ("infer.sh", "--help")):
        command = ["bash", str(clone.path / "deploy" / script), *words]
        done = subprocess.run(command, cwd=tmp_path / "here", capture_output=True, text=True, check=False)
        assert "foreign" not in done.stderr and done.returncode == (2 if "c.yaml" in words else 0), done.stderr
        assert ("no_such_key" in done.stderr) == ("c.yaml" in words)
    ask = "from longcat_pd import own; print(*own.command('-m', 'longcat_pd.tiny', '--help'), sep='\\n')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    asked = [sys.executable, "-c", ask]
    told = subprocess.run(
        asked, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for flags in (told[1:2] if told[1] == "-P" else [], []):
        words = [told[0], *flags, *told[2 if told[1] == "-P" else 1 :]]
        done = subprocess.run(words, cwd=tmp_path / "here", env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "foreign" not in done.stderr, done.stderr
