"""Figures that are kept as text beside the tests: a section for each, and a difference fails.

To write them anew delete the section, or the file, and run the tests: who finds none writes it and fails.
"""

from collections.abc import Sequence
from pathlib import Path


def same_as_kept(path: Path, title: str, lines: Sequence[str]) -> None:
    """The section with this title has these lines."""
    text = path.read_text() if path.exists() else ""
    sections = dict(section.split("\n", 1) for section in text.split("\n# ") if "\n" in section)
    found = "\n".join(lines) + "\n"
    if f"# {title}\n" not in f"\n{text}":
        path.write_text(f"{text}\n# {title}\n{found}")
        raise AssertionError(f"{path.name} had nothing about {title!r}; it has now")
    assert found.strip() == sections[title].strip(), f"{path.name}: {title}"
