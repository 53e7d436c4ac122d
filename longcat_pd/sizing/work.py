"""Operations, bytes of memory and launches of each part of a step on one rank, counted from the shapes.

Owns the arithmetic alone: what a part computes and reads for so many rows that see so many keys. Knows no device, no times
and no exchange between ranks. Weights are read once in a step; rows are written and read between two products; scores stay
on the chip, as fused operators keep them; every row reads the keys that were selected for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import ParallelConfig

INT8, FP32 = 1, 4


@dataclass(frozen=True, kw_only=True)
class Work:
    """Of one rank. Two operations are one multiplication and its addition."""

    bf16_flops: float = 0.0
    int8_ops: float = 0.0
    fp32_flops: float = 0.0
    hbm_bytes: float = 0.0
    host_bytes: float = 0.0
    operators: float = 0.0

    def __add__(self, other: Work) -> Work:
        theirs = vars(other)
        return Work(**{name: value + theirs[name] for name, value in vars(self).items()})

    def times(self, count: float) -> Work:
        """So many alike."""
        return Work(**{name: value * count for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one attention of a step has to do, on the rank that has most.

    Attributes:
        rows: query rows of this rank's group.
        visible, selected: keys that a row sees, and that it attends to, on average and on all ranks.
        keys: of all sequences of these rows, on all ranks; dense attention and scores read each once.
    """

    rows: float
    visible: float
    selected: float
    keys: float

    @property
    def is_sparse(self) -> bool:
        """Whether rows see more keys than they attend to."""
        return self.selected < self.visible


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Which matrices of a decoder layer are int8."""

    has_int8_mlps: bool
    has_int8_experts: bool


def kind_of(model: ModelConfig, layer: int) -> LayerKind:
    """By the first of the layer's matrices of each sort."""
    prefix = f"model.layers.{layer}"
    return LayerKind(
        has_int8_mlps=is_int8(model, f"{prefix}.mlps.0.gate_proj"),
        has_int8_experts=is_int8(model, f"{prefix}.mlp.experts.0.gate_proj"),
    )


def is_int8(model: ModelConfig, name: str) -> bool:
    """Whether the checkpoint has a matrix in int8."""
    return model.quantization is not None and model.quantization.covers(name)


def capped_mean(first: int, count: int, cap: int) -> float:
    """Mean of ``min(n, cap)`` over the ``count`` numbers from ``first`` on."""
    below = min(max(cap - first, 0), count)
    return (below * first + below * (below - 1) / 2 + (count - below) * cap) / count


def expected_experts(rows: float, here: int, model: ModelConfig) -> float:
    """How many of ``here`` experts at least one of ``rows`` rows goes to, on average.

    A row picks ``topk`` of all R + Z outputs of the router, each set equally likely, and so misses a certain expert with
    probability 1 - topk / (R + Z); rows pick independently. What is expected of a sum is the sum of what is expected.
    """
    missed: float = (1.0 - model.moe_topk / model.num_router_outputs) ** rows
    return here * (1.0 - missed)


def routed_picks(model: ModelConfig) -> float:
    """Experts with weights among the picks of one row, on average."""
    return model.moe_topk * model.n_routed_experts / model.num_router_outputs


