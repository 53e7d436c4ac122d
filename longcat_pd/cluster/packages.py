"""Which packages an interpreter must have to run this product, and how one on another machine is asked for them.

The list is ``pyproject.toml``'s, and the torch of the device. Knows nothing of releases.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from longcat_pd.cluster.everywhere import StepFailed
from longcat_pd.cluster.shell import Shell

OLDEST_PYTHON = (3, 10)
ASK_S = 60.0
_SCRIPT = Path(__file__).parent / "node" / "packages.py"
_OF_DEVICE = MappingProxyType({"npu": ("torch_npu",)})
# Modules that are named otherwise than their distributions.
_MODULES = MappingProxyType({"prometheus-client": "prometheus_client", "pyyaml": "yaml", "pyzmq": "zmq"})


@dataclass(frozen=True, kw_only=True)
class Packages:
    """What an interpreter has. ``versions``: by distribution."""

    python: str
    missing: tuple[str, ...]
    versions: Mapping[str, str]

    @property
    def complaint(self) -> str:
        """Why it cannot run us; "" if it can."""
        found = tuple(int(part) for part in re.findall(r"\d+", self.python)[:2])
        if found < OLDEST_PYTHON:
            return f"is Python {self.python}; {'.'.join(map(str, OLDEST_PYTHON))} or newer is needed"
        return f"lacks {', '.join(self.missing)}" if self.missing else ""


def needed(pyproject: str, device: Literal["cpu", "cuda", "npu"]) -> tuple[str, ...]:
    """Distributions that a ``pyproject.toml`` asks for, and torch."""
    block = re.search(r"^dependencies = \[(.*?)^\]", pyproject, re.MULTILINE | re.DOTALL)
    names = re.findall(r'^\s*"([A-Za-z0-9._-]+)', block.group(1), re.MULTILINE) if block else []
    return (*names, "torch", *_OF_DEVICE.get(device, ()))


def ask(shell: Shell, python: str, names: Sequence[str]) -> Packages:
    """What ``python`` of a machine has of ``names``. Raises StepFailed if it does not run, and Unreachable."""
    wanted = [f"{name}={_MODULES.get(name, name.replace('-', '_'))}" for name in names]
    done = shell.run([python, "-I", "-c", _SCRIPT.read_text(encoding="utf-8"), *wanted], timeout_s=ASK_S)
    if done.status:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise StepFailed(shell.node, f"{python} does not run (exit status {done.status}): {said[-1] if said else ''}")
    try:
        told = json.loads(done.stdout)
    except ValueError as error:
        raise StepFailed(shell.node, f"{python} is no Python: it says {done.stdout[:80]!r}") from error
    return Packages(python=told["python"], missing=tuple(told["missing"]), versions=told["versions"])
