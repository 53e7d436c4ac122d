"""A copy of the repository for tests of the scripts in ``deploy/``."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Clone:
    """A copy of what the scripts need, with the tests' environment as its .venv."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in ("deploy", "longcat_pd"):
            shutil.copytree(ROOT / name, path / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", path)
        (path / ".venv" / "bin").mkdir(parents=True)
        launcher = path / ".venv" / "bin" / "python"
        launcher.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        launcher.chmod(0o755)
        (path / ".venv" / "installed-from").write_text(hashlib.sha256((path / "pyproject.toml").read_bytes()).hexdigest())

    def run(self, script: str, *arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """A script of ``deploy/``, from the root of the copy."""
        command = ["bash", str(self.path / "deploy" / script), *arguments]
        return subprocess.run(command, cwd=self.path, capture_output=True, text=True, timeout=timeout_s, check=False)
