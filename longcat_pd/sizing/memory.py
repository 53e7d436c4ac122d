"""Bytes of each rank, part by part, from the configuration and config.json alone: for the plan and for refusing a start.

Counts what a rank holds, not what the operating system shows: weights and cache exactly, workspace as an upper estimate
of the largest step. Knows no device and no tensors; what is available is the caller's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec, ParallelConfig

GIB, MIB = 1 << 30, 1 << 20
PROCESS_BYTES = 48 << 20  # what a rank process has of its own before it loads anything
DRAW_ELEMENTS = 1 << 22  # logits that are drawn from at once (kernels/reference/sampling.py), at least one row
DRAW_BYTES = 80  # for each of them, in fp64, sorted and summed up
COMPILER_BYTES = 512 << 20  # torch's compiler at its height; half of it stays

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2})


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What one rank needs. ``parts``: weights, n-gram tables, cache, index keys, drafts, workspace, process; in bytes."""

    rank: int
    parts: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


def instance_memory(spec: InstanceSpec, model: ModelConfig) -> tuple[RankMemory, ...]:
    """The need of every rank of one instance, in the order of ranks. ``spec`` is resolved."""
    stages = _first_layers(spec.parallel)
    return tuple(_rank_memory(rank, spec, model=model, stages=stages) for rank in range(spec.parallel.world_size))


def sum_of_parts(ranks: tuple[RankMemory, ...]) -> dict[str, int]:
    """Each part over all ranks, in the order of the parts."""
    return {name: sum(rank.parts[name] for rank in ranks) for name in ranks[0].parts}


def show_parts(parts: Mapping[str, int], *, unit: int = GIB) -> str:
    """``weights 41.0, cache 24.0, …`` in units of so many bytes, without what is too small to show."""
    shown = [f"{name} {value / unit:.1f}" for name, value in parts.items() if value >= unit / 20]
    return ", ".join(shown) or "all parts below 0.1"


def show_total(parts: Mapping[str, int]) -> str:
    """The sum and its parts, in GiB, or in MiB where that says more."""
    total = sum(parts.values())
    unit, name = (GIB, "GiB") if total >= 10 * GIB else (MIB, "MiB")
    return f"{total / unit:.1f} {name}: {show_parts(parts, unit=unit)}"


def stage_of(rank: int, parallel: ParallelConfig) -> int:
    """Pipeline stage of a rank: stages are the outer axis of an instance."""
    return rank * parallel.pp_size // parallel.world_size


def _first_layers(parallel: ParallelConfig) -> list[range]:
    ends = [sum(parallel.layers_per_stage[: stage + 1]) for stage in range(parallel.pp_size)]
    return [range(end - size, end) for end, size in zip(ends, parallel.layers_per_stage, strict=True)]


def _rank_memory(rank: int, spec: InstanceSpec, *, model: ModelConfig, stages: list[range]) -> RankMemory:
    stage = stage_of(rank, spec.parallel)
    layers = stages[stage]
    width = DTYPE_BYTES[spec.model.dtype]
    cached_tokens = spec.engine.num_blocks * spec.engine.block_size
    cached = [model.cached_widths(2 * layer + j) for layer in layers for j in (0, 1)]
    index_keys = sum(widths.get("index", 0) for widths in cached)
    latents = sum(sum(widths.values()) for widths in cached) - index_keys
    is_first, is_last = stage == 0, stage == spec.parallel.pp_size - 1
    has_draft = is_last and spec.engine.num_draft_tokens > 0
    return RankMemory(
        rank=rank,
        parts={
            "weights": _weights(model, spec.parallel, layers=layers, ends=is_first + is_last, width=width),
            "n-gram tables": _tables(model) * width if is_first else 0,
            "cache": cached_tokens * latents * width,
            "index keys": cached_tokens * index_keys * width,
            "drafts": _drafts(model, spec, cached_tokens=cached_tokens, width=width) if has_draft else 0,
            "workspace": _workspace(spec, model, width=width),
            "process": PROCESS_BYTES + COMPILER_BYTES * (spec.engine.exe_mode == "inductor"),
        },
    )


def _weights(model: ModelConfig, parallel: ParallelConfig, *, layers: range, ends: int, width: int) -> int:
    """``ends``: how many of embedding and head are here. Attention heads are split over attn_tp, all else is whole."""
    hidden, attention = model.hidden_size, _attention(model, parallel)
    router_bytes = model.num_router_outputs * (hidden + 1) * 4
    layer_bytes = (2 * attention + _indexer(model)) * width + router_bytes
    mlp_bytes = sum(_mlp_bytes(model, layer, width=width) for layer in layers)
    return len(layers) * layer_bytes + mlp_bytes + ends * model.vocab_size * hidden * width


