"""The command line of a worker, up to where anything would start: which node it is, what it counts, what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from longcat_pd import log
from longcat_pd.prefill_worker.__main__ import main
from longcat_pd.sizing import preflight
from tests.unit.test_resolve import cluster

__all__ = ["cluster"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "set_up", lambda: None)
    monkeypatch.setattr(preflight, "port_findings", lambda uses: [])


def check(file: Path, *arguments: str, nodes: str = '["127.0.0.1", "127.0.0.2"]') -> int:
    return main(
        ["--config", str(file), "--instance", "p0", "--check", "--set", f"prefill.instances.0.nodes={nodes}", *arguments]
    )


@pytest.mark.parametrize("number", ["2", "-1"])
def test_a_node_that_the_instance_has_not(number: str, cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(cluster, "--node-rank", number) == 2
    assert f"error: node-rank={number}: the nodes of p0 are 0 ... 1" in capsys.readouterr().err


def test_every_node_plans_its_own_ranks(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(cluster) == 0
    driver = capsys.readouterr().err
    assert "node 0 of 2, 127.0.0.1: ranks 0 ... 1" in driver and "30006 ranks on further nodes" in driver
    assert "rank 1 (stage 0)" in driver and "rank 2 (" not in driver
    assert check(cluster, "--node-rank", "1") == 0
    further = capsys.readouterr().err
    assert "node 1 of 2, 127.0.0.2: ranks 2 ... 3" in further and "ports" not in further
    assert "rank 3 (stage 1)" in further and "rank 1 (" not in further


@pytest.mark.parametrize("number", [0, 1])
def test_memory_is_that_of_the_ranks_of_the_node(
    number: int, cluster: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    enough_for_two = 2 * (100 << 20)
    monkeypatch.setattr(preflight, "free_memory_bytes", lambda: enough_for_two)
    assert check(cluster, "--node-rank", str(number)) == 0
    assert check(cluster, nodes='["127.0.0.1"]') == 2
    assert "for its 4 ranks, 0.2 available" in capsys.readouterr().err
    monkeypatch.setattr(preflight, "free_memory_bytes", lambda: 10 << 20)
    assert check(cluster, "--node-rank", str(number)) == 2
    assert f"for its 2 ranks on node {number}, 0.0 available" in capsys.readouterr().err


def test_ports_are_the_drivers_alone(
    cluster: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "port_findings", lambda uses: [f"port {use.port} is taken" for use in uses])
    assert check(cluster, "--node-rank", "1") == 0
    assert check(cluster) == 2
    assert "error: port 30006 is taken" in capsys.readouterr().err


def test_too_few_cores(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(cluster, "--node-rank", "1", "--set", "hosts.cores_per_device=4096") == 2
    assert "error: hosts.cores_per_device=4096: 2 ranks a node need 8192 cores" in capsys.readouterr().err
