"""``python .../longcat_pd/own.py MODULE ARGUMENT ...``: as ``python -m``, but of the tree that this file is in.

``python -m`` looks into the current folder first, where another tree may lie, or a ``yaml.py``. Imports nothing of ours.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

_FILE = Path(__file__).absolute()
_TREE = _FILE.parents[1]
_SAFE = ("-P",) if sys.version_info >= (3, 11) else ()  # which what is started inside inherits, as forkservers


def command(*arguments: str) -> list[str]:
    """This interpreter with these arguments; a module behind ``-m`` is this tree's, wherever it is started."""
    if arguments[:1] != ("-m",):
        return [sys.executable, *arguments]
    return [sys.executable, *_SAFE, str(_FILE), *arguments[1:]]


def _run() -> None:
    sys.path[:] = [place for place in sys.path if place not in ("", str(_FILE.parent))]
    if _TREE.name not in ("site-packages", "dist-packages"):
        sys.path.insert(0, str(_TREE))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run()
