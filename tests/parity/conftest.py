"""Small checkpoints for the whole session, made once per set of arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from longcat_pd.tiny.make import write_tiny

MakeCheckpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """tiny(variant, *overrides, dtype="float32", seed=0, with_tokenizer=False) -> folder."""
    made: dict[tuple[object, ...], Path] = {}

    def make(variant: str, *overrides: str, dtype: str = "float32", seed: int = 0, with_tokenizer: bool = False) -> Path:
        key = (variant, overrides, dtype, seed, with_tokenizer)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("tiny") / variant
            write_tiny(made[key], variant, seed=seed, dtype=dtype, with_tokenizer=with_tokenizer, overrides=overrides)
        return made[key]

    return make
