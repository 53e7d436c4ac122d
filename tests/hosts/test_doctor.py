"""`run_pd.sh doctor` over four hosts: what is wrong with one of them is a row with its name, and nothing else is bad."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from longcat_pd.cluster import doctor
from longcat_pd.cluster.code import distribute
from tests.hosts.clusters import cluster_tree, place, write_cluster, write_code
from tests.hosts.rig import Hosts
from tests.parity.conftest import MakeCheckpoint

MAPPING = """NPU ID                         Chip ID                        Chip Logic ID                  Chip Name
0                              0                              0                              Ascend 910B3
0                              1                              -                              Mcu
1                              0                              1                              Ascend 910B3
"""


class Look:
    """What a doctor said, and with which exit status."""

    def __init__(self, status: int, lines: list[str]) -> None:
        self.status, self.lines = status, lines

    def bad(self, level: str = "bad") -> list[str]:
        return [" ".join(line.split()[1:]) for line in self.lines if line.startswith(level)]


Doctor = Callable[..., Look]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_code(tmp_path / "tree")


@pytest.fixture
def look(hosts: Hosts, root: Path, tiny: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """look(overrides …) after the tree and a checkpoint have come to every host."""
    tree = cluster_tree(hosts, model=hosts.disk / "model")
    file = write_cluster(tmp_path / "cluster.yaml", tree)
    assert distribute(root, file, overrides=()) == 0
    for number in range(4):
        hosts.exec(number, f"cp -r {tiny('2.0')} {hosts.disk}/model")
    capsys.readouterr()

    def run(*overrides: str) -> Look:
        status = doctor.main(argparse.Namespace(root=root, config=file, overrides=list(overrides)))
        return Look(status, capsys.readouterr().out.splitlines())

    return run


def test_hosts_that_are_as_they_should_be(hosts: Hosts, root: Path, look: Doctor) -> None:
    seen = look()
    assert seen.status == 0 and seen.bad() == []
    text = "\n".join(seen.lines)
    for number in range(4):
        rows = [line.split()[2:] for line in seen.lines if line.split()[1] == hosts.address(number)]
        assert {row[0] for row in rows} >= {"reached", "code", "ports", "interface", "memory", "clock", "weights", "python"}
        assert ["interface", "fabric0,", "MTU", "1500"] in rows
    assert "release " in text and "cards" not in text, "a cluster of CPU is not asked for its cards"


def test_what_is_wrong_with_a_host_is_a_row_of_it(hosts: Hosts, root: Path, look: Doctor) -> None:
    hosts.listen(2, 30001)
    shards = hosts.exec(0, f"ls {hosts.disk}/model | grep safetensors$").split()
    hosts.exec(0, f"rm {hosts.disk}/model/{shards[0]}")
    hosts.exec(1, f"truncate -s -7 {hosts.disk}/model/{shards[0]}")
    hosts.exec(1, f"rm {place(hosts)}/current; ln -s releases/0123 {place(hosts)}/current")
    hosts.write(3, hosts.disk / "tools" / "date", "#!/bin/sh\necho 1000000000.5\n")
    hosts.exec(3, f"echo ' ' >>{hosts.disk}/model/config.json")
    logind = "#!/bin/sh\nprintf 'KillUserProcesses=yes\\nKillOnlyUsers=\\nKillExcludeUsers=%s\\n'"
    hosts.write(0, hosts.disk / "tools" / "loginctl", f"{logind} nobody\n")
    hosts.write(1, hosts.disk / "tools" / "loginctl", f"{logind} root\n")
    seen = look()
    assert seen.status == 1
    bad = seen.bad()
    assert any(f"{hosts.address(2)} ports 30001 (p0 control records) is taken by pid" in row for row in bad)
    assert f"{hosts.address(0)} weights {shards[0]}: No such file or directory" in bad
    assert any(row.startswith(f"{hosts.address(1)} weights {shards[0]}: ") and "its header says" in row for row in bad)
    assert any(row.startswith(f"{hosts.address(1)} code release 0123, but the tree here is") for row in bad)
    assert any(row.startswith("all nodes weights") for row in bad)
    assert any(row.startswith(f"{hosts.address(0)} logout logind ends services") for row in bad)
    assert len(bad) == 6, bad
    assert any(row.startswith(f"{hosts.address(3)} clock") and "behind" in row for row in seen.bad("warn"))


def test_keys_that_are_missing_empty_open_or_others(hosts: Hosts, look: Doctor) -> None:
    file, keys = hosts.disk / "cluster.key", [None, "\n", "one\n", " another\n"]
    for number, (text, mode) in enumerate(zip(keys, (0o400, 0o400, 0o640, 0o600), strict=True)):
        if text is not None:
            hosts.write(number, file, text, mode=mode)
    seen = look(f"cluster_key_file={file}")
    bad = seen.bad()
    assert f"{hosts.address(0)} key {file}: No such file or directory" in bad
    assert f"{hosts.address(1)} key {file} holds no key" in bad
    assert f"{hosts.address(2)} key others on that machine can use it, mode 0640: chmod 0400" in bad
    assert any(row.startswith("all nodes key ") and " on 1, but " in row for row in bad)
    assert len(bad) == 4, bad
    assert not any("another" in line for line in seen.lines), "a key is told"
    for number in range(4):
        hosts.write(number, file, "one\n" + "two\n" * number, mode=0o400)
    assert look(f"cluster_key_file={file}").bad() == []


def test_ports_of_the_cluster_itself_are_no_fault(hosts: Hosts, look: Doctor) -> None:
    pid = hosts.listen(2, 30001)
    record = f'{{"processes": [{{"pid": {pid}}}]}}'
    hosts.write(2, f"{place(hosts)}/run/another/state.json", record)
    assert [row.split(" by pid ")[0] for row in look().bad()] == [
        f"{hosts.address(2)} ports 30001 (p0 control records) is taken"
    ]
    hosts.write(2, f"{place(hosts)}/run/cluster/state.json", record)
    seen = look()
    assert seen.bad() == []
    assert any("1 in use by this cluster, the others free" in line for line in seen.lines)


def test_a_host_that_is_not_reached_does_not_hide_the_others(hosts: Hosts, look: Doctor) -> None:
    hosts.write_known_hosts(without=[0])
    hosts.link(1, False)
    try:
        seen = look()
    finally:
        hosts.link(1, True)
    assert seen.status == 1
    bad = seen.bad()
    assert len(bad) == 2
    assert f"{hosts.address(0)} reached the host key of {hosts.address(0)} is not in" in bad[0]
    assert f"{hosts.address(1)} reached" in bad[1]
    assert sum("by ssh, its host key is known" in line for line in seen.lines) == 2


def test_cards_and_their_network(hosts: Hosts, look: Doctor) -> None:
    table = "| 0     910B3               | OK            | 98.2        36                0    / 0             |"
    for number in range(4):
        mapping = MAPPING if number != 3 else "\n".join(MAPPING.splitlines()[:3])
        npu_smi = f'#!/bin/sh\ncase "$*" in *-m*) echo "{mapping}";; *) echo "{table}";; esac\n'
        hosts.write(number, hosts.disk / "tools" / "npu-smi", npu_smi)
        link = "DOWN" if number == 1 else "UP"
        health = "well, who knows" if number == 2 else "net health status: Success"
        hccn = f'#!/bin/sh\ncase "$*" in *-link*) echo "link status: {link}";; *) echo "{health}";; esac\n'
        hosts.write(number, hosts.disk / "tools" / "hccn_tool", hccn)
        file = f"{hosts.disk}/cann/x-linux/ascend_toolkit_install.info"
        hosts.write(number, file, f"package_name=x\nversion=8.{1 if number else 0}.0\n", mode=0o644)
    hosts.write(0, hosts.disk / "set_env.sh", f"export ASCEND_TOOLKIT_HOME={hosts.disk}/cann\n")
    for number in range(1, 4):
        hosts.write(number, hosts.disk / "set_env.sh", f"export ASCEND_TOOLKIT_HOME={hosts.disk}/cann\n")
    npu = [
        "device=npu",
        "devices_per_node=2",
        "decode.parallel.dp_size=2",
        "prefill.parallel.cp_size=2",
        "decode.engine.num_blocks=8",
        "prefill.engine.num_blocks=8",
    ]
    seen = look(*npu, f"hosts.setup_files=[{hosts.disk}/set_env.sh]")
    bad, warned = seen.bad(), seen.bad("warn")
    assert f"{hosts.address(3)} cards 1 of 2" in bad
    assert f"{hosts.address(1)} device links 0 of 2 UP: device 0 DOWN; device 1 DOWN" in bad
    assert any(
        row.startswith(f"{hosts.address(2)} device network not understood: device 0 'well, who knows'") for row in warned
    )
    assert f"all nodes toolkit 8.1.0 on 3, but {hosts.address(0)}: 8.0.0" in bad
    assert sum("cards 2 of 2" in " ".join(line.split()) for line in seen.lines) == 3
