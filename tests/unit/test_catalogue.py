"""docs/failures.md: every test that it names exists, and every case has one in each folder that it has to be shown in."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("unit", "parity", "integration", "fault", "soak")
ASKED = {  # by folder, the cases that are to be shown there
    "unit": {1, 2, 3, 6, 8, 9, 14, 17, 18, 19, 20, 21, 22, 23, 26, 31, 32, 34, 36},
    "parity": {18, 25, 27, 28, 29, 30, 36},
    "integration": {4, 10, 17, 30, 31, 33, 34, 35},
    "fault": {1, 2, 4, 5, 7, 8, 9, 11, 12, 13, 14, 15, 16, 18, 19, 20, 21, 22, 23, 25, 26, 35, 36},
    "soak": {24},
}
NAME = re.compile(r"`(\w+)::(\w+)`|\b(parity|integration|fault|soak)\b")


def rows() -> dict[int, set[tuple[str, str, str]]]:
    """By case: folder, file and function of the tests in its row."""
    found = {}
    for line in (ROOT / "docs" / "failures.md").read_text(encoding="utf-8").splitlines():
        if not re.match(r"\| \d", line):
            continue
        number, _, _, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 3, line
        named = set()
        for cell, first in zip(cells, ("unit", "", ""), strict=True):
            folder = first
            for match in NAME.finditer(cell):
                folder = match[3] or folder
                if match[1]:
                    assert folder, f"{number}: {match[0]} is in no folder"
                    named.add((folder, f"test_{match[1]}.py", f"test_{match[2]}"))
        assert int(number) not in found
        found[int(number)] = named
    return found


def functions_of(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_all_cases_are_there_once() -> None:
    assert sorted(rows()) == list(range(1, 37))


@pytest.mark.parametrize("number", range(1, 37))
def test_what_is_named_exists(number: int) -> None:
    for folder, file, name in rows()[number]:
        path = ROOT / "tests" / folder / file
        assert path.is_file(), f"{number}: there is no {path}"
        assert name in functions_of(path), f"{number}: {path} has no {name}"


def test_every_case_is_shown_in_its_folders() -> None:
    found = rows()
    missing = {
        (folder, number)
        for folder, numbers in ASKED.items()
        for number in numbers
        if not any(where == folder for where, _, _ in found[number])
    }
    assert not missing


def test_the_table_is_really_read() -> None:
    assert {folder for named in rows().values() for folder, _, _ in named} <= set(FOLDERS)
    assert sum(map(len, rows().values())) > 90
