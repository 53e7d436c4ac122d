"""The code on one machine: what lies there, how a tree gets there, and which release is current.

Owns the steps of a distribution as one machine takes them; in which order all of them do is ``code.py``. What runs there
is ``node/code.sh``, which needs no code of ours to be there, and deletes nothing outside of ``<hosts.path>/releases``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import select
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from longcat_pd.cluster.everywhere import StepFailed
from longcat_pd.cluster.packages import Packages, ask, needed
from longcat_pd.cluster.shell import Completed, LocalShell, SshShell, Unreachable
from longcat_pd.cluster.tree import Tree
from longcat_pd.config.schema import ClusterConfig

_SCRIPT = Path(__file__).parent / "node" / "code.sh"
_ASK_S, _COMPARE_S, _COPY_S, _INSTALL_S = 60.0, 300.0, 900.0, 3600.0
_SILENT_S = 60  # of rsync, after which the link is given up
_LINK_STATUSES = (10, 12, 30, 35, 255)  # of rsync: socket, protocol stream, silence, connection, its ssh
_KIB, _MIB = 1 << 10, 1 << 20
_INSTALL = 'set -eu; extra="$2"; . "$1/deploy/venv.sh"'


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a machine says before anything is copied. ``current``: its release, "" if it has none."""

    current: str
    has_release: bool


