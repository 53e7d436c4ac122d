"""What stands in deploy/ for others to run: scripts and the image's file, as far as can be seen without running them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from longcat_pd.render.pods import HOME, USER

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


def run(*command: str | Path) -> tuple[int, str]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_against_the_scripts() -> None:
    scripts = [*sorted((ROOT / "deploy").glob("*.sh")), ROOT / ".ci" / "run"]
    assert len(scripts) >= 4
    assert run("shellcheck", "--external-sources", *scripts) == (0, "")


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
def test_hadolint_has_nothing_against_the_image(tmp_path: Path) -> None:
    assert HADOLINT is not None
    assert run(HADOLINT, DOCKERFILE) == (0, "")
    worse = tmp_path / "Dockerfile"
    worse.write_text(re.sub("^USER .*", "USER root", DOCKERFILE.read_text(), flags=re.MULTILINE))
    status, shown = run(HADOLINT, worse)
    assert status == 1 and "DL3002" in shown


def test_the_image_gets_what_it_copies_and_nothing_else() -> None:
    copied = {
        path.removeprefix("./")
        for line in DOCKERFILE.read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for path in line.split()[1:-1]
    }
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*" and {line[1:] for line in lines if line.startswith("!")} == copied
    assert copied and all((ROOT / path).exists() for path in copied)


def test_pods_run_as_the_user_of_the_image() -> None:
    text = DOCKERFILE.read_text()
    assert f"\nUSER {USER}:{USER}\n" in text and f"\nWORKDIR {HOME}\n" in text
