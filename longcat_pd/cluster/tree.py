"""The tree of code that a cluster is given: which files belong to it, and the manifest that says whether a copy is equal.

Where the root is a git work tree, what git tracks, as it lies there now; else everything but environments, caches and what
runs leave behind. Knows no machine but this one and changes nothing.

The manifest is text, a line for each file, sorted: ``F``, or ``X`` where its owner may execute it, the SHA-256 and
``./path``; or ``L ./path -> target``. ``node/code.sh`` reads it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from longcat_pd.errors import ConfigError

MANIFEST = ".release"  # its name in a release
_LEFT_OUT = frozenset({".git", ".venv", ".venv-clients", ".run", ".npu", "__pycache__", "node_modules", "build", "dist"})
_LEFT_OUT_ENDS = ("_cache", ".egg-info", ".pyc")  # .mypy_cache and the like, and what an installation leaves
_DIGEST_DIGITS = 16
_PAGE = 4096  # room that files are given in
_PART_BYTES = 1 << 20  # of a file that are read at a time


@dataclass(frozen=True, kw_only=True)
class Tree:
    """What is distributed. ``paths``: sorted, relative to ``root``. ``notes``: what the operator should know of it."""

    root: Path
    paths: tuple[str, ...]
    notes: tuple[str, ...]

    @cached_property
    def manifest(self) -> bytes:
        """The text that describes it whole. Raises ConfigError for a file that cannot be read."""
        return "".join(f"{_line(self.root, path)}\n" for path in self.paths).encode()

    @cached_property
    def digest(self) -> str:
        """Name of the release."""
        return hashlib.sha256(self.manifest).hexdigest()[:_DIGEST_DIGITS]

    @property
    def disk_bytes(self) -> int:
        """Room that a copy takes, in whole pages, folders included."""
        folders = {str(parent) for path in self.paths for parent in Path(path).parents}
        sizes = [(self.root / path).lstat().st_size for path in self.paths]
        return sum(-(-size // _PAGE) * _PAGE for size in sizes) + _PAGE * len(folders)


def tree_of(root: Path) -> Tree:
    """The tree at ``root``. Raises ConfigError where it cannot be told or holds a name that a shell could misread."""
    if (root / ".git").exists():
        paths, notes = _tracked(root)
    else:
        paths, notes = sorted(_walked(root)), ("not a git work tree: everything but environments and caches",)
    strange = [path for path in paths if not _is_plain(path) or "\\" in path]
    if strange:
        text = "line breaks, backslashes and what is not UTF-8 in names of files are not distributed"
        raise ConfigError(f"{root}: {strange[0]!r}: {text}")
    if not paths:
        raise ConfigError(f"{root}: no files to distribute")
    return Tree(root=root, paths=tuple(paths), notes=notes)


def _tracked(root: Path) -> tuple[list[str], tuple[str, ...]]:
    listed = [path for path in _git(root, "ls-files", "-z").split("\0") if path]
    paths = sorted({path for path in listed if _is_file(root / path)})
    head = _git(root, "describe", "--always", "--abbrev=12").strip() if _has_commit(root) else "no commit yet"
    changed = _git(root, "status", "--porcelain", "--untracked-files=no").splitlines()
    strangers = _git(root, "ls-files", "-z", "--others", "--exclude-standard").split("\0")[:-1]
    notes = [f"git {head}" + (f" with {len(changed)} uncommitted changes" if changed else "")]
    if strangers:
        name = _shown(strangers[0])
        notes.append(f"{len(strangers)} files that git does not track stay here, such as {name}; git add what is meant")
    return paths, tuple(notes)


def _has_commit(root: Path) -> bool:
    return (
        subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--verify", "--quiet", "HEAD"], capture_output=True, check=False
        ).returncode
        == 0
    )


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=False)
    except FileNotFoundError as error:
        raise ConfigError(f"{root}: is a git work tree, but there is no git to ask which files belong to it") from error
    if done.returncode:
        raise ConfigError(f"{root}: git {arguments[0]}: {done.stderr.decode(errors='replace').strip()}")
    return os.fsdecode(done.stdout)


def _walked(root: Path, folder: str = "") -> Iterator[str]:
    for entry in (root / folder).iterdir():
        name = f"{folder}{entry.name}"
        if entry.name in _LEFT_OUT or entry.name.endswith(_LEFT_OUT_ENDS) or name == MANIFEST:
            continue
        if _is_file(entry):
            yield name
        elif entry.is_dir():
            yield from _walked(root, f"{name}/")


def _is_file(path: Path) -> bool:
    """A file, or a link whatever it leads to; what git tracks and somebody deleted is neither, nor is a submodule."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) or stat.S_ISLNK(mode)


def _is_plain(text: str) -> bool:
    """Whether it is UTF-8 on one line."""
    return "\n" not in text and _shown(text) == text


def _line(root: Path, path: str) -> str:
    file = root / path
    try:
        mode = file.lstat().st_mode
        if stat.S_ISLNK(mode):
            return f"L ./{path} -> {_target(file)}"
        total = _total(file)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    return f"{'X' if mode & stat.S_IXUSR else 'F'} {total}  ./{path}"


def _target(link: Path) -> str:
    target = str(link.readlink())
    if not _is_plain(target):
        raise ConfigError(f"{link}: leads to {target!r}: line breaks and what is not UTF-8 are not distributed")
    return target


def _total(file: Path) -> str:
    """SHA-256 of a file of any size."""
    total = hashlib.sha256()
    with file.open("rb") as data:
        while part := data.read(_PART_BYTES):
            total.update(part)
    return total.hexdigest()


def _shown(name: str) -> str:
    """A name for people, whatever its bytes are."""
    return os.fsencode(name).decode(errors="replace")
