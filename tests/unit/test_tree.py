"""Which files belong to a distributed tree, and when two trees are one release."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from longcat_pd.cluster.tree import tree_of
from longcat_pd.errors import ConfigError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "tree"
    (made / "deep" / "er").mkdir(parents=True)
    (made / "deep" / "er" / "one.py").write_text("1\n")
    (made / "two.py").write_text("2\n")
    (made / "to").symlink_to("two.py")
    return made


def git(root: Path, *arguments: str) -> None:
    subprocess.run(
        ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e@e", *arguments], check=True, capture_output=True
    )


def test_without_git_everything_but_environments_and_caches(root: Path) -> None:
    for name in (".venv/bin/python", ".run/log", "deep/__pycache__/one.pyc", ".mypy_cache/x", "a.egg-info/x", ".release"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("left out")
    assert tree_of(root).paths == ("deep/er/one.py", "to", "two.py")


def test_of_git_what_is_tracked_as_it_lies_there(root: Path) -> None:
    git(root, "init", "--quiet")
    git(root, "add", "-A")
    git(root, "commit", "--quiet", "-m", "all")
    clean = tree_of(root)
    before = clean.digest
    assert clean.paths == ("deep/er/one.py", "to", "two.py") and "uncommitted" not in clean.notes[0]
    (root / "two.py").write_text("changed\n")
    (root / "deep" / "er" / "one.py").unlink()
    (root / "three.py").write_text("3\n")
    dirty = tree_of(root)
    assert dirty.paths == ("to", "two.py")
    assert "with 2 uncommitted changes" in dirty.notes[0]
    assert dirty.notes[1].startswith("1 files that git does not track stay here, such as three.py")
    assert dirty.digest != before


def test_a_damaged_repository_is_not_taken_for_none(root: Path) -> None:
    (root / ".git").mkdir()
    with pytest.raises(ConfigError, match="git ls-files: "):
        tree_of(root)


def test_content_path_mode_and_link_make_a_release_and_time_does_not(root: Path) -> None:
    digests = [tree_of(root).digest]
    (root / "two.py").touch()
    (root / "two.py").chmod(0o600)
    assert tree_of(root).digest == digests[0]
    (root / "two.py").write_text("other\n")
    digests.append(tree_of(root).digest)
    (root / "two.py").chmod(0o755)
    digests.append(tree_of(root).digest)
    (root / "two.py").rename(root / "too.py")
    digests.append(tree_of(root).digest)
    (root / "to").unlink()
    (root / "to").symlink_to("too.py")
    digests.append(tree_of(root).digest)
    assert len(set(digests)) == 5


def test_room_is_counted_in_pages_with_folders(root: Path) -> None:
    (root / "two.py").write_bytes(b"x" * 4097)
    assert tree_of(root).disk_bytes == 4096 * (1 + 1 + 2 + 3)


def test_names_that_a_checksum_file_would_escape_are_refused(root: Path) -> None:
    (root / "a\nb").write_text("")
    with pytest.raises(ConfigError, match="line breaks"):
        tree_of(root)
    (root / "a\nb").unlink()
    for file in ("two.py", "to", "deep/er/one.py"):
        (root / file).unlink()
    with pytest.raises(ConfigError, match="no files"):
        tree_of(root)


@pytest.mark.parametrize(
    ("name", "target"),
    [(b"bad\xff.py", None), (b"link", b"a\nF 0  ./b"), (b"link", b"bad\xff"), (b"back\\slash", None)],
)
def test_what_a_manifest_cannot_hold_is_refused(root: Path, name: bytes, target: bytes | None) -> None:
    place = root / os.fsdecode(name)
    if target is None:
        place.write_text("")
    else:
        place.symlink_to(os.fsdecode(target))
    with pytest.raises(ConfigError, match="not distributed"):
        _ = tree_of(root).manifest


def test_what_stays_here_is_named_whatever_its_bytes_are(root: Path) -> None:
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    (root / os.fsdecode(b"bad\xff.py")).write_text("")
    assert "bad\N{REPLACEMENT CHARACTER}.py" in " ".join(tree_of(root).notes)
