"""Four machines on one: network, mount and process namespaces, each with a disk and an sshd of its own.

Everything hangs on processes that end with the one that made them, so that nothing can stay behind: the namespaces, the
bridge between them (which has a namespace too), the disks (in memory) and the services that were started on a machine. Of
this machine itself only one interface is made, the controller's end, which goes with the bridge. No other interface, no
route but that of its own subnet, no rule of a firewall.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

END_S, UP_S = 60.0, 60.0
SSH_PORT = 22
TOOLS = ("ip", "mount", "nsenter", "rsync", "setpriv", "ssh", "ssh-keygen", "unshare")
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL")

HOST = """
set -e
hostname "$1"
mount -t tmpfs -o "size=$2m,mode=755" tmpfs "$3"
mkdir "$3/tools"
mount -t tmpfs -o size=1m,mode=755 tmpfs /run
mkdir -m 755 /run/sshd
[ ! -e "$HOME/.bashrc" ] || mount --bind /dev/null "$HOME/.bashrc"
ip link set lo up
echo made
read -r _ || exit 0
"""
SWITCH = """
set -e
ip link add name bridge type bridge
ip link set bridge up
echo made
read -r _ || exit 0
"""


def missing() -> str:
    """Why there can be no hosts here; "" where there can."""
    if os.geteuid() != 0:
        return "hosts of namespaces need root"
    lacking = [name for name in TOOLS if shutil.which(name) is None] + ([] if SSHD else ["sshd"])
    if lacking:
        return f"hosts of namespaces need {', '.join(lacking)}"
    if not _disks():
        return "hosts of namespaces need a folder for their disks: none of /srv, /mnt, /media can be hidden from them"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "ip", "link", "add", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if tried.returncode == 0 else f"no namespaces with a bridge can be made here: {tried.stderr.strip()}"


def _disks() -> list[Path]:
    """Folders that a disk can be laid over without hiding what the tests run from."""
    used = [Path(place).resolve() for place in (__file__, sys.executable, sys.prefix, sys.base_prefix, Path.cwd())]
    places = [Path(name) for name in ("/srv", "/mnt", "/media")]
    return [place for place in places if place.is_dir() and not any(place in path.parents for path in used)]


class Hosts:
    """``count`` machines behind one switch, numbered from 0; the controller is the machine of the test itself.

    ``disk``: the folder that each has for itself, in memory and ``disk_mib`` large; it outlives a power cut. ``config`` is
    for ssh: the user, the key and the host keys. A folder ``tools`` of the disk comes first on PATH of a login.
    """

    def __init__(self, folder: Path, *, count: int = 4, disk_mib: int = 96) -> None:
        self.folder, self.count, self.disk_mib = folder, count, disk_mib
        self.disk = _disks()[0]
        self.identity, self.known_hosts = folder / "client", folder / "known_hosts"
        self.token = f"{random.randrange(16**6):06x}"
        self._net = ""
        self._switch: subprocess.Popen[bytes] | None = None
        self._keepers: list[subprocess.Popen[bytes]] = []
        self._lives: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Hosts:
        try:
            self.up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def up(self) -> None:
        """Make the switch, the controller's end and every host; all answer to ssh afterwards."""
        self._switch = _keeper(SWITCH)
        self._net = self._controller_link()
        _keygen(self.identity, "client")
        for number in range(self.count):
            name = f"lcpd-{self.token}-{number}"
            self._keepers.append(_keeper(HOST, name, str(self.disk_mib), str(self.disk)))
            _keygen(self._host_key(number), name)
            self._connect(number)
        self.write_known_hosts()
        for number in range(self.count):
            self.revive(number)

    def address(self, number: int) -> str:
        """Of a host; -1: of the controller."""
        return f"{self._net}.{number + 10}" if number >= 0 else f"{self._net}.1"

    def link(self, number: int, is_up: bool) -> None:
        """Plug or unplug the cable of a host at the switch: nothing passes, and neither side is told."""
        assert self._switch is not None
        _in(self._switch, "ip", "link", "set", f"port{number}", "up" if is_up else "down")

    def kill(self, number: int) -> None:
        """Cut its power: everything on it is gone at once, and no peer hears a word of it."""
        self.link(number, False)
        _end(self._lives.pop(number))

    def revive(self, number: int) -> None:
        """Start a host that is not running, with the disk and the keys that it had.

        The kernel may take a moment to end the life before, whose sshd still has the port: then the new one ends at once.
        """
        assert number not in self._lives
        self.link(number, True)
        deadline = time.monotonic() + UP_S
        life = self._sshd_life(number)
        while not _has_sshd(self.address(number)) or life.poll() is not None:
            if time.monotonic() > deadline:
                _end(life)
                raise AssertionError(f"no sshd at {self.address(number)} within {UP_S:.0f} s; see {self._log(number)}")
            if life.poll() is not None:
                life = self._sshd_life(number)
            time.sleep(0.02)
        self._lives[number] = life

    def _sshd_life(self, number: int) -> subprocess.Popen[bytes]:
        unshare = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child=KILL")
        command = [*ENDS_WITH_US, *_enter(self._keepers[number]), *unshare, *self._sshd(number)]
        with self._log(number).open("ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _log(self, number: int) -> Path:
        return self.folder / f"sshd.{number}.log"

    def exec(self, number: int, command: str, *, check: bool = True) -> str:
        """What a shell command says that runs on a host, behind the back of ssh."""
        life = self._lives[number]
        enter = ("nsenter", "--target", str(_child_of(life.pid)), "--net", "--mount", "--uts", "--pid")
        done = subprocess.run(
            [*enter, "env", f"PATH={self._path}", "sh", "-c", command],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert not check or done.returncode == 0, f"host {number}: {command}: {done.returncode} {done.stderr}"
        return done.stdout

    def listen(self, number: int, port: int) -> int:
        """A process of a host that has this port, as long as the test lasts; its id there."""
        code = f"import socket, time; s = socket.create_server(('{self.address(number)}', {port})); time.sleep(3600)"
        pid = self.exec(number, f'setsid {sys.executable} -c "{code}" >/dev/null 2>&1 </dev/null & echo $!').strip()
        deadline = time.monotonic() + UP_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection((self.address(number), port), timeout=1.0):
                return int(pid)
            assert time.monotonic() < deadline, f"nobody listens at {self.address(number)}:{port}"
            time.sleep(0.02)

    def write(self, number: int, path: str | Path, text: str, *, mode: int = 0o755) -> None:
        """A file of a host's disk; its folders are made."""
        folder = Path(path).parent
        life = self._lives[number]
        enter = ("nsenter", "--target", str(_child_of(life.pid)), "--mount")
        script = f"mkdir -p '{folder}' && cat >'{path}' && chmod {mode:o} '{path}'"
        subprocess.run([*enter, "sh", "-c", script], input=text.encode(), check=True, timeout=120)

    def new_host_key(self, number: int) -> None:
        """As after a machine was set up anew: the same address, another key. It is restarted."""
        for file in (self._host_key(number), self._host_key(number).with_suffix(".pub")):
            file.unlink()
        _keygen(self._host_key(number), "another")
        self.kill(number)
        self.revive(number)

    def write_known_hosts(self, *, without: Sequence[int] = ()) -> None:
        """The keys that the controller knows, as the hosts have them now."""
        keys = {number: self._host_key(number).with_suffix(".pub").read_text() for number in range(self.count)}
        lines = [f"{self.address(number)} {key}" for number, key in keys.items() if number not in without]
        self.known_hosts.write_text("".join(lines), encoding="utf-8")

    def restore(self, *, keeps_disks: bool = False) -> None:
        """Hosts as at the beginning: running sshd alone, connected, known, with nothing on their disks."""
        self.write_known_hosts()
        for number in range(self.count):
            if number in self._lives and self.processes(number):
                self.kill(number)
            if number not in self._lives:
                self.revive(number)
            self.link(number, True)
            if keeps_disks:
                continue
            self.exec(number, f"find {self.disk} -mindepth 1 -delete; mkdir {self.disk}/tools")

    def close(self) -> None:
        """End everything. Nothing stays; more than once is fine."""
        lives, self._lives = list(self._lives.values()), {}
        keepers, self._keepers = self._keepers, []
        for process in (*lives, *keepers, *([self._switch] if self._switch else [])):
            _end(process)
        self._switch = None
        if self._net:  # goes with its other end, whose namespace the kernel clears away in its own time
            subprocess.run(["ip", "link", "delete", f"lcpd{self.token}"], capture_output=True, check=False)

    def processes(self, number: int) -> list[str]:
        """What runs on a host besides sshd."""
        names = self.exec(number, "cat /proc/[0-9]*/comm 2>/dev/null; true").split()
        return [name for name in names if name not in ("sshd", "sh", "cat")]

    @property
    def _path(self) -> str:
        return f"{self.disk}/tools:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

    def _host_key(self, number: int) -> Path:
        return self.folder / f"lcpd-{self.token}-{number}"

    def _sshd(self, number: int) -> list[str]:
        authorized = self.folder / "client.pub"
        options = {
            "AuthorizedKeysFile": authorized,
            "AuthenticationMethods": "publickey",
            "KexAlgorithms": "curve25519-sha256",  # quick
            "HostKey": self._host_key(number),
            "LogLevel": "VERBOSE",
            "MaxStartups": "100:30:200",
            "PasswordAuthentication": "no",
            "PermitRootLogin": "prohibit-password",
            "PidFile": "none",
            "SetEnv": f"PATH={self._path}",
            "StrictModes": "no",
            "UseDNS": "no",
            "UsePAM": "no",
        }
        listen = f"ListenAddress={self.address(number)}:{SSH_PORT}"
        penalties = ["-o", "PerSourcePenalties=no"] if _has_penalties() else []  # every login comes from one address here
        assert SSHD is not None
        given = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
        return [SSHD, "-D", "-e", "-f", "/dev/null", "-o", listen, *given, *penalties]

    def _controller_link(self) -> str:
        """Connect this machine to the switch under a subnet that it does not have yet; returns its first three numbers."""
        assert self._switch is not None
        name = f"lcpd{self.token}"
        _run(
            "ip", "link", "add", "name", name, "type", "veth", "peer", "name", "controller", "netns", str(self._switch.pid)
        )
        _in(self._switch, "ip", "link", "set", "controller", "master", "bridge", "up")
        _run("ip", "link", "set", name, "up")
        for third in random.sample(range(1, 255), 20):
            net = f"10.213.{third}"
            if f" {net}." in _run("ip", "-4", "-o", "address", "show"):
                continue
            _run("ip", "address", "add", f"{net}.1/24", "dev", name)
            if _run("ip", "-4", "-o", "address", "show").count(f" {net}.1/") == 1:
                return net
            _run("ip", "address", "del", f"{net}.1/24", "dev", name)  # another run took it at the same moment
        raise AssertionError("no free subnet in 10.213.0.0/16")

    def _connect(self, number: int) -> None:
        assert self._switch is not None
        keeper, port = self._keepers[number], f"port{number}"
        peer = ("peer", "name", "fabric0", "netns", str(keeper.pid))
        _in(self._switch, "ip", "link", "add", "name", port, "type", "veth", *peer)
        _in(self._switch, "ip", "link", "set", port, "master", "bridge")
        _in(keeper, "ip", "address", "add", f"{self.address(number)}/24", "dev", "fabric0")
        _in(keeper, "ip", "link", "set", "fabric0", "up")


def _keeper(script: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A process that holds namespaces until its standard input closes, at the latest when this process ends."""
    unshare = ("unshare", "--net", "--mount", "--uts")
    process = subprocess.Popen(
        [*ENDS_WITH_US, *unshare, "sh", "-c", script, "sh", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    if process.stdout.readline() != b"made\n":
        complaint = process.stderr.read().decode()
        _end(process)
        raise AssertionError(f"a namespace could not be made: {complaint}")
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that was started here, which takes its children along, and wait until it is gone."""
    process.kill()
    process.wait(END_S)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _enter(keeper: subprocess.Popen[bytes]) -> tuple[str, ...]:
    return ("nsenter", "--target", str(keeper.pid), "--net", "--mount", "--uts")


def _in(keeper: subprocess.Popen[bytes], *command: str) -> str:
    return _run(*_enter(keeper), *command)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{' '.join(command)}: {done.returncode} {done.stderr}"
    return done.stdout


def _child_of(pid: int) -> int:
    """The first process of a namespace, as this machine numbers it."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _keygen(file: Path, comment: str) -> None:
    _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(file))


def _has_penalties() -> bool:
    """Whether this sshd would shut out an address after some refused logins (OpenSSH 9.8)."""
    assert SSHD is not None
    known = subprocess.run(
        [SSHD, "-T", "-f", "/dev/null", "-o", "PerSourcePenalties=no"], capture_output=True, text=True, check=False
    )
    return "Bad configuration option" not in known.stderr


def _has_sshd(address: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, SSH_PORT), timeout=1.0) as probe:
        probe.settimeout(1.0)
        return probe.recv(4) == b"SSH-"
    return False
