"""Parsed source files for tests that read the code."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def parsed(file: Path) -> ast.Module:
    """The syntax tree of a file. Without a garbage collection in the middle, which makes ``ast.parse`` of Python up to 3.12
    raise SystemError now and then (AST constructor recursion depth mismatch)."""
    gc.disable()
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    finally:
        gc.enable()
