"""Compiled graphs on their way to a machine, this one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longcat_pd.cluster.release import NodeCode
from longcat_pd.cluster.shell import LocalShell
from longcat_pd.cluster.tree import Tree
from longcat_pd.config.resolve import unresolved


def test_folders_with_colons_and_spaces_are_folders_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "host:my graphs").mkdir()
    (tmp_path / "host:my graphs" / "graph").write_text("made")
    pool = {"instances": [{"name": "p0", "http_port": 20000}]}
    tree = {"model": {"path": "."}, "hosts": {"path": str(tmp_path / "path")}, "load_balancer": {"port": 20500}}
    tree |= {"prefill": pool, "decode": {"instances": [{"name": "d0", "http_port": 20100}]}}
    (tmp_path / "c.yaml").write_text(json.dumps(tree))
    config = unresolved(str(tmp_path / "c.yaml"))
    monkeypatch.chdir(tmp_path)
    with NodeCode(LocalShell(node="127.0.0.1"), config=config, tree=Tree(root=tmp_path, paths=(), notes=())) as node:
        node.look()
        node.copy_graphs(Path("host:my graphs"), [f"{tmp_path}/laid here"])
    assert (tmp_path / "laid here" / "graph").read_text() == "made"
