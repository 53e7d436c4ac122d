"""The table's own tests once more, on the schemas of the oldest release that has all operators."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.npu.schema_lines import RELEASES

HERE = Path(__file__).parent


@pytest.mark.slow
def test_the_table_calls_operators_as_the_oldest_release_has_them() -> None:
    """In a process of its own: only one release fits into one."""
    files = [str(path) for path in sorted(HERE.glob("test_table_*.py"))]
    assert files
    code = (
        "import sys; import pytest; from tests.npu import device;"
        f"device.install.__defaults__ = ({RELEASES[0]!r},);"
        "status = pytest.main(sys.argv[1:]);"
        f"assert device.installed().release == {RELEASES[0]!r};"
        "sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE.parents[1], timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]
