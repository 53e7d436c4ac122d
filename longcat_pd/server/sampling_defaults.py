"""What is in force when a request says nothing about sampling: the checkpoint's ``generation_config.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longcat_pd.errors import ConfigError, InvalidRequest
from longcat_pd.server.fields import Fields


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """Temperature, top_p, top_k (0 = off)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def load(cls, folder: str) -> SamplingDefaults:
        """From a checkpoint's folder; without the file, 1, 1 and off. Raises ConfigError for values out of range."""
        path = Path(folder) / "generation_config.json"
        if not path.exists():
            return cls()
        try:
            given = Fields.of(json.loads(path.read_text(encoding="utf-8")), "generation_config.json")
            temperature = given.number("temperature", 0, 2)
            top_p = given.number("top_p", 0, 1, above_low=True)
            top_k = given.integer("top_k", -1)
        except (OSError, ValueError, InvalidRequest) as error:
            raise ConfigError(f"{path}: {error}", param="model.path") from None
        return cls(
            temperature=1.0 if temperature is None else temperature,
            top_p=1.0 if top_p is None else top_p,
            top_k=max(top_k or 0, 0),
        )

    def shown(self) -> dict[str, Any]:
        """As ``/server_info`` says it: off is -1 there."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k or -1}
