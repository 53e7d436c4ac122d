"""Commands on the machines of a cluster: as a child process where the machine is this one, else over ssh.

Owns how a machine is reached and what it means when it is not. Keys only, host keys checked and never accepted blindly,
no password and no question. Knows neither services nor verbs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import selectors
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from longcat_pd.config.schema import HostsConfig
from longcat_pd.errors import ConfigError

ALIVE_S, ALIVE_COUNT = 5, 3  # a link that is dead in silence is noticed after the product of both
MOST_SAID = 64 << 20  # bytes of a command, or of one answer; a list of all files of the code is a hundred thousand
SSH_FAILED = 255  # exit status of ssh for what is its own; the commands that are run here do not end with it


class Unreachable(ConfigError):
    """A machine does not answer, does not let us in, or is not the one that it should be. ``reason``: in plain words."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"{node}: {reason}")
        self.node = node
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Completed:
    """A command that has ended. ``status``: as a shell shows it, 128 + n after signal n."""

    status: int
    stdout: bytes
    stderr: bytes


class Shell(Protocol):
    """Runs commands on one machine. Arguments arrive as they are given, whatever is in them."""

    @property
    def node(self) -> str:
        """The machine, as the configuration names it."""

    @property
    def is_here(self) -> bool:
        """Whether it is this machine."""

    def run(self, command: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Completed:
        """Run to the end. Raises Unreachable, also when ``timeout_s`` are over first."""

    def start(self, command: Sequence[str], *, stdin: bytes = b"") -> subprocess.Popen[bytes]:
        """A session with pipes for all three streams, apart from the terminal's signals.

        ``stdin`` (small: it is written at once) has been sent; the stream stays open and belongs to the caller. Raises
        nothing of the link: when the process ends, ``fault`` says whether that was it.
        """

    def fault(self, status: int, stderr: bytes) -> Unreachable | None:
        """What an ended session says about the link; None where the command itself ended with this status."""


@dataclass(frozen=True, kw_only=True)
class LocalShell:
    """This machine under one of its addresses."""

    node: str
    is_here: bool = True

    def run(self, command: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Completed:
        """As ``Shell.run``."""
        return _run(self.node, command, stdin=stdin, timeout_s=timeout_s)

    def start(self, command: Sequence[str], *, stdin: bytes = b"") -> subprocess.Popen[bytes]:
        """As ``Shell.start``."""
        return _start(command, stdin)

    def fault(self, status: int, stderr: bytes) -> Unreachable | None:
        """Nothing is between this process and its children."""
        del status, stderr
        return None


@dataclass(frozen=True, kw_only=True)
class SshShell:
    """Another machine."""

    node: str
    hosts: HostsConfig
    is_here: bool = False

    @property
    def program(self) -> tuple[str, ...]:
        """ssh with its options, without the machine: what rsync's ``--rsh`` takes, joined by ``shlex.join``."""
        hosts = self.hosts
        options = {
            "BatchMode": "yes",
            "StrictHostKeyChecking": "yes",
            "UpdateHostKeys": "no",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "PreferredAuthentications": "publickey",
            "ConnectTimeout": str(max(round(hosts.connect_timeout_s), 1)),
            "ConnectionAttempts": "1",
            "ServerAliveInterval": str(ALIVE_S),
            "ServerAliveCountMax": str(ALIVE_COUNT),
            "ControlPath": "none",  # a shared connection would hide the state of this one
            "ClearAllForwardings": "yes",
            "LogLevel": "INFO",  # less would keep the reasons back
        }
        if hosts.known_hosts_file:
            options["UserKnownHostsFile"] = _as_value(hosts.known_hosts_file)
            options["GlobalKnownHostsFile"] = "/dev/null"
        if hosts.identity_file:
            options["IdentityFile"] = _as_value(hosts.identity_file)
            options["IdentitiesOnly"] = "yes"
        settings = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
        user = ["-l", hosts.user] if hosts.user else []
        return ("ssh", "-T", "-a", "-x", "-p", str(hosts.port), *user, *settings)

    def run(self, command: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Completed:
        """As ``Shell.run``."""
        done = _run(self.node, self._over_ssh(command), stdin=stdin, timeout_s=timeout_s)
        if (fault := self.fault(done.status, done.stderr)) is not None:
            raise fault
        return done

    def start(self, command: Sequence[str], *, stdin: bytes = b"") -> subprocess.Popen[bytes]:
        """As ``Shell.start``."""
        return _start(self._over_ssh(command), stdin)

    def fault(self, status: int, stderr: bytes) -> Unreachable | None:
        """As ``Shell.fault``."""
        if status != SSH_FAILED:
            return None
        return Unreachable(self.node, reason_of(stderr.decode(errors="replace"), self.node, hosts=self.hosts))

    def _over_ssh(self, command: Sequence[str]) -> list[str]:
        return [*self.program, "--", self.node, shlex.join(command)]


def shell_of(node: str, hosts: HostsConfig) -> LocalShell | SshShell:
    """How commands reach ``node``."""
    return LocalShell(node=node) if is_this_machine(node) else SshShell(node=node, hosts=hosts)


def is_this_machine(node: str) -> bool:
    """Whether an address or name is one that this machine can listen on."""
    try:
        found = socket.getaddrinfo(node, 0, type=socket.SOCK_STREAM)
    except OSError:  # a name that only ssh's configuration knows
        return False
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def reason_of(stderr: str, node: str, *, hosts: HostsConfig) -> str:
    """Why ssh failed, from what it said, and what to do about it."""
    known = hosts.known_hosts_file or "the known hosts of ssh"
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in stderr:
        return (
            f"its host key is not the one in {known}: this may be another machine than it claims to be. If it was set up "
            "anew, get the new key over a safe way and replace the old one there; nothing is accepted blindly"
        )
    if "host key is known for" in stderr or "Host key verification failed" in stderr:
        return (
            f"the host key of {node} is not in {known}: ask for it over a safe way and add it; nothing is accepted blindly"
        )
    if "Permission denied" in stderr:
        return _why_not_let_in(stderr, hosts)
    for pattern, text in _LINK_FAULTS:
        if re.search(pattern, stderr):
            return text.format(port=hosts.port, seconds=f"{hosts.connect_timeout_s:g}", silent=ALIVE_S * ALIVE_COUNT)
    said = [line.strip() for line in stderr.splitlines() if line.strip()]
    if said:
        return f"ssh failed: {said[-1]}"
    return "ssh failed without a word: what it ran there was killed, or ssh itself here"


_LINK_FAULTS = (
    (r"Connection refused", "connection refused on port {port}: no sshd listens there"),
    (r"No route to host|Network is unreachable", "no route to it: wrong address, or the machine or its link is down"),
    (r"Could not resolve hostname", "its name cannot be resolved"),
    (r"not responding", "the link is dead: it has not answered for {silent} s"),
    (r"timed out|Timeout", "no answer on port {port} within {seconds} s: the machine or its link is down"),
    (r"Connection (closed|reset)|Broken pipe|closed by remote host", "the connection was closed by the other side"),
)


def _why_not_let_in(stderr: str, hosts: HostsConfig) -> str:
    user = hosts.user or "this user"
    key = hosts.identity_file or "no key of ssh's own"
    if hosts.identity_file and re.search("not accessible|no such identity", stderr):
        return f"permission denied: hosts.identity_file={key} cannot be read"
    if "UNPROTECTED PRIVATE KEY" in stderr or "bad permissions" in stderr:
        return f"permission denied: ssh ignores the key {key}, which others can read; chmod 600 it"
    if hosts.identity_file:
        return f"permission denied: {key} does not open {user}; add its public half to authorized_keys there"
    return f"permission denied: {key} opens {user}; set hosts.identity_file, or add a public key to authorized_keys there"


def _as_value(path: str) -> str:
    """A path as the value of an option of ssh, which splits at spaces and replaces what follows %."""
    return '"' + path.replace("%", "%%").replace('"', '\\"') + '"'


def too_much(said: bytes) -> str:
    """What is told of a machine that said more than ``MOST_SAID``. ``said``: the beginning of it."""
    return f"said more than {MOST_SAID >> 20} MiB, which no command here does; what a login prints begins {said[:60]!r}"


def _run(node: str, command: Sequence[str], *, stdin: bytes, timeout_s: float) -> Completed:
    until = time.monotonic() + timeout_s
    with tempfile.TemporaryFile() as told:
        told.write(stdin)
        told.seek(0)
        try:
            process = subprocess.Popen(list(command), stdin=told, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except FileNotFoundError:
            return _not_found(command)
    with process:
        try:
            out, err = _all_said(node, process, until)
            process.wait(max(until - time.monotonic(), 0.0))
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            said = error.args[0] if isinstance(error, TimeoutError) else b""
            raise Unreachable(node, f"{_last_line(said)}did not answer within {timeout_s:g} s") from error
        finally:
            if process.poll() is None:
                process.kill()
    return Completed(status=as_shell_shows(process.returncode), stdout=out, stderr=err)


def _all_said(node: str, process: subprocess.Popen[bytes], until: float) -> tuple[bytes, bytes]:
    """Both streams to their ends. Raises Unreachable for too much, TimeoutError with what came on standard error."""
    assert process.stdout is not None and process.stderr is not None
    said = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    out, err = said.values()
    with selectors.DefaultSelector() as selector:
        for file in said:
            selector.register(file, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(until - time.monotonic(), 0.0))
            if not ready:
                raise TimeoutError(bytes(err))
            for key, _ in ready:
                if data := os.read(key.fd, 1 << 16):
                    said[key.fd] += data
                else:
                    selector.unregister(key.fd)
            if len(out) + len(err) > MOST_SAID:
                raise Unreachable(node, too_much(bytes(out[:64] or err[:64])))
    return bytes(out), bytes(err)


def _last_line(said: bytes) -> str:
    lines = said.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"said {last!r} and " if last else ""


def _not_found(command: Sequence[str]) -> Completed:
    text = f"{command[0]}: {errno.errorcode[errno.ENOENT]}: no such program"
    return Completed(status=127, stdout=b"", stderr=text.encode())


def _start(command: Sequence[str], stdin: bytes) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    session = subprocess.Popen(list(command), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    assert session.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, and its status will say why
        session.stdin.write(stdin)
        session.stdin.flush()
    return session


def as_shell_shows(returncode: int) -> int:
    """An exit status: 128 + n after signal n."""
    return 128 - returncode if returncode < 0 else returncode
