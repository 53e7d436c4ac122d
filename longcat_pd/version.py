"""The version of this code, wherever it lies: a release on a machine is a tree, which nobody has installed there."""

from __future__ import annotations

VERSION = "0.1.0"  # as in pyproject.toml