@dataclass(frozen=True, kw_only=True)
class Counter:
    """Counts the parts of a checkpoint under a layout. ``width``: bytes of a number of the model's data type."""

    model: ModelConfig
    parallel: ParallelConfig
    width: int

    def product(self, rows: float, inner: float, outer: float, *, weight_bytes: int = 0) -> Work:
        """[rows, inner] x [inner, outer]. ``weight_bytes``: of one number; INT8, FP32, or 0: of the model's type."""
        operations = 2.0 * rows * inner * outer
        kind = {INT8: "int8_ops", FP32: "fp32_flops"}.get(weight_bytes, "bf16_flops")
        moved = inner * outer * (weight_bytes or self.width) + rows * (inner + outer) * self.width
        return Work(**{kind: operations, "hbm_bytes": moved, "operators": 1 + (weight_bytes == INT8)})

    def attention(self, load: Load, *, owns_index: bool) -> Mapping[str, Work]:
        """One attention sub-layer: its projections, its indexer if it owns one, and the keys that it attends to."""
        parts = {"projections": self._projections(load.rows), "attention": self._keys(load)}
        if owns_index:
            parts["indexer"] = self._index_projections(load.rows) + self._scores(load)
        return parts

    def mlp(self, rows: float, *, has_int8: bool) -> Work:
        """One dense MLP for the rows that its ranks compute together, with the norm in front of it."""
        hidden, inner = self.model.hidden_size, self.model.ffn_hidden_size / self.parallel.dense_tp_size
        weight_bytes = INT8 if has_int8 else 0
        both = self.product(rows, hidden, 2 * inner, weight_bytes=weight_bytes)
        return both + self.product(rows, inner, hidden, weight_bytes=weight_bytes) + Work(operators=2)

    def router(self, rows: float) -> Work:
        """In fp32; conversion, scores, choice."""
        product = self.product(rows, self.model.hidden_size, self.model.num_router_outputs, weight_bytes=FP32)
        return product + Work(operators=2)

    def experts(self, rows: float, *, has_int8: bool) -> Work:
        """This rank's experts, for ``rows`` rows of all ranks that share them: those that are picked read their weights.

        Where every rank gets every row, shapes are static: there is room for all choices of each, and it is moved.
        """
        model, parallel, hidden = self.model, self.parallel, self.model.hidden_size
        here = model.n_routed_experts // parallel.ep_size
        inner = model.expert_ffn_hidden_size / parallel.moe_tp_size
        picks = rows * routed_picks(model) / parallel.ep_size
        narrow, middle = (INT8, FP32) if has_int8 else (self.width, self.width)
        read = expected_experts(rows, here, model) * 3 * hidden * inner * narrow
        is_static = parallel.ep_size > 1 and parallel.moe_dispatch == "gather"
        moved = rows * model.moe_topk if is_static else picks
        each = hidden * (narrow + self.width + FP32) + inner * (2 * middle + narrow)
        operations = picks * 6 * hidden * inner
        kind = "int8_ops" if has_int8 else "bf16_flops"
        return Work(**{kind: operations, "hbm_bytes": read + 2 * moved * each, "operators": 6 + 2 * has_int8})

    def words(self, rows: float) -> Work:
        """Vectors of the word table."""
        return Work(hbm_bytes=2 * rows * self.model.hidden_size * self.width, operators=1)

    def ngrams(self, rows: float) -> Work:
        """Vectors of the n-gram tables, which may lie in the host's memory, and their projections."""
        hidden = self.model.hidden_size
        looked_up = rows * hidden * self.width
        is_host = self.parallel.ngram_tables == "host"
        vectors = Work(hbm_bytes=looked_up * (1 + (not is_host)), host_bytes=looked_up * is_host, operators=7)
        return vectors + self.product(rows, hidden, hidden)

    def head(self, rows: float) -> Work:
        """Norm, logits of this rank's ids, and their best."""
        own = self.model.vocab_size / self.parallel.lmhead_tp_size
        logits = self.product(rows, self.model.hidden_size, own)
        return logits + Work(hbm_bytes=rows * own * FP32, operators=5)

    def joined(self, rows: float) -> Work:
        """What the draft layer makes of a hidden state and a token."""
        return self.product(rows, 2 * self.model.hidden_size, self.model.hidden_size) + Work(operators=4)

    def written(self, rows: float) -> Work:
        """Cache entries of the draft layer alone."""
        model = self.model
        latents = self.product(rows, model.hidden_size, model.kv_lora_rank + model.qk_rope_head_dim)
        indexer = model.indexer
        keys = Work() if indexer is None else self.product(rows, model.hidden_size, indexer.index_head_dim)
        return latents + keys + Work(operators=4)

    def _projections(self, rows: float) -> Work:
        """From the stream to absorbed queries and cache entries, and from attended latents back to the stream."""
        model, hidden = self.model, self.model.hidden_size
        heads = model.num_attention_heads / self.parallel.attn_tp_size
        latent, rope = model.kv_lora_rank, model.qk_rope_head_dim
        down = self.product(rows, hidden, model.q_lora_rank + latent + rope)
        up = self.product(rows, model.q_lora_rank, heads * model.qk_head_dim)
        absorbed = self.product(rows, model.qk_nope_head_dim, latent).times(heads)
        values = self.product(rows, latent, model.v_head_dim).times(heads)
        out = self.product(rows, heads * model.v_head_dim, hidden)
        every = down + up + absorbed + values + out
        return Work(**{**vars(every), "operators": 5})  # norm, prolog, values, a transpose, out

    def _keys(self, load: Load) -> Work:
        """Queries against latents and rope parts, and weights against latents, of the keys that this rank holds."""
        model, parallel = self.model, self.parallel
        heads = model.num_attention_heads / (1 if parallel.kvp_size > 1 else parallel.attn_tp_size)
        latent, rope = model.kv_lora_rank, model.qk_rope_head_dim
        each = load.selected / parallel.kvp_size
        read = load.rows * each if load.is_sparse else load.keys / parallel.kvp_size
        rows = load.rows * heads * (2 * latent + rope)
        return Work(
            bf16_flops=2.0 * load.rows * heads * each * (2 * latent + rope),
            hbm_bytes=(read * (latent + rope) + rows) * self.width,
            operators=1 + 5 * (parallel.kvp_size > 1),
        )

    def _index_projections(self, rows: float) -> Work:
        model, indexer = self.model, self.model.indexer
        assert indexer is not None
        heads, dim = indexer.index_n_heads, indexer.index_head_dim
        queries = self.product(rows, model.q_lora_rank, heads * dim)
        keys = self.product(rows, model.hidden_size, dim)
        weights = self.product(rows, model.hidden_size, heads, weight_bytes=FP32)
        return queries + keys + weights + Work(operators=5)

    def _scores(self, load: Load) -> Work:
        """Every key that a row sees and that this rank holds; nothing where all of them are attended to anyway."""
        indexer = self.model.indexer
        assert indexer is not None
        if not load.is_sparse:
            return Work()
        shards = self.parallel.kvp_size
        return Work(
            bf16_flops=2.0 * load.rows * load.visible / shards * indexer.index_n_heads * indexer.index_head_dim,
            hbm_bytes=load.keys / shards * indexer.index_head_dim * self.width,
            operators=6,
        )
