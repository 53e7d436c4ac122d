"""What an agent has against a start before anything of the product is asked."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from longcat_pd.cluster import agent_checks
from longcat_pd.cluster.jobs import Job
from longcat_pd.cluster.record import RunFolder


@pytest.mark.parametrize(
    ("found", "is_refused"),
    [(["127.0.1.1"], True), (["127.0.1.1", "::1"], True), (["127.0.1.1", "10.0.0.1"], False), ([], False)],
)
def test_a_name_that_is_another_machine_to_others(
    found: list[str], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian names a machine 127.0.1.1 in its own /etc/hosts."""

    def look_up(host: str, port: None) -> list[tuple[object, ...]]:
        assert host == "node1" and port is None
        if not found:
            raise socket.gaierror("unknown")
        return [(None, None, None, "", (address, 0)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    lines = list(agent_checks.address_findings(["node1"]))
    assert bool(lines) == is_refused
    if is_refused:
        assert lines == [
            f"nodes: node1 is {', '.join(found)} here, which no other machine reaches; mend /etc/hosts, or name its address"
        ]


def test_an_address_is_what_it_says() -> None:
    assert list(agent_checks.address_findings(["127.0.0.1"])) == [], "whether it may be used is config's to say"


def test_a_configuration_that_cannot_be_written(tmp_path: Path) -> None:
    """As on a full disk; here its folder is gone."""
    folder = RunFolder(tmp_path / "gone")
    job = Job(config="c.yaml", text="{}", folder=str(folder.path), logs="", url="", nodes=(), services=(), ports=())
    assert list(agent_checks.findings(job, folder)) == [
        f"{folder.path}/cluster.yaml: cannot be written: No such file or directory"
    ]


def test_logs_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that is mounted to be read."""
    logs = tmp_path / "logs"
    assert list(agent_checks.folder_findings(str(logs))) == [] and logs.is_dir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert list(agent_checks.folder_findings(str(logs))) == [f"log_dir={logs}: nothing can be written there"]
    (tmp_path / "file").write_text("")
    (line,) = agent_checks.folder_findings(str(tmp_path / "file" / "logs"))
    assert line.startswith(f"log_dir={tmp_path}/file/logs: cannot be made: ")
