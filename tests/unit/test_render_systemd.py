"""Units: read back as systemd reads them, they start what the cluster consists of."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from longcat_pd.config.resolve import unresolved
from longcat_pd.config.services import nodes_of, services
from longcat_pd.render.main import main

HARD = {"A": 'a "q" \\ %h $HOME $(X) $$', "B": "two\nlines\tand a tab", "C": "", "D": "it's", "E": "100%"}


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """Two instances of two machines, and the checkpoint nowhere here."""
    (tmp_path / "cluster.yaml").write_text(
        yaml.safe_dump(
            {
                "model": {"path": "/weights/longcat", "served_name": "longcat"},
                "cluster_key_file": "/etc/longcat_pd/cluster.key",
                "hosts": {"path": "/srv/longcat", "user": "serving", "python": sys.executable},
                "prefill": {
                    "engine": {"block_size": 16, "max_num_batched_tokens": 64},
                    "parallel": {"pp_size": 2},
                    "instances": [{"name": "p0", "http_port": 30000, "nodes": ["10.0.0.1", "10.0.0.2"]}],
                },
                "decode": {
                    "engine": {"block_size": 16, "drain_timeout_s": 40.5, "compile_cache": "/srv/compiled"},
                    "parallel": {"kvp_size": 2, "attn_tp_size": 2},
                    "instances": [{"name": "d0", "http_port": 31000, "nodes": ["10.0.1.1", "10.0.1.2"]}],
                },
                "env": HARD,
            }
        )
    )
    return tmp_path / "cluster.yaml"


def rendered(file: Path, *arguments: str) -> dict[str, str]:
    folder = file.parent / "units"
    shutil.rmtree(folder, ignore_errors=True)
    assert main(["systemd", str(file), "--out", str(folder), *arguments]) == 0
    return {unit.name: unit.read_text() for unit in folder.iterdir()}


def values(unit: str, key: str) -> list[str]:
    return [line.partition("=")[2] for line in unit.splitlines() if line.startswith(f"{key}=")]


def words(line: str) -> list[str]:
    """Split and unescape as systemd.syntax(7) says: blanks end a word outside of double quotes, C escapes, ``%%``."""
    found: list[str] = []
    word, quoted, place = None, False, 0
    while place < len(line):
        here, both = line[place], line[place : place + 2]
        if here == " " and not quoted:
            found += [word] if word is not None else []
            word, place = None, place + 1
            continue
        word = word or ""
        if here == '"':
            quoted, place = not quoted, place + 1
        elif here == "\\":
            word, place = word + {"n": "\n", "t": "\t", "r": "\r"}.get(both[1], both[1]), place + 2
        elif here == "%":
            assert both == "%%", f"a specifier at {place} of {line}"
            word, place = f"{word}%", place + 2
        else:
            word, place = word + here, place + 1
    assert not quoted
    return [*found, *([word] if word is not None else [])]


def command(unit: str) -> list[str]:
    (line,) = values(unit, "ExecStart")
    assert "$" not in line.replace("$$", "")
    return [word.replace("$$", "$") for word in words(line)]


def environment(unit: str) -> dict[str, str]:
    pairs = [words(line) for line in values(unit, "Environment")]
    assert all(len(pair) == 1 for pair in pairs)
    return {name: value for (pair,) in pairs for name, _, value in [pair.partition("=")]}


@pytest.mark.parametrize("setup", [(), ("--set", "hosts.setup_files=[/opt/a.sh, /opt/b.sh]")], ids=["plain", "sourced"])
def test_units_start_the_processes_of_the_cluster(cluster: Path, setup: tuple[str, ...]) -> None:
    config = unresolved(cluster)
    shell = ["/bin/bash", "-c", 'source /opt/a.sh || exit 2; source /opt/b.sh || exit 2; exec "$0" "$@"'] if setup else []
    seen = []
    for node in nodes_of(config):
        units = rendered(cluster, "--node", node, *setup)
        units.pop("cluster.yaml")
        here = [service for service in services(config) if service.node == node]
        assert set(units) == {f"longcat-pd-{service.name}.service" for service in here}
        for service in here:
            unit = units[f"longcat-pd-{service.name}.service"]
            wanted = [*shell, sys.executable, *service.arguments, "--config", "/etc/longcat-pd/cluster.yaml"]
            assert command(unit) == wanted
            assert environment(unit) == {"HOME": "/var/cache/longcat-pd", **service.env}
            seen.append(service.name)
    assert seen == ["d0", "d0.1", "p0", "p0.1", "balancer"]


def test_without_a_node_it_is_the_balancer(cluster: Path, tmp_path: Path) -> None:
    units = rendered(cluster, "--set", "load_balancer.port=9000")
    assert set(units) == {"longcat-pd-balancer.service", "cluster.yaml"}
    (tmp_path / "there.yaml").write_text(units["cluster.yaml"])
    assert unresolved(tmp_path / "there.yaml") == unresolved(cluster, ["load_balancer.port=9000"])


def test_a_tree_is_absolute(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cluster.parent)
    unit = rendered(cluster, "--tree", ".", "--set", "hosts.python=''")["longcat-pd-balancer.service"]
    assert values(unit, "WorkingDirectory") == [str(cluster.parent)]
    assert command(unit)[0] == f"{cluster.parent}/.venv/bin/python"


def test_ends_and_restarts_follow_exit_statuses(cluster: Path) -> None:
    everything = {**rendered(cluster, "--node", "10.0.1.2"), **rendered(cluster, "--node", "10.0.0.2")}
    everything.pop("cluster.yaml")
    restarts = {name: values(unit, "Restart") for name, unit in everything.items()}
    assert restarts == {
        "longcat-pd-d0.1.service": ["always"],
        "longcat-pd-p0.1.service": ["always"],
        "longcat-pd-balancer.service": ["on-failure"],
    }
    for unit in everything.values():
        assert values(unit, "RestartPreventExitStatus") == ["2"] and values(unit, "SuccessExitStatus") == ["3"]
        assert values(unit, "TimeoutStopSec") == ["315"]  # prefill's 300 s, and what comes after a drain
        assert values(unit, "KillMode") == ["mixed"] and values(unit, "KillSignal") == ["SIGTERM"]
        assert values(unit, "User") == ["serving"] and values(unit, "WorkingDirectory") == ["/srv/longcat/current"]


def test_only_those_who_compile_write_to_the_compile_cache(cluster: Path) -> None:
    decode = rendered(cluster, "--node", "10.0.1.1")["longcat-pd-d0.service"]
    assert values(decode, "ReadWritePaths") == ["-/srv/compiled"]
    assert not values(rendered(cluster, "--node", "10.0.0.1")["longcat-pd-p0.service"], "ReadWritePaths")
    balancer = rendered(cluster)["longcat-pd-balancer.service"]
    assert values(balancer, "PrivateDevices") == ["yes"] and not values(decode, "PrivateDevices")
    for unit in (decode, balancer):
        assert values(unit, "NoNewPrivileges") == ["yes"] and values(unit, "ProtectSystem") == ["strict"]


def test_a_machine_of_another_cluster_is_refused(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["systemd", str(cluster), "--node", "10.9.9.9"]) == 2
    assert "--node 10.9.9.9: nothing of this cluster runs there" in capsys.readouterr().err


@pytest.mark.parametrize("form", [("systemd",), ("k8s", "--image", "x:1")], ids=["systemd", "k8s"])
def test_one_process_alone_is_not_rendered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: tuple[str, ...]
) -> None:
    file = tmp_path / "alone.yaml"
    file.write_text("{model: {path: /x}, standalone: {instances: [{name: s, http_port: 8081}]}}")
    assert main([*form, str(file)]) == 2
    assert capsys.readouterr().err.startswith("error: standalone: ")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_has_nothing_against_them(cluster: Path) -> None:
    for node in ("10.0.1.1", "10.0.1.2", "10.0.0.1", "10.0.0.2"):
        rendered(cluster, "--node", node)
        verify = ["systemd-analyze", "verify", *map(str, (cluster.parent / "units").glob("*.service"))]
        done = subprocess.run(verify, capture_output=True, text=True, timeout=60, check=False)
        ours = [line for line in done.stderr.splitlines() if "longcat" in line]
        assert (done.returncode, ours) == (0, [])
