"""Bytes of each rank, part by part, from the configuration and config.json alone: for the plan and for refusing a start.

Counts what a rank holds, not what the operating system shows: weights (``weights.py``) and cache exactly, under the names
of ``models/footprint.py``; workspace as an upper estimate of the largest step. Knows no device and no tensors; what is
available is the caller's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from longcat_pd.config.checks import chunk_rows
from longcat_pd.config.model import ModelConfig, attentions_of
from longcat_pd.config.schema import InstanceSpec, ParallelConfig
from longcat_pd.sizing.weights import DTYPE_BYTES, FP32, Weights

GIB, MIB = 1 << 30, 1 << 20
FP64 = 8
PROCESS_BYTES = 48 << 20  # what a rank process has of its own before it loads anything
DRAW_ELEMENTS = 1 << 22  # logits that are drawn from at once (kernels/reference/sampling.py), at least one row
DRAW_BYTES = 88  # for each of them, in fp64, edited, sorted and summed up
SLOT_BYTES = (
    5  # for each slot and id of the vocabulary: how often it was generated, and what it is (engine/sampling_state.py)
)
BIAS_BYTES = 12 * 1024  # for each slot: ids that a request favours or disfavours
COMPILER_BYTES = 512 << 20  # torch's compiler at its height; half of it stays


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What one rank needs, in bytes.

    ``parts``: weights (of the layers, the word embedding and the head), n-gram tables (with their projections), cache
    (latents and their rope parts), index keys, drafts (all of the draft layer: weights, embedding, cache, index keys),
    workspace, process.
    """

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
    parallel, stage = spec.parallel, stage_of(rank, spec.parallel)
    weights = Weights(model=model, parallel=parallel, width=DTYPE_BYTES[spec.model.dtype])
    is_first, is_last = stage == 0, stage == parallel.pp_size - 1
    has_draft = is_last and spec.engine.num_draft_tokens > 0
    latents, index_keys = _cached_bytes(stages[stage], spec, model=model)
    draft_cache = sum(_cached_bytes(range(model.num_layers, model.num_layers + 1), spec, model=model))
    ends = (weights.word() if is_first else 0) + (weights.head() if is_last else 0)
    return RankMemory(
        rank=rank,
        parts={
            "weights": weights.layers(stages[stage]) + ends,
            "n-gram tables": weights.tables(rank) if is_first else 0,
            "cache": latents,
            "index keys": index_keys,
            "drafts": weights.draft() + draft_cache if has_draft else 0,
            "workspace": _workspace(spec, model),
            "process": PROCESS_BYTES + COMPILER_BYTES * (spec.engine.exe_mode == "inductor"),
        },
    )


def _cached_bytes(layers: range, spec: InstanceSpec, *, model: ModelConfig) -> tuple[int, int]:
    """Latents with their rope parts, and index keys, in the blocks of one shard."""
    engine = spec.engine
    per_value = engine.num_blocks * engine.block_size * DTYPE_BYTES[spec.model.dtype]
    cached = [model.cached_widths(attention) for layer in layers for attention in attentions_of(model, layer)]
    index_keys = sum(widths.get("index", 0) for widths in cached)
    return per_value * (sum(sum(widths.values()) for widths in cached) - index_keys), per_value * index_keys


def _workspace(spec: InstanceSpec, model: ModelConfig) -> int:
    """Upper estimate of the largest step: activations of its rows and of those that other ranks hand in, keys gathered for
    one attention, logits; and what each slot has said so far, to draw by."""
    engine, parallel, width = spec.engine, spec.parallel, DTYPE_BYTES[spec.model.dtype]
    window_rows = engine.max_num_seqs // parallel.dp_size * (1 + engine.num_draft_tokens)
    rows = window_rows if spec.role == "decode" else chunk_rows(engine, parallel)
    rows = max(rows, window_rows) if spec.role == "standalone" else rows
    latent = model.kv_lora_rank + model.qk_rope_head_dim
    heads = model.num_attention_heads // (1 if parallel.kvp_size > 1 else parallel.attn_tp_size)
    query = heads * (2 * latent + model.kv_lora_rank)
    dense = 3 * model.ffn_hidden_size // parallel.dense_tp_size
    activations = rows * (8 * model.hidden_size + max(query, dense)) * width
    selected = min(engine.max_model_len, model.indexer.index_topk if model.indexer else engine.max_model_len)
    scores = rows * heads * selected * 4
    index_scores = rows * engine.max_model_len * 4 if model.indexer else 0
    key_width = model.indexer.index_head_dim if model.indexer else 0
    keys = engine.max_model_len * (latent + key_width) * width if parallel.cp_size > 1 else 0
    sampled = window_rows if spec.role != "prefill" else engine.max_num_seqs
    met = _rows_that_meet(rows, spec, model=model, width=width)
    said = (engine.max_num_seqs // parallel.dp_size + 1) * (SLOT_BYTES * model.vocab_size + BIAS_BYTES)
    return activations + scores + index_scores + keys + met + said + _logits(sampled, parallel, model=model)


def _rows_that_meet(rows: int, spec: InstanceSpec, *, model: ModelConfig, width: int) -> int:
    """Rows of all ranks of the widest axis, and those that the experts of one rank compute if all choose them.

    Results of experts are weighted and added in fp32, or in fp64 where the checkpoint has int8, and travel as they are.
    """
    parallel, hidden = spec.parallel, model.hidden_size
    share = -(-rows // parallel.attn_tp_size)
    tables = parallel.ngram_embed_tp_size if model.over_embedding is not None else 1
    widest = max(parallel.dense_tp_size, parallel.embed_tp_size, tables, parallel.ep_size, parallel.moe_tp_size)
    gathered = 0 if widest == 1 else share * widest * 3 * hidden
    handed_in = max(rows, share * max(parallel.ep_size, parallel.moe_tp_size))
    chosen = handed_in * min(model.moe_topk, model.n_routed_experts // parallel.ep_size)
    inner = 3 * model.expert_ffn_hidden_size // parallel.moe_tp_size
    sums = FP32 if model.quantization is None else FP64
    results = 2 * chosen + 2 * handed_in  # as they are and weighted; their sums here and on the way
    return (gathered + chosen * inner) * width + results * hidden * sums


def _logits(sampled: int, parallel: ParallelConfig, *, model: ModelConfig) -> int:
    """Of own vocabulary for the rows of all ranks of the head, whole ones for own rows, and what draws make of these."""
    handed_in = max(sampled, -(-sampled // parallel.attn_tp_size) * parallel.lmhead_tp_size)
    local = handed_in * (model.vocab_size // parallel.lmhead_tp_size)
    whole = sampled * model.vocab_size
    return (local + whole) * 4 + min(whole, DRAW_ELEMENTS) * DRAW_BYTES
