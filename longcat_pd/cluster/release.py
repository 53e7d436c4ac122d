"""The code on one machine: what lies there, how a tree gets there, and which release is current.

Owns the steps of a distribution as one machine takes them; in which order all of them do is ``code.py``. What runs there
is ``node/code.sh``, which needs no code of ours to be there, and deletes nothing outside of ``<hosts.path>/releases``.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType

from longcat_pd.cluster.conversation import Conversation, last_words
from longcat_pd.cluster.everywhere import StepFailed
from longcat_pd.cluster.packages import Packages, ask, needed
from longcat_pd.cluster.shell import Completed, LocalShell, SshShell, Unreachable
from longcat_pd.cluster.tree import Tree
from longcat_pd.config.schema import ClusterConfig

_SCRIPT = Path(__file__).parent / "node" / "code.sh"
_ASK_S, _COMPARE_S, _COPY_S, _INSTALL_S = 60.0, 300.0, 900.0, 3600.0
_OTHERS_INSTALL_S = 600  # until one that was left alone has ended
_SILENT_S = 60  # of rsync, after which the link is given up
_LINK_STATUSES = (10, 12, 30, 35, 255)  # of rsync: socket, protocol stream, silence, connection, its ssh
_FILE_STATUS = 11  # of rsync: reading or writing files
_KIB, _MIB = 1 << 10, 1 << 20
_EXTRAS = MappingProxyType({"npu": "npu"})  # of pyproject.toml, by device
# What installs goes on when its session is lost, so the next one waits for it.
_INSTALL = """\
set -eu
extra="$2"
exec 8>"$1/../.install"
flock -w "$3" 8 || { echo "another installation is at work in $1" >&2; exit 1; }
. "$1/deploy/venv.sh"
"""


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a machine says before anything is copied. ``current``: its release, "" if it has none."""

    current: str
    has_release: bool
    free_bytes: int


class NodeCode:
    """The code of one machine, while it is open, when no other distribution is at work there.

    Every step raises StepFailed or Unreachable, both naming the machine.
    """

    def __init__(self, shell: LocalShell | SshShell, *, config: ClusterConfig, tree: Tree) -> None:
        self.shell, self.config, self.tree = shell, config, tree
        self.path = config.hosts.path.rstrip("/")
        self.release = f"{self.path}/releases/{tree.digest}"
        self.python = config.hosts.python or f"{self.release}/.venv/bin/python"
        self._talk: Conversation | None = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._talk is not None:
            self._talk.close()

    def __enter__(self) -> NodeCode:
        script = _SCRIPT.read_text(encoding="utf-8")
        self._talk = Conversation(self.shell, ["sh", "-c", script, "code.sh", self.path])
        return self

    def look(self) -> Place:
        """Make the folders, remove what an interrupted copy left, and tell whether the tree is there, file by file."""
        assert self._talk is not None
        told = self._talk.hear(_ASK_S)
        manifest = self.tree.manifest
        sent = f"manifest {len(manifest)} {hashlib.sha256(manifest).hexdigest()}"
        self._talk.ask(sent, payload=manifest, timeout_s=_ASK_S)
        has = self._ask(f"has {self.tree.digest}", timeout_s=_COMPARE_S)["has"] == ["yes"]
        return Place(current=told["current"][0], has_release=has, free_bytes=int(told["free_kib"][0]) * _KIB)

    def fetch(self, place: Place) -> int:
        """Copy the tree beside what is there and make it a release once every file is what it should be.

        Returns the number of files that were sent; the others are as in the current release.
        """
        if place.free_bytes < self.tree.disk_bytes:
            raise StepFailed(self.shell.node, f"disk full: {self._numbers(place.free_bytes)}")
        base = [f"--copy-dest={self.path}/releases/{place.current}"] if place.current else []
        paths = "\0".join(f"./{path}" for path in self.tree.paths).encode()  # without "./" rsync passes "#name" over
        options = ["--files-from=-", "--from0", "--links", "--perms", "--checksum", "--stats", "--no-human-readable", *base]
        told = self._rsync(options, source=f"{self.tree.root}/", target=f"{self.path}/releases/.incoming/", stdin=paths)
        self._ask(f"place {self.tree.digest}", timeout_s=_COMPARE_S)
        found = re.search(r"Number of regular files transferred: (\d+)", told)
        return int(found.group(1)) if found else len(self.tree.paths)

    def make_environment(self) -> Packages:
        """The interpreter and its packages: made in the release, or only looked at where ``hosts.python`` names one."""
        if not self.config.hosts.python:
            extra = _EXTRAS.get(self.config.device, "cpu")
            done = self.shell.run(
                ["bash", "-c", _INSTALL, "bash", self.release, extra, f"{_OTHERS_INSTALL_S}"], timeout_s=_INSTALL_S
            )
            if done.status:
                raise StepFailed(self.shell.node, f"no environment: {_words(done)}")
        pyproject = (self.tree.root / "pyproject.toml").read_text(encoding="utf-8")
        packages = ask(self.shell, self.python, needed(pyproject, self.config.device))
        if packages.complaint:
            raise StepFailed(self.shell.node, f"{self.python} {packages.complaint}")
        return packages

    def copy_graphs(self, source: Path, places: Sequence[str]) -> None:
        """Lay compiled graphs into the folders where ranks look for them; what is there stays. "~/" is the home there."""
        for place in places:
            folder = self._ask(f"cache {place.removeprefix('~/')}")["folder"][0]
            options = ["--recursive", "--times", "--perms", "--chmod=go-w"]
            self._rsync(options, source=f"{source.absolute()}/", target=f"{folder}/")

    def switch(self, digest: str) -> None:
        """Make a release current at once; "": none is."""
        self._ask(f"switch {digest}")

    def prune(self) -> Sequence[str]:
        """Remove old releases that nothing runs from. Returns their names."""
        return self._ask(f"prune {self.config.hosts.keep_releases}", timeout_s=_COMPARE_S).get("removed", [])

    def _ask(self, question: str, *, timeout_s: float = _ASK_S) -> dict[str, list[str]]:
        assert self._talk is not None, "it is open"
        return self._talk.ask(question, timeout_s=timeout_s)

    def _rsync(self, options: Sequence[str], *, source: str, target: str, stdin: bytes = b"") -> str:
        over = []
        if isinstance(self.shell, SshShell):
            over = ["--protect-args", f"--rsh={shlex.join(self.shell.program)}", f"--timeout={_SILENT_S}"]
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
        if (full := self._why_full(done.status, said)) is not None:
            return full
        if done.status in _LINK_STATUSES and (fault := self.shell.fault(255, done.stderr)) is not None:
            return fault
        return StepFailed(self.shell.node, f"rsync ended with exit status {done.status}: {_words(done)}")

    def _why_full(self, status: int, said: str) -> StepFailed | None:
        """Its words do not always arrive with the status."""
        is_told = "No space left on device" in said or "Disk quota exceeded" in said
        if not is_told and status != _FILE_STATUS:
            return None
        free = int(self._ask("free")["free_kib"][0]) * _KIB
        if not is_told and free >= self.tree.disk_bytes:
            return None
        return StepFailed(self.shell.node, f"disk full while it was copied: {self._numbers(free)}")

    def _numbers(self, free: int) -> str:
        needed_bytes = self.tree.disk_bytes
        return f"{needed_bytes / _MIB:.1f} MiB are needed in {self.path}/releases, {free / _MIB:.1f} MiB are free"


def _words(done: Completed) -> str:
    return last_words(done.stderr.decode(errors="replace").splitlines())