@dataclass(frozen=True, kw_only=True)
class NodeCode:
    """The code of one machine. Every step raises StepFailed or Unreachable, both naming the machine."""

    shell: LocalShell | SshShell
    config: ClusterConfig
    tree: Tree

    @property
    def path(self) -> str:
        """``hosts.path``, without a slash at its end."""
        return self.config.hosts.path.rstrip("/")

    @property
    def release(self) -> str:
        """The folder of the tree there."""
        return f"{self.path}/releases/{self.tree.digest}"

    @property
    def python(self) -> str:
        """The interpreter that runs the release."""
        return self.config.hosts.python or f"{self.release}/.venv/bin/python"

    def prepare(self) -> str:
        """Make the folders. Returns the current release."""
        return self._told(self._ask("prepare"), "current")

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other distributions out of this machine, and remove what an interrupted one left."""
        session = self.shell.start(self._command("hold"))
        try:
            if _first_line(session, _ASK_S) != b"held\n":
                raise self._why_not_held(session)
            yield
        finally:
            _close(session)

    def look(self) -> Place:
        """Whether the tree is there already, file by file."""
        current = self.prepare()
        done = self._ask("has", *self._identity, stdin=self.tree.manifest, timeout_s=_COMPARE_S)
        return Place(current=current, has_release=self._told(done, "has") == "yes")

    def fetch(self, current: str) -> int:
        """Copy the tree beside what is there and make it a release once every file is what it should be.

        Returns the number of files that were sent; the others are as in the ``current`` release.
        """
        free = int(self._told(self._ask("free"), "free_kib")) * _KIB
        if free < self.tree.disk_bytes:
            raise StepFailed(self.shell.node, f"disk full: {self._numbers(free)}")
        base = [f"--copy-dest={self.path}/releases/{current}"] if current else []
        paths = "\0".join(self.tree.paths).encode()
        options = ["--files-from=-", "--from0", "--links", "--perms", "--checksum", "--stats", "--no-human-readable", *base]
        told = self._rsync(options, source=f"{self.tree.root}/", target=f"{self.path}/releases/.incoming/", stdin=paths)
        self._ask("place", *self._identity, stdin=self.tree.manifest, timeout_s=_COMPARE_S)
        found = re.search(r"Number of regular files transferred: (\d+)", told)
        return int(found.group(1)) if found else len(self.tree.paths)

    def make_environment(self) -> Packages:
        """The interpreter and its packages: made in the release, or only looked at where ``hosts.python`` names one."""
        if not self.config.hosts.python:
            extra = "npu" if self.config.device == "npu" else "cpu"
            done = self.shell.run(["bash", "-c", _INSTALL, "bash", self.release, extra], timeout_s=_INSTALL_S)
            if done.status:
                raise StepFailed(self.shell.node, f"no environment: {_last_words(done.stderr)}")
        pyproject = (self.tree.root / "pyproject.toml").read_text(encoding="utf-8")
        packages = ask(self.shell, self.python, needed(pyproject, self.config.device))
        if packages.complaint:
            raise StepFailed(self.shell.node, f"{self.python} {packages.complaint}")
        return packages

    def copy_graphs(self, source: Path, places: Sequence[str]) -> None:
        """Lay compiled graphs into the folders where ranks look for them; what is there stays. "~/" is the home there."""
        for place in places:
            folder = self._told(self._ask("cache", place.removeprefix("~/")), "folder")
            options = ["--recursive", "--times", "--perms", "--chmod=go-w"]
            self._rsync(options, source=f"{source}/", target=f"{folder}/")

    def switch(self, digest: str) -> None:
        """Make a release current at once; "": none is."""
        self._ask("switch", digest)

    def prune(self) -> tuple[str, ...]:
        """Remove old releases that nothing runs from. Returns their names."""
        done = self._ask("prune", str(self.config.hosts.keep_releases), timeout_s=_COMPARE_S)
        return tuple(re.findall(r"^removed=(\w+)$", done.stdout.decode(), re.MULTILINE))

    @property
    def _identity(self) -> tuple[str, str]:
        return self.tree.digest, hashlib.sha256(self.tree.manifest).hexdigest()

    def _command(self, verb: str, *arguments: str) -> list[str]:
        return ["sh", "-c", _SCRIPT.read_text(encoding="utf-8"), "code.sh", verb, self.path, *arguments]

    def _ask(self, verb: str, *arguments: str, stdin: bytes = b"", timeout_s: float = _ASK_S) -> Completed:
        done = self.shell.run(self._command(verb, *arguments), stdin=stdin, timeout_s=timeout_s)
        if done.status:
            raise StepFailed(self.shell.node, _last_words(done.stderr) or f"{verb} ended with exit status {done.status}")
        return done

    def _told(self, done: Completed, name: str) -> str:
        found = re.search(rf"^{name}=(.*)$", done.stdout.decode(errors="replace"), re.MULTILINE)
        if found is None:
            raise StepFailed(self.shell.node, f"did not tell {name}, but {done.stdout[:80]!r}")
        return found.group(1)

    def _why_not_held(self, session: subprocess.Popen[bytes]) -> StepFailed | Unreachable:
        session.kill()
        _, stderr = session.communicate()
        return self.shell.fault(session.returncode, stderr) or StepFailed(
            self.shell.node, _last_words(stderr) or f"its lock was not had within {_ASK_S:g} s"
        )

    def _rsync(self, options: Sequence[str], *, source: str, target: str, stdin: bytes = b"") -> str:
        over = []
        if isinstance(self.shell, SshShell):
            over = [f"--rsh={shlex.join(self.shell.program)}", f"--timeout={_SILENT_S}"]
            target = f"[{self.shell.node}]:{target}" if ":" in self.shell.node else f"{self.shell.node}:{target}"
        local = LocalShell(node=self.shell.node)
        done = local.run(["rsync", *options, *over, source, target], stdin=stdin, timeout_s=_COPY_S)
        if done.status:
            raise self._why_not_copied(done)
        return done.stdout.decode(errors="replace")

    def _why_not_copied(self, done: Completed) -> StepFailed | Unreachable:
        said = done.stderr.decode(errors="replace")
        if done.status == 127:
            return StepFailed(self.shell.node, "rsync is missing on the machine that this runs on; install it")
        if "No space left on device" in said or "Disk quota exceeded" in said:
            free = int(self._told(self._ask("free"), "free_kib")) * _KIB
            return StepFailed(self.shell.node, f"disk full while it was copied: {self._numbers(free)}")
        if done.status in _LINK_STATUSES and (fault := self.shell.fault(255, done.stderr)) is not None:
            return fault
        return StepFailed(self.shell.node, f"rsync ended with exit status {done.status}: {_last_words(done.stderr)}")

    def _numbers(self, free: int) -> str:
        needed_bytes = self.tree.disk_bytes
        return f"{needed_bytes / _MIB:.1f} MiB are needed in {self.path}/releases, {free / _MIB:.1f} MiB are free"


def _first_line(session: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """What a session says first; "" when it ends or time is over before."""
    assert session.stdout is not None
    deadline, said = time.monotonic() + timeout_s, b""
    while not said.endswith(b"\n"):
        ready, _, _ = select.select([session.stdout], [], [], max(deadline - time.monotonic(), 0.0))
        part = os.read(session.stdout.fileno(), 4096) if ready else b""
        if not part:
            break
        said += part
    return said


def _close(session: subprocess.Popen[bytes]) -> None:
    """Let a session end by the end of its input; one that does not is killed here, and there within its hour."""
    if session.stdin is not None and not session.stdin.closed:
        with contextlib.suppress(BrokenPipeError):
            session.stdin.close()
    try:
        session.wait(timeout=10.0)
    except subprocess.TimeoutExpired:
        session.kill()
        session.wait()
    for pipe in (session.stdout, session.stderr):
        if pipe is not None:
            pipe.close()


def _last_words(stderr: bytes) -> str:
    """The last lines that say something, as one."""
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    return " · ".join(lines[-3:])
