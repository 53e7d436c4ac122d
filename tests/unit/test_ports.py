"""Ports that one test run was given are not given to another beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.ports import KEPT, Claims

OTHER = (
    "import sys, pathlib; from tests.ports import Claims; print(Claims(pathlib.Path(sys.argv[1])).take(range({0}, {1})))"
)


def other_gets(path: Path, span: range) -> bool:
    """Whether another process gets it now."""
    command = [sys.executable, "-c", OTHER.format(span.start, span.stop), str(path)]
    root = Path(__file__).parents[2]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout == "True\n"


def test_a_claim_holds_against_all_until_it_is_old(tmp_path: Path) -> None:
    claims = Claims(tmp_path / "ports")
    assert claims.take(range(20000, 20400))
    assert not claims.take(range(20390, 20400))
    assert not other_gets(tmp_path / "ports", range(20390, 20410))
    assert other_gets(tmp_path / "ports", range(20400, 20410))
    for number in range(KEPT):
        assert claims.take(range(21000 + 10 * number, 21010 + 10 * number))
    assert other_gets(tmp_path / "ports", range(20390, 20410))
    assert claims.take(range(20390, 20410))