def _mlp_bytes(model: ModelConfig, layer: int, *, width: int) -> int:
    """The dense MLPs and the experts of a layer."""
    sizes = {f"model.layers.{layer}.mlps.{j}": model.ffn_hidden_size for j in (0, 1)}
    experts = range(model.n_routed_experts)
    sizes |= {f"model.layers.{layer}.mlp.experts.{e}": model.expert_ffn_hidden_size for e in experts}
    return sum(_one_mlp_bytes(model, name, inner=inner, width=width) for name, inner in sizes.items())


def _one_mlp_bytes(model: ModelConfig, name: str, *, inner: int, width: int) -> int:
    """Gate, up and down: int8 with fp32 scales where ``quantization_config`` says so."""
    if model.quantization is None:
        return 3 * inner * model.hidden_size * width
    total = 0
    for part, num_rows in (("gate", inner), ("up", inner), ("down", model.hidden_size)):
        is_int8 = model.quantization.covers(f"{name}.{part}_proj")
        total += inner * model.hidden_size * (1 if is_int8 else width) + (4 * num_rows if is_int8 else 0)
    return total


def _attention(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Elements of one attention's projections on one rank."""
    hidden, heads = model.hidden_size, model.num_attention_heads // parallel.attn_tp_size
    latent, rope = model.kv_lora_rank, model.qk_rope_head_dim
    return (
        (model.q_lora_rank + latent + rope) * hidden
        + heads * model.qk_head_dim * model.q_lora_rank
        + heads * (model.qk_nope_head_dim + model.v_head_dim) * latent
        + heads * model.v_head_dim * hidden
    )


def _drafts(model: ModelConfig, spec: InstanceSpec, *, cached_tokens: int, width: int) -> int:
    """Bytes of the draft layer: its weights, its embedding, its cache and index keys."""
    elements = _attention(model, spec.parallel) + (2 * model.hidden_size + model.vocab_size) * model.hidden_size
    if model.indexer is not None:
        elements += _indexer(model) * model.indexer.cli_factor // 2
    elements += cached_tokens * sum(model.cached_widths(2 * model.num_layers).values())
    name = "model.mtp.layers.0.transformer_layer.mlp"
    return elements * width + _one_mlp_bytes(model, name, inner=model.ffn_hidden_size, width=width)


def _indexer(model: ModelConfig) -> int:
    """Elements of a layer's indexers."""
    if model.indexer is None:
        return 0
    one = model.indexer
    projections = one.index_n_heads * one.index_head_dim * model.q_lora_rank
    return 2 // one.cli_factor * (projections + (one.index_head_dim + one.index_n_heads) * model.hidden_size)


def _tables(model: ModelConfig) -> int:
    """Elements of the n-gram tables and of their projections."""
    if model.over_embedding is None:
        return 0
    rows = sum(model.over_embedding.table_sizes)
    return rows * model.oe_width + model.over_embedding.num_tables * model.oe_width * model.hidden_size


def _workspace(spec: InstanceSpec, model: ModelConfig, *, width: int) -> int:
    """Upper estimate of the largest step: activations of its rows, keys gathered for one attention, logits."""
    engine, parallel = spec.engine, spec.parallel
    window_rows = engine.max_num_seqs * (1 + engine.num_draft_tokens)
    rows = window_rows if spec.role == "decode" else -(-engine.max_num_batched_tokens // parallel.cp_size)
    latent = model.kv_lora_rank + model.qk_rope_head_dim
    query = model.num_attention_heads * (2 * latent + model.kv_lora_rank)
    experts = model.moe_topk * (3 * model.expert_ffn_hidden_size + model.hidden_size)
    activations = rows * (8 * model.hidden_size + max(query, experts, 3 * model.ffn_hidden_size)) * width
    selected = min(engine.max_model_len, model.indexer.index_topk if model.indexer else engine.max_model_len)
    scores = rows * model.num_attention_heads * selected * 4
    index_scores = rows * engine.max_model_len * 4 if model.indexer else 0
    key_width = model.indexer.index_head_dim if model.indexer else 0
    gathered = engine.max_model_len * (latent + key_width) * width if parallel.cp_size > 1 else 0
    sampled = window_rows if spec.role != "prefill" else engine.max_num_seqs
    logits = 2 * sampled * model.vocab_size * 4 + min(sampled * model.vocab_size, DRAW_ELEMENTS) * DRAW_BYTES
    return activations + scores + index_scores + gathered + logits
