"""Commands on other machines: what ssh is told, and what its failures mean. A script takes the place of ssh."""

from __future__ import annotations

import itertools
import os
import shlex
from pathlib import Path

import pytest

from longcat_pd.cluster.shell import LocalShell, SshShell, Unreachable, is_this_machine, reason_of, shell_of
from longcat_pd.config.schema import HostsConfig
from longcat_pd.errors import ConfigError

HOSTS = HostsConfig(user="ops", port=2222, identity_file="/keys/a b", known_hosts_file="/keys/50%", connect_timeout_s=3)
NODE = "10.0.0.2"

# What ssh really said, version 9.2, and the words that an operator needs.
FAULTS = {
    "unknown host key": (
        "No ED25519 host key is known for [10.0.0.2]:2222 and you have requested strict checking.\r\n"
        "Host key verification failed.\r\n",
        "the host key of 10.0.0.2 is not in /keys/50%: ask for it over a safe way and add it; nothing is accepted blindly",
    ),
    "changed host key": (
        "@@@@@@@@@@@\n@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n@@@@@@@@@@@\n"
        "Host key for [10.0.0.2]:2222 has changed and you have requested strict checking.\nHost key verification failed.\n",
        "its host key is not the one in /keys/50%: this may be another machine than it claims to be",
    ),
    "wrong key": (
        "ops@10.0.0.2: Permission denied (publickey,password,keyboard-interactive).\n",
        "permission denied: /keys/a b does not open ops; add its public half to authorized_keys there",
    ),
    "no key": (
        "no such identity: /keys/a b: No such file or directory\nops@10.0.0.2: Permission denied (publickey).\n",
        "permission denied: hosts.identity_file=/keys/a b cannot be read",
    ),
    "open key": (
        "Permissions 0644 for 'uk' too open.\nLoad key \"uk\": bad permissions\nops@h: Permission denied (publickey).\n",
        "permission denied: ssh ignores the key /keys/a b, which others can read; chmod 600 it",
    ),
    "refused": (
        "ssh: connect to host 10.0.0.2 port 2222: Connection refused\n",
        "connection refused on port 2222: no sshd listens there",
    ),
    "no route": ("ssh: connect to host 10.0.0.2 port 2222: No route to host\n", "no route to it"),
    "timed out": (
        "ssh: connect to host 10.0.0.2 port 2222: Connection timed out\n",
        "no answer on port 2222 within 3 s: the machine or its link is down",
    ),
    "silent sshd": ("Connection timed out during banner exchange\n", "no answer on port 2222 within 3 s"),
    "dead link": ("Timeout, server 10.0.0.2 not responding.\n", "the link is dead: it has not answered for 15 s"),
    "name": ("ssh: Could not resolve hostname x: Name or service not known\n", "its name cannot be resolved"),
    "closed": ("Connection to 10.0.0.2 closed by remote host.\n", "the connection was closed by the other side"),
    "else": ("command-line: line 0: Bad configuration option: x\n", "ssh failed: command-line: line 0: Bad configuration"),
    "nothing": ("", "ssh failed without a word: what it ran there was killed"),
}


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its words and its status are files beside it; it writes down its arguments, one a line."""
    script = tmp_path / "ssh"
    here = shlex.quote(str(tmp_path))
    script.write_text(
        f'#!/bin/bash\nprintf "%s\\n" "$@" >{here}/arguments\ncat {here}/said >&2\n'
        f'[[ -s {here}/status ]] && exit "$(cat {here}/status)"\nexec bash -c "${{@: -1}}"\n'
    )
    script.chmod(0o755)
    (tmp_path / "said").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize("name", FAULTS)
def test_each_failure_of_the_link_is_told_apart(ssh: Path, name: str) -> None:
    said, words = FAULTS[name]
    (ssh / "said").write_text(said)
    (ssh / "status").write_text("255")
    with pytest.raises(Unreachable) as raised:
        SshShell(node=NODE, hosts=HOSTS).run(["true"], timeout_s=20.0)
    assert raised.value.reason.startswith(words)
    assert (raised.value.node, raised.value.message) == (NODE, f"{NODE}: {raised.value.reason}")
    assert isinstance(raised.value, ConfigError), "refused at the start: exit status 2"


def test_a_session_that_ends_says_whether_it_was_the_link(ssh: Path) -> None:
    shell = SshShell(node=NODE, hosts=HOSTS)
    fault = shell.fault(255, b"Timeout, server 10.0.0.2 not responding.\n")
    assert fault is not None
    assert "the link is dead" in fault.reason
    assert shell.fault(1, b"Connection refused") is None, "the command's own words and status"
    assert LocalShell(node="127.0.0.1").fault(255, b"") is None


def test_ssh_asks_nothing_and_accepts_nothing(ssh: Path) -> None:
    SshShell(node=NODE, hosts=HOSTS).run(["true"], timeout_s=20.0)
    arguments = (ssh / "arguments").read_text().splitlines()
    options = {text for flag, text in itertools.pairwise(arguments) if flag == "-o"}
    assert options >= {
        "BatchMode=yes",
        "StrictHostKeyChecking=yes",
        "PasswordAuthentication=no",
        "PreferredAuthentications=publickey",
        "ConnectTimeout=3",
        "ServerAliveInterval=5",
        "ServerAliveCountMax=3",
        'IdentityFile="/keys/a b"',
        "IdentitiesOnly=yes",
        'UserKnownHostsFile="/keys/50%%"',
        "GlobalKnownHostsFile=/dev/null",
    }
    assert arguments[arguments.index("-p") + 1] == "2222"
    assert arguments[arguments.index("-l") + 1] == "ops"
    assert arguments[-3:] == ["--", NODE, "true"], "an address cannot be an option"


def test_without_files_the_configuration_of_ssh_decides(ssh: Path) -> None:
    SshShell(node=NODE, hosts=HostsConfig()).run(["true"], timeout_s=20.0)
    said = (ssh / "arguments").read_text()
    assert "KnownHostsFile" not in said
    assert "IdentityFile" not in said
    assert "-l\n" not in said
    assert "StrictHostKeyChecking=yes" in said


def test_arguments_arrive_as_they_are(ssh: Path) -> None:
    hard = ["a b", "$HOME", "'q'", ";exit 3", "", "*", "\n"]
    code = "import sys; sys.stdout.write(repr(sys.argv[1:])); sys.stdout.write(sys.stdin.read()); sys.exit(4)"
    for shell in (SshShell(node=NODE, hosts=HOSTS), LocalShell(node="127.0.0.1")):
        done = shell.run(["python3", "-c", code, *hard], stdin=b" in", timeout_s=20.0)
        assert (done.status, done.stdout) == (4, f"{hard!r} in".encode())


def test_waiting_has_an_end(ssh: Path) -> None:
    for shell in (SshShell(node=NODE, hosts=HOSTS), LocalShell(node=NODE)):
        with pytest.raises(Unreachable, match=r"10\.0\.0\.2: did not answer within 0\.2 s"):
            shell.run(["sleep", "30"], timeout_s=0.2)


def test_a_session_streams_both_ways(ssh: Path) -> None:
    for shell in (SshShell(node=NODE, hosts=HOSTS), LocalShell(node=NODE)):
        with shell.start(["sh", "-c", "read a; read b; echo $b$a"], stdin=b"1\n") as session:
            assert session.stdin is not None
            assert session.stdout is not None
            session.stdin.write(b"2\n")
            session.stdin.flush()
            assert session.stdout.readline() == b"21\n"
        assert session.returncode == 0


def test_a_program_that_is_not_there_is_a_status() -> None:
    done = LocalShell(node="127.0.0.1").run(["/no/such/program"], timeout_s=20.0)
    assert (done.status, b"no such program" in done.stderr) == (127, True)


def test_this_machine_is_known_by_any_of_its_addresses() -> None:
    assert [is_this_machine(node) for node in ("127.0.0.1", "127.3.2.1", "localhost", "0.0.0.0")] == [True] * 4
    assert [is_this_machine(node) for node in ("192.0.2.1", "no-such-name.invalid")] == [False] * 2
    assert shell_of("127.0.0.9", HOSTS).is_here
    assert not shell_of("192.0.2.1", HOSTS).is_here


def test_who_is_let_in_is_told_without_names_too() -> None:
    reason = reason_of("Permission denied (publickey).", NODE, hosts=HostsConfig())
    assert reason == (
        "permission denied: no key of ssh's own opens this user; set hosts.identity_file, or add a public key to "
        "authorized_keys there"
    )
