"""Who is to read which tensor of a checkpoint, from the layout alone: the other side of what modules ask for.

Owns the axis that splits each tensor, by its name. Knows no modules and no files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from longcat_pd.config.model import ModelConfig
from longcat_pd.models.stage import Stage
from longcat_pd.models.tensor_names import (
    DRAFT_EMBEDDING,
    SCALE,
    WEIGHT,
    Shape,
    can_be_int8,
    draft_tensors,
    expected_tensors,
)
from longcat_pd.parallel.layout import AxisName

_WORD, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")
_TABLE = re.compile(r"model\.(oe_embed_tokens\d+|ngram_embeddings\.embedders\.\d+)\.weight")
_DENSE = (".mlps.", ".transformer_layer.mlp.")
_OF_HEADS = (".q_b_proj.weight", ".kv_b_proj.weight", ".o_proj.weight")


@dataclass(frozen=True, slots=True)
class Use:
    """One reading of a tensor by the ranks of a pipeline stage.

    Attributes:
        axis: its ranks read the tensor once, together; None: every rank of the stage reads all of it.
        owner: the place on the axis whose rank reads it whole; None: each has a part, in the order of places.
    """

    name: str
    shape: Shape
    axis: AxisName | None
    owner: int | None = None


def tensors_of(config: ModelConfig, int8: Collection[str]) -> dict[str, Shape]:
    """All tensors of a checkpoint with its draft layer; scales beside those that are int8."""
    found: dict[str, Shape] = {}
    for name, shape in (*expected_tensors(config).items(), *draft_tensors(config).items()):
        found[name] = shape
        if name.removesuffix(WEIGHT) in int8:
            found[name.removesuffix(WEIGHT) + SCALE] = shape[:1]
    return found


def int8_of(config: ModelConfig) -> frozenset[str]:
    """Names, without ``.weight``, of what is int8 according to ``config.json``."""
    names = (name for name in (*expected_tensors(config), *draft_tensors(config)) if can_be_int8(name))
    modules = (name.removesuffix(WEIGHT) for name in names)
    return frozenset(module for module in modules if config.quantization is not None and config.quantization.covers(module))


def uses_of(stage: Stage, tensors: Mapping[str, Shape], config: ModelConfig, *, ep_size: int) -> Iterator[Use]:
    """What a stage reads of the ``tensors``. A tied head is the word embedding, read once more, behind the first time."""
    experts_each = config.n_routed_experts // ep_size
    for name, shape in tensors.items():
        if not _is_read(name, stage):
            continue
        expert = _EXPERT.search(name)
        if expert is not None and ep_size > 1:
            yield Use(name, shape, "ep", int(expert[1]) // experts_each)
        else:
            yield Use(name, shape, _axis(name))
    if config.tie_word_embeddings and stage.is_last:
        yield Use(_WORD, tensors[_WORD], "lmhead_tp")


def _is_read(name: str, stage: Stage) -> bool:
    layer = _LAYER.match(name)
    if layer is not None:
        return int(layer[1]) in stage.layers
    if name.startswith("model.mtp."):
        return stage.has_draft
    return stage.is_last if name in (_HEAD, _NORM) else stage.is_first


def _axis(name: str) -> AxisName | None:
    if ".mlp.experts." in name:
        return "moe_tp"
    if name in (_WORD, f"{DRAFT_EMBEDDING}.weight"):
        return "embed_tp"
    if name == _HEAD:
        return "lmhead_tp"
    if _TABLE.fullmatch(name):
        return "ngram_embed_tp"
    if any(part in name for part in _DENSE):
        return "dense_tp"
    return "attn_tp" if name.endswith(_OF_HEADS) else None
