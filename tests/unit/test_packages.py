"""Which packages are asked for, and how an interpreter answers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from longcat_pd.cluster.everywhere import StepFailed
from longcat_pd.cluster.packages import Packages, ask, needed
from longcat_pd.cluster.shell import LocalShell

PYPROJECT = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
HERE = LocalShell(node="here")


def test_all_that_this_project_depends_on_is_found_under_its_name() -> None:
    names = needed(PYPROJECT, "cpu")
    assert {"fastapi", "pyyaml", "pyzmq", "prometheus-client", "torch"} <= set(names) and "torch_npu" not in names
    found = ask(HERE, sys.executable, names)
    assert found.complaint == ""
    assert set(found.versions) == set(names) and all(found.versions.values())
    assert needed(PYPROJECT, "npu")[-1] == "torch_npu"


def test_what_is_missing_is_listed_and_what_is_no_python_is_named(tmp_path: Path) -> None:
    assert ask(HERE, sys.executable, ["pyyaml", "not-there"]).complaint == "lacks not-there"
    with pytest.raises(StepFailed, match="does not run"):
        ask(HERE, str(tmp_path / "none"), ["pyyaml"])
    with pytest.raises(StepFailed, match="is no Python"):
        ask(HERE, "/bin/echo", ["pyyaml"])


def test_an_old_python_is_told_from_a_new_one() -> None:
    assert "3.10 or newer" in Packages(python="3.9.18", missing=(), versions={}).complaint
    assert Packages(python="3.10.0", missing=(), versions={}).complaint == ""
