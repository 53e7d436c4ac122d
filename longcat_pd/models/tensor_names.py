"""The tensors of a whole checkpoint: every name with its shape, as the releases spell them.

Owns the names of a complete file, for the writer and for telling missing and surplus tensors. Modules say themselves
which of them they read (WeightSpec). Knows neither torch nor files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from longcat_pd.config.model import IndexerConfig, ModelConfig

Shape = tuple[int, ...]

# The draft layer travels with the target's weights but is no part of it; 2.0 even stores n-gram tables for it that
# nothing reads.
IGNORABLE_PREFIX = "model.mtp."

DRAFT_EMBEDDING = "model.mtp.embed_tokens"

# The two families of names for n-gram tables and their projections.
_TABLE_SPELLINGS = (
    ("model.oe_embed_tokens{}.weight", "model.ngram_embeddings.embedders.{}.weight"),
    ("model.oe_embed_proj{}.weight", "model.ngram_embeddings.post_projs.{}.weight"),
)


# The modules that may be int8: the dense MLPs, the experts, and the draft layer's MLP.
_INT8_MODULE = re.compile(
    r"model\.(layers\.\d+\.(mlps\.\d+|mlp\.experts\.\d+)|mtp\.layers\.\d+\.transformer_layer\.mlp)\.(gate|up|down)_proj"
)

WEIGHT, SCALE, OFFSET = ".weight", ".weight_scale", ".weight_offset"


def can_be_int8(name: str) -> bool:
    """Whether a checkpoint may hold this tensor as int8, with a tensor of scales beside it."""
    return name.endswith(WEIGHT) and _INT8_MODULE.fullmatch(name.removesuffix(WEIGHT)) is not None


def weight_of(name: str) -> str | None:
    """The tensor that a scale or an offset belongs to, if it can be int8; None for any other name."""
    for end in (SCALE, OFFSET):
        weight = name.removesuffix(end) + WEIGHT
        if name.endswith(end) and can_be_int8(weight):
            return weight
    return None


def is_ignorable(name: str) -> bool:
    """Whether a checkpoint may hold this tensor without anybody reading it."""
    return name.startswith(IGNORABLE_PREFIX)


def other_spelling(name: str) -> str | None:
    """How the other family spells an n-gram tensor; None for all other tensors.

    The config's fields have two spellings as well, and not every file pairs them as the releases do.
    """
    number = re.search(r"[0-9]+", name)
    if number is None:
        return None
    for first, second in _TABLE_SPELLINGS:
        for ours, theirs in ((first, second), (second, first)):
            if name == ours.format(number[0]):
                return theirs.format(number[0])
    return None


def stand_in(name: str) -> str | None:
    """What is read in place of a tensor that a checkpoint may lack: the draft layer can embed with the target's table."""
    return "model.embed_tokens.weight" if name == f"{DRAFT_EMBEDDING}.weight" else None


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """All tensors of the model proper, in the order of the computation."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    shapes.update(_ngram_tables(config))
    for layer in range(config.num_layers):
        shapes.update(_layer(config, layer))
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def draft_tensors(config: ModelConfig) -> dict[str, Shape]:
    """All tensors of the one stored draft layer: a plain dense block with its own embedding and norm."""
    hidden, prefix = config.hidden_size, "model.mtp.layers.0"
    shapes: dict[str, Shape] = {
        "model.mtp.embed_tokens.weight": (config.vocab_size, hidden),
        "model.mtp.norm.weight": (hidden,),
        f"{prefix}.eh_proj.weight": (hidden, 2 * hidden),
    }
    for norm in ("enorm.m", "hnorm.m", "input_layernorm", "post_attention_layernorm"):
        shapes[f"{prefix}.{norm}.weight"] = (hidden,)
    shapes.update(_attention(config, f"{prefix}.self_attn"))
    if config.indexer is not None:
        shapes.update(_indexer(config, config.indexer, f"{prefix}.self_attn.indexer"))
    shapes.update(_mlp(f"{prefix}.transformer_layer.mlp", hidden, config.ffn_hidden_size))
    return shapes


def _ngram_tables(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    tables = config.over_embedding
    if tables is None:
        return
    for b, rows in enumerate(tables.table_sizes):
        if tables.tensor_family == "oe_embed":
            table, projection = f"model.oe_embed_tokens{b}", f"model.oe_embed_proj{b}"
        else:
            table, projection = f"model.ngram_embeddings.embedders.{b}", f"model.ngram_embeddings.post_projs.{b}"
        yield f"{table}.weight", (rows, config.oe_width)
        yield f"{projection}.weight", (config.hidden_size, config.oe_width)


def _layer(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    hidden, prefix = config.hidden_size, f"model.layers.{layer}"
    for j in (0, 1):
        yield f"{prefix}.input_layernorm.{j}.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.{j}.weight", (hidden,)
        yield from _attention(config, f"{prefix}.self_attn.{j}")
        if config.indexer is not None and config.owns_index(2 * layer + j):
            yield from _indexer(config, config.indexer, f"{prefix}.self_attn.{j}.indexer")
        yield from _mlp(f"{prefix}.mlps.{j}", hidden, config.ffn_hidden_size)
    yield f"{prefix}.mlp.router.classifier.weight", (config.num_router_outputs, hidden)
    yield f"{prefix}.mlp.router.e_score_correction_bias", (config.num_router_outputs,)
    for expert in range(config.n_routed_experts):
        yield from _mlp(f"{prefix}.mlp.experts.{expert}", hidden, config.expert_ffn_hidden_size)


def _attention(config: ModelConfig, prefix: str) -> Iterator[tuple[str, Shape]]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    yield f"{prefix}.q_a_proj.weight", (config.q_lora_rank, hidden)
    yield f"{prefix}.q_a_layernorm.weight", (config.q_lora_rank,)
    yield f"{prefix}.q_b_proj.weight", (heads * config.qk_head_dim, config.q_lora_rank)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (config.kv_lora_rank + config.qk_rope_head_dim, hidden)
    yield f"{prefix}.kv_a_layernorm.weight", (config.kv_lora_rank,)
    yield f"{prefix}.kv_b_proj.weight", (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank)
    yield f"{prefix}.o_proj.weight", (hidden, heads * config.v_head_dim)


def _indexer(config: ModelConfig, indexer: IndexerConfig, prefix: str) -> Iterator[tuple[str, Shape]]:
    heads, dim = indexer.index_n_heads, indexer.index_head_dim
    yield f"{prefix}.wq_b.weight", (heads * dim, config.q_lora_rank)
    yield f"{prefix}.wk.weight", (dim, config.hidden_size)
    yield f"{prefix}.k_norm.weight", (dim,)
    if indexer.index_k_norm_type == "layer":
        yield f"{prefix}.k_norm.bias", (dim,)
    yield f"{prefix}.weights_proj.weight", (heads, config.hidden_size)


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)
