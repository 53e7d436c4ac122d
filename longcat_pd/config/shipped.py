"""Where the small trained LongCat-2.0 lies that comes with the package: ``tiny/trained/bf16``, and its int8 twin.

Owns the place and the name that it is served under. Reads no tensor; what it was taught, and how well it does, stands in
``tiny/trained/score_card.md``.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Literal

from longcat_pd.errors import ConfigError

Variant = Literal["bf16", "int8"]
SERVED_NAME = "longcat-tiny"
_INDEX = "model.safetensors.index.json"
_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    _INDEX,
)


def shipped_checkpoint(variant: Variant = "bf16") -> Path:
    """Its folder. Raises ConfigError with the folder and the names of files that an installation lacks."""
    return _whole(Path(str(files("longcat_pd"))) / "tiny" / "trained" / variant)


def _whole(folder: Path) -> Path:
    lacking = [name for name in _FILES if not (folder / name).is_file()]
    if _INDEX not in lacking:
        shards = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        lacking += sorted(name for name in shards if not (folder / name).is_file())
    if lacking:
        text = f"the trained checkpoint of the package lacks {', '.join(lacking)}"
        raise ConfigError(f"{folder}: {text}; install longcat_pd again, or name another checkpoint", param="model.path")
    return folder
