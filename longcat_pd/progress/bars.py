"""The steps of a start as somebody sees them: lines that move in a terminal, and two lines for each step anywhere else.

Owns what a step looks like and the lines at the bottom of a terminal. Knows stages, and no ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from longcat_pd.progress.steps import TOLD_S, UNITS, Stage

_BAR = 20  # characters
_SIZES = (("B", 1), ("kB", 1_000), ("MB", 1_000_000), ("GB", 1_000_000_000), ("TB", 1_000_000_000_000))


class Bars:
    """The starts of one command. As a context it takes its moving lines away at the end.

    Between two drawings the cursor stands on an empty row above the moving lines, so a line that somebody else writes to
    the terminal, as a rank process to its log, stays, and what moves is drawn below it; a second one before the next
    drawing may keep the end of a moving line behind it. A terminal that cannot be written to any more is given up.

    Args:
        stream: where they are shown; one that is no terminal gets a line when a step begins and one when it has ended.
    """

    def __init__(self, stream: TextIO, *, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._now = now
        self._moves = stream.isatty()
        self._begun: set[tuple[str, str]] = set()
        self._ended: set[tuple[str, str]] = set()
        self._is_gone = False
        self._moving: dict[str, str] = {}  # by name; the line of the step in work
        self._num_drawn = 0
        self._drawn_at = -TOLD_S

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._moving.clear()
        self._clear()

    def show(self, name: str, stages: Sequence[Stage]) -> None:
        """What is known of the start of ``name`` now."""
        has_begun = any((name, stage.step) not in self._begun for stage in stages)
        lasting = [line for stage in stages for line in self._lasting(name, stage)]
        going_on = [stage for stage in stages if not stage.has_ended]
        if going_on:
            self._moving[name] = _moving(name, going_on[-1])
        else:
            self._moving.pop(name, None)
        if lasting:
            self.say(lambda: self._write("".join(f"{line}\n" for line in lasting)))
        elif self._moves and (has_begun or self._now() - self._drawn_at >= TOLD_S):
            self.say(lambda: None)

    def say(self, tell: Callable[[], None]) -> None:
        """``tell`` writes whole lines, above those that move."""
        self._clear()
        tell()
        self._draw()

    def _lasting(self, name: str, stage: Stage) -> list[str]:
        """Lines that stay, each told once."""
        key, lines = (name, stage.step), []
        if key not in self._begun and not self._moves:
            lines.append(f"{name} {stage.step}: begins")
        self._begun.add(key)
        if stage.has_ended and key not in self._ended:
            self._ended.add(key)
            lines.append(f"{name} {stage.step}: {_amount(stage)} in {stage.seconds:.1f} s")
        return lines

    def _clear(self) -> None:
        if self._num_drawn:
            self._write("\r\x1b[J")
        self._num_drawn = 0

    def _draw(self) -> None:
        if not self._moves or not self._moving:
            return
        columns, rows = self._size()
        shown = [line[: max(columns - 1, 1)] for line in self._moving.values()][: max(rows - 2, 1)]
        self._write("\n" + "".join(f"{line}\n" for line in shown) + f"\r\x1b[{len(shown) + 1}A")
        self._num_drawn, self._drawn_at = len(shown), self._now()

    def _size(self) -> tuple[int, int]:
        try:
            return os.get_terminal_size(self._stream.fileno())
        except OSError:  # no terminal any more
            return 1, 1

    def _write(self, text: str) -> None:
        if self._is_gone:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # who does not see a start must not end it
            self._is_gone = True


def size(num_bytes: int) -> str:
    """Bytes as people read them."""
    unit, factor = next(one for one in reversed(_SIZES) if num_bytes >= one[1] or one[1] == 1)
    return f"{num_bytes / factor:.0f} {unit}" if factor == 1 else f"{num_bytes / factor:.1f} {unit}"


def _moving(name: str, stage: Stage) -> str:
    share = min(stage.done / stage.total, 1.0) if stage.total else 1.0
    filled = int(share * _BAR)
    bar = f"[{'#' * filled}{'.' * (_BAR - filled)}] {share:4.0%}"
    if UNITS[stage.step] == "bytes":
        amount = f"{size(stage.done)} of {size(stage.total)}"
    else:
        amount = f"{stage.done} of {stage.total} {UNITS[stage.step]}"
    return f"{name} {stage.step}: {bar}  {amount}, {stage.seconds:.0f} s"


def _amount(stage: Stage) -> str:
    return size(stage.done) if UNITS[stage.step] == "bytes" else f"{stage.done} {UNITS[stage.step]}"
