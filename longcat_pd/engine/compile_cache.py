"""Compiled steps on disk: under which facts each was made, and whether these are still the facts.

A folder holds two files for each graph: the artifact, and a record of the facts it depends on with the digest of its bytes.
What differs in any fact, or is not what was written, is made anew. The folder is as trusted as the code: artifacts are
executed. Knows no compiler; imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import longcat_pd
from longcat_pd.log import logger

Facts = Mapping[str, str]


def code_digest() -> str:
    """Digest of the source of this package."""
    root, total = Path(longcat_pd.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        total.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def short_digest(facts: Facts) -> str:
    """Equal for equal facts; short enough for a file name."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One graph's place in the cache.

    ``facts``: everything that the graph depends on, by name; a change of any makes a stored graph stale.
    """

    folder: Path
    name: str
    facts: Facts

    @property
    def artifact(self) -> Path:
        """The file of the graph."""
        return self.folder / f"{self.name}.graph"

    def is_fresh(self) -> bool:
        """Whether the stored graph may be used; logs one line about one that may not."""
        record = self.folder / f"{self.name}.json"
        if not record.exists() or not self.artifact.exists():
            return False
        reason = self._staleness(record)
        if reason:
            logger().info("compile_cache_stale", graph=self.name, reason=reason)
        return not reason

    def commit(self, made: Path) -> None:
        """Takes a file in the folder as the artifact, whole or not at all."""
        record = {"facts": dict(self.facts), "sha256": _digest(made)}
        part = made.with_suffix(".record")
        part.write_text(json.dumps(record, indent=1))
        made.replace(self.artifact)
        part.replace(self.folder / f"{self.name}.json")

    def _staleness(self, path: Path) -> str:
        try:
            record = json.loads(path.read_text())
            stored, digest = record["facts"], record["sha256"]
        except (ValueError, KeyError, TypeError):
            return "its record is damaged"
        if not isinstance(stored, dict):
            return "its record is damaged"
        changed = sorted(name for name in {*stored, *self.facts} if stored.get(name) != self.facts.get(name))
        if changed:
            return f"changed: {', '.join(changed)}"
        return "" if digest == _digest(self.artifact) else "its bytes are not those that were written"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
