"""Whole files or none, nobody else's to read, and never more than was allowed."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from longcat_pd.config.schema import RecordConfig
from longcat_pd.errors import ConfigError
from longcat_pd.server.bundle_folder import BundleFolder


def name(number: int) -> str:
    return f"20260101T{number:09}Z-d0-r-0"


def folder_of(path: Path, max_bytes: int = 100, max_total_bytes: int = 1000) -> BundleFolder:
    return BundleFolder(RecordConfig(dir=str(path), max_bytes=max_bytes, max_total_bytes=max_total_bytes))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def total(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def test_only_the_owner_can_read(tmp_path: Path) -> None:
    path = tmp_path / "a" / "records"
    mask = os.umask(0)
    try:
        assert folder_of(path).write(name(1), b"x") == ""
    finally:
        os.umask(mask)
    (file,) = path.iterdir()
    assert (mode(path), mode(file), file.read_bytes()) == (0o700, 0o600, b"x")


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "open"
    folder_of(path).check()
    path.mkdir(mode=0o700)
    folder_of(path).check()
    path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"record\.dir=.*mode 0755.*chmod 700"):
        folder_of(path).check()
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="is no folder"):
        folder_of(file).check()


def test_a_bundle_that_is_too_long_is_not_kept(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "r")
    assert folder.write(name(1), b"x" * 100) == ""
    assert folder.write(name(2), b"x" * 101) == "the bundle has 101 bytes, 100 are allowed"
    assert len(list((tmp_path / "r").iterdir())) == 1


def test_the_oldest_go_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.mkdir(mode=0o700)
    others = {path / "notes.json": b"n" * 5000, path / "20260101T000000000Z-x.json": b"y" * 5000}
    for file, data in others.items():
        file.write_bytes(data)
    folder = folder_of(path)
    for number in range(40):
        assert folder.write(name(number), b"x" * 90) == ""
        assert total(path) - 10_000 <= 1000
        assert any(file.name.startswith(name(number)) for file in path.iterdir())
    kept = sorted(file.name[:19] for file in path.iterdir() if file not in others)
    assert kept == [name(number)[:19] for number in range(40 - len(kept), 40)]
    assert len(kept) >= 9
    assert all(file.read_bytes() == data for file, data in others.items())


def test_what_other_processes_write_counts_too(tmp_path: Path) -> None:
    path = tmp_path / "r"
    folders = [folder_of(path, max_total_bytes=50_000) for _ in range(3)]
    for number in range(1500):
        assert folders[number % 3].write(name(number), b"x" * 100) == ""
    assert total(path) <= 50_000 + 3 * 64 * 100


def test_a_disk_that_is_full_leaves_nothing_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r"
    folder = folder_of(path)

    def full(_fd: int) -> None:
        seen = [file for file in path.iterdir() if not file.name.endswith(".part")]
        assert seen == [], "nothing has the name of a bundle before it is whole and on the disk"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        folder.write(name(1), b"x")
    assert list(path.iterdir()) == []
    monkeypatch.undo()
    assert folder.write(name(2), b"x") == ""


def test_halves_of_a_killed_process_go_in_time(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.mkdir(mode=0o700)
    old, new = path / f".{name(1)}-0000aaaa.json.part", path / f".{name(2)}-0000aaaa.json.part"
    for file in (old, new):
        file.touch()
    os.utime(old, (0, 0))
    folder_of(path).write(name(3), b"x")
    assert not old.exists()
    assert new.exists(), "somebody may be writing it"
