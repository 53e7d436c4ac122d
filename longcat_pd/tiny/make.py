"""write_tiny: a small random checkpoint in the real format, from config to tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from longcat_pd.config.model import ModelConfig
from longcat_pd.models.tensor_names import draft_tensors, expected_tensors
from longcat_pd.models.weights import write_checkpoint
from longcat_pd.tiny.configs import GENERATION_CONFIG, make_config
from longcat_pd.tiny.predictable import predictable
from longcat_pd.tiny.tensors import random_tensors
from longcat_pd.tiny.tokenizer import text_files

VARIANTS_WITH_DRAFT = ("2.0", "lite-sparse", "chat")  # chat's config.json does not mention its draft layer
PREDICTABLE = "+predictable"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
DEFAULT_SHARD_BYTES = 1_000_000  # several shards, so that reading them is exercised


def write_tiny(
    path: Path,
    variant: str,
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    with_tokenizer: bool = True,
    overrides: Sequence[str] = (),
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write the checkpoint folder ``path``, which appears complete or not at all (``write_checkpoint``).

    The same arguments give the same bytes. ``overrides`` are ``key=value`` of ``config.json`` (``make_config``). Raises
    ConfigError when they do not fit together, or when the folder exists and is not empty. A ``variant`` that ends
    with PREDICTABLE has tokens that mostly follow from the one before, and drafts that are mostly right.
    """
    is_predictable = variant.endswith(PREDICTABLE)
    variant = variant.removesuffix(PREDICTABLE)
    fields = make_config(variant, overrides, dtype=dtype)
    config = ModelConfig.from_dict(fields)
    shapes = expected_tensors(config)
    if variant in VARIANTS_WITH_DRAFT:
        shapes |= draft_tensors(config)
    generation = GENERATION_CONFIG | {key: fields[key] for key in ("bos_token_id", "eos_token_id") if key in fields}
    texts = {"generation_config.json": json.dumps(generation, indent=2) + "\n"}
    if with_tokenizer:
        texts |= text_files(variant, vocab_size=config.vocab_size, max_length=config.max_position_embeddings)
    tensors = random_tensors(shapes, seed, dtype=DTYPES[dtype])
    if is_predictable:
        tensors = predictable(tensors, has_ngrams=config.over_embedding is not None)
    write_checkpoint(path, tensors, fields, max_shard_bytes=max_shard_bytes, files=texts)
