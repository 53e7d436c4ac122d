"""The folder that bundles are kept in: whole files or none, readable by their owner alone, and not more than was allowed.

Blocks while it writes; called by one thread at a time. Knows nothing of what is in a bundle.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from longcat_pd.config.schema import RecordConfig
from longcat_pd.errors import ConfigError

_OURS = re.compile(r"\d{8}T\d{9}Z-.+-[0-9a-f]{8}\.json")
_PART = re.compile(r"\.\d{8}T\d{9}Z-.+-[0-9a-f]{8}\.json\.part")
_LOOK_AGAIN = 64  # files: others may write to the folder too
_LEFT = 0.9  # of what is allowed, when there was too much: not every file makes a look necessary then
_STALE_S = 3600.0  # a file that has been half for so long belongs to nobody


class _Kept(NamedTuple):
    name: str
    num_bytes: int


class BundleFolder:
    """Made when the first bundle comes. Never touches a file that is no bundle."""

    def __init__(self, config: RecordConfig) -> None:
        self._path = Path(config.dir)
        self._max_bytes = config.max_bytes
        self._max_total_bytes = config.max_total_bytes
        self._total = 0  # as far as is known, since the last look
        self._until_look = 0

    def check(self) -> None:
        """Raise ConfigError where others can read what would be kept, or where it is no folder at all."""
        try:
            mode = self._path.stat().st_mode
        except OSError:  # not there yet, or not to be reached now; told of when it is written
            return
        if not stat.S_ISDIR(mode):
            raise ConfigError(f"record.dir={self._path}: is no folder", param="record.dir")
        if stat.S_IMODE(mode) & 0o077:
            shown = f"mode {stat.S_IMODE(mode):04o}"
            raise ConfigError(
                f"record.dir={self._path}: others can enter this folder ({shown}); chmod 700 it", param="record.dir"
            )

    def write(self, name: str, data: bytes) -> str:
        """Keep ``data`` in a file that begins with ``name``, which begins with its time (``YYYYMMDDTHHMMSSmmmZ-``).

        Returns why that was refused, else "". Raises OSError; then nothing is left of it.
        """
        limit = min(self._max_bytes, self._max_total_bytes)
        if len(data) > limit:
            return f"the bundle has {len(data)} bytes, {limit} are allowed"
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._until_look == 0 or self._total + len(data) > self._max_total_bytes:
            self._make_room(len(data))
        target = f"{name}-{secrets.token_hex(4)}.json"
        part = self._path / f".{target}.part"
        try:
            _write_new(part, data)
            part.replace(self._path / target)
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        self._total += len(data)
        self._until_look -= 1
        return ""

    def _make_room(self, num_bytes: int) -> None:
        """Look what is there; of bundles that are too much with ``num_bytes`` more, the oldest go. Raises OSError."""
        kept = sorted(self._kept())
        self._total, self._until_look = sum(file.num_bytes for file in kept), _LOOK_AGAIN
        if self._total + num_bytes <= self._max_total_bytes:
            return
        room = min(int(_LEFT * self._max_total_bytes), self._max_total_bytes - num_bytes)
        for file in kept:
            if self._total <= room:
                break
            (self._path / file.name).unlink(missing_ok=True)
            self._total -= file.num_bytes

    def _kept(self) -> Iterator[_Kept]:
        """The bundles. Half files that a process left behind when it was killed end here. Raises OSError."""
        stale = time.time() - _STALE_S
        with os.scandir(self._path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another process has made room
                    if _OURS.fullmatch(entry.name):
                        yield _Kept(entry.name, entry.stat(follow_symlinks=False).st_size)
                    elif _PART.fullmatch(entry.name) and entry.stat(follow_symlinks=False).st_mtime < stale:
                        (self._path / entry.name).unlink()


def _write_new(path: Path, data: bytes) -> None:
    """A file that is on the disk when this returns."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
