"""The converter as a process, killed without warning in the middle and started again."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

from longcat_pd.quantize import quantize
from longcat_pd.tiny.make import write_tiny


def test_killed_and_started_again(tmp_path: Path) -> None:
    write_tiny(tmp_path / "plain", "2.0", with_tokenizer=False, overrides=["num_layers=1"], max_shard_bytes=1)
    quantize(tmp_path / "plain", tmp_path / "undisturbed")
    command = [sys.executable, "-m", "longcat_pd.quantize", str(tmp_path / "plain"), str(tmp_path / "int8")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # it cannot get to the end while nobody reads its lines
        lines = [process.stdout.readline() for _ in range(20)]
        process.kill()
    assert lines[19].startswith(b"20 of ")
    assert len(list((tmp_path / "int8").glob("*.safetensors"))) >= 20
    assert not (tmp_path / "int8" / "config.json").exists()
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert again.stdout.splitlines()[0].endswith("was there")
    whole, finished = tmp_path / "undisturbed", tmp_path / "int8"
    assert sorted(path.name for path in finished.iterdir()) == sorted(path.name for path in whole.iterdir())
    assert all((finished / path.name).read_bytes() == path.read_bytes() for path in whole.iterdir())
