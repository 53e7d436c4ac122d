"""Both halves of the tests count: in the status, and in the closing line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import halves

GOOD, BAD, NOTHING = "def test_it(): pass\n", "def test_it(): assert False\n", ""


def test_every_folder_with_tests_is_in_one_half() -> None:
    found = [Path(path).name for half in halves.halves() for path in half]
    folders = {file.relative_to(halves.TESTS).parts[0] for file in halves.TESTS.glob("*/**/test_*.py")}
    assert sorted(found) == sorted(folders)


@pytest.mark.parametrize(
    ("fault", "unit", "status", "closing"),
    [
        (GOOD, GOOD, 0, "3 passed in "),
        (BAD, GOOD, 1, "1 failed, 2 passed in "),
        (GOOD, BAD, 1, "1 failed, 2 passed in "),
        (GOOD, "import nowhere\n", 2, "2 passed, 1 error in "),
        (GOOD, NOTHING, 5, "2 passed in "),
    ],
)
def test_the_worse_end_is_the_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    fault: str,
    unit: str,
    status: int,
    closing: str,
) -> None:
    for name, text in (("fault", fault), ("integration", GOOD), ("unit", unit)):
        (tmp_path / "tests" / name).mkdir(parents=True)
        (tmp_path / "tests" / name / f"test_{name}.py").write_text(text)
    monkeypatch.setattr(halves, "TESTS", tmp_path / "tests")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # none is wanted, and they take a second each time
    assert halves.run(["-q", "-p", "no:cacheprovider"]) == status
    assert capfd.readouterr().out.splitlines()[-1].startswith(closing)
