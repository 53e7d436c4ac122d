"""Figures into the table of docs/benchmarks.md. Knows how they look, not how they were measured."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

BEGIN, END = "<!-- figures: written by `make bench` -->", "<!-- end of figures -->"
BEGIN_STAGES = "<!-- figures: written by `make bench-stages` -->"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure: what, ours, theirs (empty: nothing to compare with), ratio and its goal."""

    what: str
    ours: str
    other: str = ""
    ratio: float | None = None
    goal: str = ""


def compared(
    what: str, ours: Sequence[float], other: Sequence[float], *, unit: str, goal: str = "", them: str = "one engine"
) -> Row:
    """Medians, and the median of the ratios of what was measured in turn: a burst of other load hits both of a turn.

    Args:
        unit: "ms" or "s" of values in seconds; "" of a rate.
    """
    shown = [_shown(statistics.median(values), unit) for values in (ours, other)]
    ratio = statistics.median(a / b for a, b in zip(ours, other, strict=True))
    return Row(what=what, ours=shown[0], other=f"{them} {shown[1]}", ratio=ratio, goal=goal)


def _shown(value: float, unit: str) -> str:
    if unit == "ms":
        return f"{value * 1000:.{2 if value < 0.01 else 1}f} ms"
    return f"{value:.1f} s" if unit == "s" else f"{value:.0f}"


def machine() -> str:
    """What all figures of a run have in common."""
    python = f"Python {platform.python_version()}"
    return f"{os.cpu_count()} cores ({platform.machine()}), {python}, float32, one torch thread a rank."


def table(above: str, rows: Iterable[Row]) -> str:
    """The figures as Markdown, below a text."""
    return "\n".join([above, "", "| | ours | compared with | ratio | goal |", "|---|---|---|---|---|", *map(line, rows)])


def line(row: Row) -> str:
    """One figure of the table."""
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return f"| {row.what} | {row.ours} | {row.other} | {ratio} | {row.goal} |"


def write(path: Path, figures: str, begin_at: str = BEGIN) -> None:
    """Put the figures between two markers of the page; the rest of it stays. The page must have them."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(begin_at)
    _, end, after = rest.partition(END)
    assert begin and end, f"{path} lacks the markers of the figures"
    path.write_text(f"{before}{begin}\n\n{figures}\n\n{END}{after}", encoding="utf-8")
