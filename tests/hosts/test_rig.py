"""The rig itself: hosts are apart where machines are, and nothing of them stays."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Sized
from pathlib import Path

import pytest

from tests.hosts.rig import SSH_PORT, Hosts, missing


def ssh(hosts: Hosts, number: int, command: str) -> subprocess.CompletedProcess[str]:
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": "5",
        "IdentitiesOnly": "yes",
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": str(hosts.known_hosts),
    }
    given = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
    target = ("-p", str(SSH_PORT), "-i", str(hosts.identity), f"root@{hosts.address(number)}")
    return subprocess.run(
        ["ssh", "-F", "none", *given, *target, command], capture_output=True, text=True, check=False, timeout=60
    )


def left(token: str) -> list[str]:
    """What still names the hosts: interfaces, mounts, processes."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    shown = [line for line in (links + Path("/proc/mounts").read_text()).splitlines() if f"lcpd{token}" in line]
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            shown += [command] if f"lcpd-{token}" in command else []
    return shown


def is_soon(count: int, left_over: Callable[[], Sized]) -> bool:
    """Whether so many are left, once what comes and goes by itself has gone."""
    until = time.monotonic() + 30.0
    while len(left_over()) != count:
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_hosts_are_apart_in_disk_processes_and_name(hosts: Hosts) -> None:
    told = [ssh(hosts, number, f"hostname; echo {number} >{hosts.disk}/who; cat {hosts.disk}/who") for number in range(4)]
    assert [done.returncode for done in told] == [0] * 4, told[0].stderr
    assert len({done.stdout.split()[0] for done in told}) == 4
    assert [hosts.exec(number, f"cat {hosts.disk}/who").strip() for number in range(4)] == ["0", "1", "2", "3"]
    assert not (hosts.disk / "who").exists(), "the disk of a host is not this machine's"
    assert len(hosts.exec(0, "ls -d /proc/[0-9]*").split()) < 8, "its processes are its own"


def test_orphans_are_reaped(hosts: Hosts) -> None:
    ssh(hosts, 0, "setsid sh -c 'sleep 0.2 & exit 0' >/dev/null 2>&1 </dev/null &")
    hosts.exec(0, "sleep 0.5")
    shown = "cat /proc/[0-9]*/stat 2>/dev/null; true"
    assert is_soon(0, lambda: [line for line in hosts.exec(0, shown).splitlines() if " Z " in line or "(sleep)" in line])


def test_a_pulled_cable_a_cut_power_and_back(hosts: Hosts) -> None:
    hosts.exec(1, f"echo kept >{hosts.disk}/file; setsid sleep 1000 >/dev/null 2>&1 </dev/null & ")
    hosts.link(1, False)
    assert ssh(hosts, 1, "true").returncode == 255
    hosts.link(1, True)
    assert ssh(hosts, 1, "true").returncode == 0
    hosts.kill(1)
    assert ssh(hosts, 1, "true").returncode == 255
    hosts.revive(1)
    assert ssh(hosts, 1, f"cat {hosts.disk}/file").stdout == "kept\n"
    assert "sleep" not in hosts.exec(1, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; true")


def test_nothing_stays_of_closed_hosts_nor_of_those_whose_maker_was_killed(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    with pytest.raises(ZeroDivisionError), Hosts(tmp_path, count=1) as made:
        token = made.token
        assert is_soon(4, lambda: left(token)), "an interface, a keeper, an sshd and its maker"
        raise ZeroDivisionError
    assert is_soon(0, lambda: left(token))
    script = (
        "import sys; from pathlib import Path; from tests.hosts.rig import Hosts\n"
        "made = Hosts(Path(sys.argv[1]), count=1); made.up(); print(made.token, flush=True); sys.stdin.read()"
    )
    other = tmp_path / "other"
    other.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", script, str(other)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        token = maker.stdout.readline().strip()
        assert is_soon(4, lambda: left(token))
        maker.kill()
    assert is_soon(0, lambda: left(token))
