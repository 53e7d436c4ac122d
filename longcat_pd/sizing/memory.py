"""Bytes of each rank, part by part, from the configuration and config.json alone: for the plan and for refusing a start.

Counts what a rank holds, not what the operating system shows: weights (``weights.py``) and cache exactly, under the names
of ``models/footprint.py``; workspace as an upper estimate of the largest step; and what a card holds besides
(``card_memory.py``). Knows no tensors; what is available is the caller's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from longcat_pd.config.model import ModelConfig, attentions_of
from longcat_pd.config.schema import InstanceSpec, ParallelConfig
from longcat_pd.sizing.card_memory import HOST_BYTES, CardNeeds
from longcat_pd.sizing.cards import card_of
from longcat_pd.sizing.steps import LargestStep, logits_bytes, said_bytes
from longcat_pd.sizing.weights import DTYPE_BYTES, FP32, Weights

GIB, MIB = 1 << 30, 1 << 20
FP64 = 8
PROCESS_BYTES = 48 << 20  # what a rank process has of its own before it loads anything
COMPILER_BYTES = 512 << 20  # torch's compiler at its height; half of it stays


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What one rank needs, in bytes.

    ``parts``: weights (of the layers, the word embedding and the head), n-gram tables (with their projections), cache
    (latents and their rope parts), index keys, drafts (all of the draft layer: weights, embedding, cache, index keys),
    workspace, process; on a card also graphs and buffers of communicators. Where ranks have cards, ``parts`` is what these
    hold, and ``host_parts`` what the rank holds of its node's memory.
    """

    rank: int
    parts: Mapping[str, int]
    host_parts: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())

    @property
    def machine_bytes(self) -> int:
        """What it takes of its node's memory."""
        return sum((self.host_parts or self.parts).values())


def instance_memory(spec: InstanceSpec, model: ModelConfig, *, num_lanes: int = 0) -> tuple[RankMemory, ...]:
    """The need of every rank of one instance, in the order of ranks. ``spec`` is resolved.

    ``num_lanes``: ranks of the other pool that each rank may exchange cache with; a card has buffers for each.
    """
    stages = _first_layers(spec.parallel)
    card = CardNeeds(spec, model, num_lanes=num_lanes) if card_of(spec) is not None else None
    ranks = range(spec.parallel.world_size)
    return tuple(_rank_memory(rank, spec, model=model, stages=stages, card=card) for rank in ranks)


def stage_memory(spec: InstanceSpec, model: ModelConfig, *, num_lanes: int = 0) -> tuple[RankMemory, ...]:
    """The first rank of every pipeline stage: no other rank of the stage needs more. Arguments as ``instance_memory``."""
    stages, parallel = _first_layers(spec.parallel), spec.parallel
    card = CardNeeds(spec, model, num_lanes=num_lanes) if card_of(spec) is not None else None
    ranks = range(0, parallel.world_size, parallel.stage_size)
    return tuple(_rank_memory(rank, spec, model=model, stages=stages, card=card) for rank in ranks)


def copy_bytes(spec: InstanceSpec, model: ModelConfig) -> int:
    """All that is read of a checkpoint, once."""
    whole = ParallelConfig(layers_per_stage=(model.num_layers,), ngram_embed_tp_size=1)
    weights = Weights(model=model, parallel=whole, width=DTYPE_BYTES[spec.model.dtype])
    drafts = weights.draft() if spec.engine.num_draft_tokens else 0
    return weights.layers(range(model.num_layers)) + weights.word() + weights.head() + weights.tables(0) + drafts


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


def _rank_memory(
    rank: int, spec: InstanceSpec, *, model: ModelConfig, stages: list[range], card: CardNeeds | None
) -> RankMemory:
    parallel, stage = spec.parallel, stage_of(rank, spec.parallel)
    weights = Weights(model=model, parallel=parallel, width=DTYPE_BYTES[spec.model.dtype])
    is_first, is_last = stage == 0, stage == parallel.pp_size - 1
    has_draft = is_last and spec.engine.num_draft_tokens > 0
    latents, index_keys = _cached_bytes(stages[stage], spec, model=model)
    draft_cache = sum(_cached_bytes(range(model.num_layers, model.num_layers + 1), spec, model=model))
    ends = (weights.word() if is_first else 0) + (weights.head() if is_last else 0)
    on_host = weights.table_rows(rank) if is_first and card is not None and parallel.ngram_tables == "host" else 0
    parts = {
        "weights": weights.layers(stages[stage]) + ends,
        "n-gram tables": (weights.tables(rank) if is_first else 0) - on_host,
        "cache": latents,
        "index keys": index_keys,
        "drafts": weights.draft() + draft_cache if has_draft else 0,
    }
    if card is not None:
        host = {"n-gram tables": on_host, "process": HOST_BYTES}
        return RankMemory(rank=rank, parts={**parts, **card.parts(rank)}, host_parts=host)
    process = PROCESS_BYTES + COMPILER_BYTES * (spec.engine.exe_mode == "inductor")
    return RankMemory(rank=rank, parts=parts | {"workspace": _workspace(spec, model), "process": process})


def block_bytes(rank: int, spec: InstanceSpec, model: ModelConfig) -> int:
    """What one more block of the cache takes of a rank."""
    parallel = spec.parallel
    stage = stage_of(rank, parallel)
    last = model.num_layers + (stage == parallel.pp_size - 1 and spec.engine.num_draft_tokens > 0)
    own = _first_layers(parallel)[stage]
    layers = range(own.start, last if own.stop == model.num_layers else own.stop)
    return sum(_cached_bytes(layers, spec, model=model)) // spec.engine.num_blocks


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
    step = LargestStep.of(spec)
    rows = step.rows
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
    met = _rows_that_meet(rows, spec, model=model, width=width)
    said = said_bytes(spec, model) + logits_bytes(step.sampled, parallel, model=model)
    return activations + scores + index_scores + keys + met + said


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
