"""Ports for processes that a test starts; as far as possible none that another test run here was given a moment ago."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from collections import deque
from pathlib import Path

KEPT = 3  # spans that stay claimed: whoever asked for more has bound the older ones by now


class Claims:
    """Spans of ports that are this process's: locks on as many bytes of a file, which end with the process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._held = deque[range]()

    def take(self, span: range) -> bool:
        """Whether the span is this process's now. The oldest of more than ``KEPT`` is anybody's again."""
        if any(span.start < held.stop and held.start < span.stop for held in self._held):
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, len(span), span.start)
        except OSError:
            return False
        self._held.append(span)
        if len(self._held) > KEPT:
            oldest = self._held.popleft()
            fcntl.lockf(self._file, fcntl.LOCK_UN, len(oldest), oldest.start)
        return True


_CLAIMS = Claims(Path(tempfile.gettempdir()) / f"longcat-pd-test-ports-{os.getuid()}")


def free_base(span: int = 10) -> int:
    """A port that is free now, as are those behind it; below the range that outgoing connections take theirs from."""
    free = None
    for base in random.sample(range(20000, 30000 - span, 10), 200):
        ports = range(base, base + span)
        if all(map(_is_free, ports)):
            if _CLAIMS.take(ports):
                return base
            free = base
    assert free is not None, "no free ports"
    return free  # claimed by somebody, as all are


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
