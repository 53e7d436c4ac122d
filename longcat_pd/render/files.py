"""What was rendered, as text and as files. Knows nothing of what it says."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from longcat_pd.errors import ConfigError


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as such, and no anchors: each object stands for itself."""

    def ignore_aliases(self, data: object) -> bool:
        """Always."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def as_yaml(item: object) -> str:
    """An object as YAML, keys in their order."""
    return yaml.dump(item, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def write(files: Mapping[str, str], folder: Path | None) -> None:
    """Files into a folder, which is made, or without one to standard output. Raises ConfigError."""
    if folder is None:
        sys.stdout.write("".join(f"# {name}\n{text}" for name, text in files.items()))
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror}", param="--out") from error
