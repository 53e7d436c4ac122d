"""Ports for processes that a test starts."""

from __future__ import annotations

import random
import socket


def free_base(span: int = 10) -> int:
    """A port that is free now, as are those behind it; below the range that outgoing connections take theirs from."""
    for base in random.sample(range(20000, 29990, 10), 100):
        if all(_is_free(base + offset) for offset in range(span)):
            return base
    raise AssertionError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
