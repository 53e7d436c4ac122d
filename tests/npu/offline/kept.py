"""Figures that are kept as text beside the tests, for people to read: a difference fails.

To write a section anew delete it, or the file, and run the tests: who finds none writes it and fails.
"""

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

WIDTH = 118


def check_kept(path: Path, sections: Mapping[str, Iterable[str]]) -> None:
    """The file has these sections, by title, with these lines."""
    text = path.read_text() if path.exists() else ""
    kept = dict(section.split("\n", 1) for section in f"\n{text}".split("\n# ")[1:])
    missing, other = [], []
    for title, lines in sections.items():
        found = "".join(f"{line}\n" for line in lines)
        if title not in kept:
            missing.append(title)
            text += f"# {title}\n{found}\n"
        elif kept[title].strip() != found.strip():
            other.append(f"# {title}\n{found}")
    if missing:
        path.write_text(text)
    assert not other, f"{path.name} has something else about:\n" + "\n".join(other)
    assert not missing, f"{path.name} had nothing about {missing}; now it has"


def wrapped(text: str) -> list[str]:
    """As lines, the first of them further to the left."""
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
