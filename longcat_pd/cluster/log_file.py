"""The log of one service: which of its lines are wanted, and how far it has been read. Knows no other log."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from longcat_pd.cluster.jobs import LogLine, LogQuery
from longcat_pd.log import Level

LEVELS: tuple[Level, ...] = get_args(Level)  # the least first

_HEAD = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (\w+) ")
_WORDS_OF_A_FAULT = ("Traceback (most recent call last)", "Fatal Python error", "error: ")  # of lines without a level


class Choice:
    """Judges the lines of one log, one after another. A line without a time goes with the line before it.

    Args:
        since: a time as logs write it; empty: all times.
    """

    def __init__(self, query: LogQuery, since: str) -> None:
        self._since = since
        self._least = LEVELS.index(query.level)
        self._mark = re.compile(rf" request={re.escape(query.request)}(?= |$)") if query.request else None
        self._at = ""
        self._level = 0
        self._is_about = self._mark is None
        self.latest = ""  # of all times so far

    def takes(self, text: str) -> bool:
        """Whether the next line is wanted."""
        head = _HEAD.match(text)
        if head is not None:
            self._at, level = head.groups()
            self.latest = max(self.latest, self._at)
            self._level = next((place for place, name in enumerate(LEVELS) if name == level), 0)
            self._is_about = self._mark is None or self._mark.search(text) is not None
        elif text.startswith(_WORDS_OF_A_FAULT):
            self._level = len(LEVELS) - 1
        return self._is_about and self._level >= self._least and self._at >= self._since


class LogFile:
    """One log and how far it has been read. One that was begun anew is read from its start, behind the rest of the old."""

    def __init__(self, service: str, path: Path, choice: Choice) -> None:
        self.service = service
        self.path = path
        self._choice = choice
        self._file: int | None = None
        self._place = 0

    def added(self) -> Iterator[LogLine]:
        """The wanted ones of the whole lines that have come since the last time; at first, all that are there."""
        if not self.path.is_file():
            return
        found = self.path.stat()
        if found.st_ino != self._file:
            before = Path(f"{self.path}.1")
            if self._file is not None and before.is_file() and before.stat().st_ino == self._file:
                yield from self._read(before)
            self._file, self._place = found.st_ino, 0
        elif found.st_size < self._place:
            self._place = 0
        yield from self._read(self.path)

    def _read(self, path: Path) -> Iterator[LogLine]:
        """Up to where the file ends now, so that one which grows quickly does not hold up the others."""
        with path.open("rb") as file:
            end = os.fstat(file.fileno()).st_size
            file.seek(self._place)
            while self._place < end and (line := file.readline()).endswith(b"\n"):
                self._place += len(line)
                text = line.decode(errors="replace").rstrip("\r\n")
                if self._choice.takes(text):
                    yield LogLine(service=self.service, at=self._choice.latest, text=text)
