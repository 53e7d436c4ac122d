"""The converter as a process, killed without warning in the middle and started again, and two of them at once."""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from longcat_pd.quantize import quantize
from longcat_pd.tiny.make import write_tiny


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of many shards; beside it, what an undisturbed run makes of it."""
    path = tmp_path_factory.mktemp("quantize") / "plain"
    write_tiny(path, "2.0", with_tokenizer=False, overrides=["num_layers=1"], max_shard_bytes=1)
    quantize(path, path.with_name("undisturbed"))
    return path


def command(plain: Path, target: Path) -> list[str]:
    return [sys.executable, "-m", "longcat_pd.quantize", str(plain), str(target)]


@contextlib.contextmanager
def held_up(arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A run that cannot get to the end while nobody reads its lines."""
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        yield process


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_killed_and_started_again(plain: Path, tmp_path: Path) -> None:
    arguments = command(plain, tmp_path / "int8")
    with held_up(arguments) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(20)]
        process.kill()
    assert lines[19].startswith(b"20 of ")
    assert len(list((tmp_path / "int8").glob("*.safetensors"))) >= 20
    assert not (tmp_path / "int8" / "config.json").exists()
    again = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert again.stdout.splitlines()[0].endswith("was there")
    assert contents(tmp_path / "int8") == contents(plain.with_name("undisturbed"))


def test_of_two_runs_with_one_target_the_second_is_refused(plain: Path, tmp_path: Path) -> None:
    arguments = command(plain, tmp_path / "int8")
    with held_up(arguments) as first:
        assert first.stdout is not None
        assert first.stdout.readline().startswith(b"1 of ")
        second = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
        first.stdout.read()
    assert second.returncode == 2 and not second.stdout
    assert second.stderr.startswith(f"error: {tmp_path / 'int8'}: another run is at work there")
    assert first.returncode == 0
    assert contents(tmp_path / "int8") == contents(plain.with_name("undisturbed"))
