"""Natural sizes: when something presses against one of these limits, a noun is missing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.syntax import parsed
from tests.unit.test_floors import FILES, imports, place

FILE_LINES, FUNCTION_LINES, PARAMETERS, ATTRIBUTES, METHODS, OWN_IMPORTS = 400, 50, 7, 15, 12, 10

TOOLS = sorted((Path(__file__).parents[2] / "tools").rglob("*.py"))


def too_large(file: Path) -> Iterator[str]:
    text = file.read_text(encoding="utf-8")
    if (lines := text.count("\n")) > FILE_LINES:
        yield f"{lines} lines"
    ours = {module for module in imports(file) if module.startswith("longcat_pd.")}
    if len(ours) > OWN_IMPORTS:
        yield f"imports {len(ours)} of our own modules"
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (f"{node.lineno}: {node.name} {complaint}" for complaint in of_function(node))
        elif isinstance(node, ast.ClassDef):
            yield from (f"{node.lineno}: {node.name} {complaint}" for complaint in of_class(node))


def of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    names = [
        a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if a.arg not in ("self", "cls")
    ]
    if lines > FUNCTION_LINES:
        yield f"has {lines} lines"
    if len(names) > PARAMETERS:
        yield f"takes {len(names)} parameters"


def of_class(node: ast.ClassDef) -> Iterator[str]:
    stored = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }
    methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
    public = [name for name in methods if not name.startswith("_")]
    if len(stored) > ATTRIBUTES:
        yield f"stores {len(stored)} attributes"
    if len(public) > METHODS:
        yield f"has {len(public)} public methods"


@pytest.mark.parametrize("file", FILES, ids=place)
def test_nothing_is_too_large(file: Path) -> None:
    assert list(too_large(file)) == []


@pytest.mark.parametrize("file", TOOLS, ids=lambda file: file.relative_to(TOOLS[0].parent).as_posix())
def test_no_tool_is_too_large(file: Path) -> None:
    assert list(too_large(file)) == []
