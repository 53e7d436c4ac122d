"""Bytes for people."""

from __future__ import annotations

from longcat_pd.sizing.memory import GIB, MIB


def gib(count: int) -> str:
    """In GiB, one digit behind the point."""
    return f"{count / GIB:.1f}"


def size(count: int) -> str:
    """In the unit that says most."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"
