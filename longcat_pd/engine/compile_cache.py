"""Compiled steps on disk: under which facts each was made, and whether these are still the facts.

A graph is one file: an archive of what its compiler made and of the facts that this depends on, with a digest at the end.
It is written whole or not at all, and read once: what is loaded is what was checked. What differs in a fact, or is damaged,
is made anew. A compiler that keeps files itself has a folder for each graph instead, whose name tells the facts apart.
Graphs are executed, so folders must be this user's alone. Knows no compiler; imports no torch.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import longcat_pd
from longcat_pd.errors import ConfigError
from longcat_pd.log import logger

Facts = Mapping[str, str]

_RECORD = "facts.json"
_DIGEST_BYTES = 32  # of everything, at the end
_WRITABLE_BY_OTHERS = 0o022


def code_digest() -> str:
    """Digest of the source of this package."""
    root, total = Path(longcat_pd.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        total.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def short_digest(facts: Facts) -> str:
    """Equal for equal facts; short enough for a file name."""
    return _whole_digest(facts)[:8]


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One graph's place in the cache.

    ``facts``: everything that the graph depends on, by name; a change of any makes a stored graph stale.
    """

    folder: Path
    name: str
    facts: Facts

    @property
    def path(self) -> Path:
        """The file of the graph."""
        return self.folder / f"{self.name}.graph"

    def open_folder(self) -> None:
        """Makes the folder where it is missing. Raises ConfigError if it cannot, or if others can write to it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = self.folder.stat()
        except OSError as error:
            raise self._refusal(str(error.strerror)) from error
        if found.st_uid not in (os.getuid(), 0) or found.st_mode & _WRITABLE_BY_OTHERS:
            raise self._refusal("what lies there is executed, so it must be this user's and writable by nobody else")

    def own_folder(self) -> Path:
        """A folder for the files of this graph, for compilers that keep them themselves; those of other facts go.

        Raises ConfigError if there can be none, or if others can write to it.
        """
        self.open_folder()
        own = replace(self, folder=self.folder / f"{self.name}.{_whole_digest(self.facts)[:32]}")
        for stale in self.folder.glob(f"{glob.escape(self.name)}.*"):
            if stale != own.folder:
                logger().info("compile_cache_stale", graph=self.name, reason="changed")
                shutil.rmtree(stale, ignore_errors=True)
        own.open_folder()
        own.probe()
        return own.folder

    def probe(self) -> None:
        """Raises ConfigError if nothing can be stored, which is better known before a graph is compiled."""
        try:
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise self._refusal(str(error.strerror)) from error

    def unpack(self, target: Path) -> bool:
        """Puts the parts of the stored graph into an empty folder. False: there is none, or none that may be used.

        One line is logged about a graph that may not be used.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return False
        reason = self._unpack(data, target)
        if reason:
            logger().info("compile_cache_stale", graph=self.name, reason=reason)
        return not reason

    def pack(self, source: Path) -> None:
        """Stores the files of a folder as the graph."""
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as parts:
            parts.writestr(_RECORD, json.dumps(dict(self.facts), indent=1))
            for path in sorted(path for path in source.rglob("*") if path.is_file()):
                parts.write(path, f"parts/{path.relative_to(source)}")
        handle, made = tempfile.mkstemp(dir=self.folder, prefix=f"{self.name}.", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data.getvalue() + _digest(data.getvalue()))
            Path(made).replace(self.path)
        except OSError as error:
            Path(made).unlink(missing_ok=True)
            raise self._refusal(str(error.strerror)) from error

    def _unpack(self, data: bytes, target: Path) -> str:
        """Why not, or nothing."""
        if _digest(data[:-_DIGEST_BYTES]) != data[-_DIGEST_BYTES:]:
            return "its bytes are not those that were written"
        with zipfile.ZipFile(io.BytesIO(data[:-_DIGEST_BYTES])) as parts:
            stored: dict[str, str] = json.loads(parts.read(_RECORD))
            changed = sorted(name for name in {*stored, *self.facts} if stored.get(name) != self.facts.get(name))
            if changed:
                return f"changed: {', '.join(changed)}"
            for part in parts.namelist():
                if part != _RECORD:
                    path = target / Path(part).relative_to("parts")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(parts.read(part))
        return ""

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(f"engine.compile_cache={self.folder}: {why}", param="engine.compile_cache")


def _whole_digest(facts: Facts) -> str:
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
