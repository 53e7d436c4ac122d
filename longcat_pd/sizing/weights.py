"""Bytes of the parameters that one rank holds, by the part of the model that they belong to.

Owns who holds how much of which tensor: a share by the size of the part's own axis, or the whole. Knows ``config.json``
and sizes; no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import ParallelConfig

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2})
FP32 = DTYPE_BYTES["float32"]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A checkpoint's parameters on a rank. ``width``: bytes of a number of the model's data type."""

    model: ModelConfig
    parallel: ParallelConfig
    width: int

    def layers(self, numbers: range) -> int:
        """Decoder layers: attentions, dense MLPs, experts, routers, and the norms between them."""
        return sum(self._layer(layer) for layer in numbers)

    def word(self) -> int:
        """This rank's rows of a word embedding; the draft layer has one of its own."""
        return self.model.vocab_size // self.parallel.embed_tp_size * self.model.hidden_size * self.width

    def head(self) -> int:
        """The final norm, and this rank's rows of the head."""
        rows = self.model.vocab_size // self.parallel.lmhead_tp_size
        return (rows + 1) * self.model.hidden_size * self.width

    def tables(self, rank: int) -> int:
        """N-gram tables and their projections, whole."""
        return self.table_rows(rank) + self.projections()

    def table_rows(self, rank: int) -> int:
        """This rank's rows of the n-gram tables. The rows of all tables are cut into runs; the last may be shorter."""
        tables, size = self.model.over_embedding, self.parallel.ngram_embed_tp_size or self.parallel.embed_tp_size
        if tables is None:
            return 0
        num_rows = sum(tables.table_sizes)
        run = -(-num_rows // size)
        return min(max(num_rows - rank % size * run, 0), run) * self.model.oe_width * self.width

    def projections(self) -> int:
        """From the width of a table to that of the model, of all tables, whole."""
        tables = self.model.over_embedding
        return 0 if tables is None else tables.num_tables * self.model.hidden_size * self.model.oe_width * self.width

    def draft(self) -> int:
        """The draft layer, with its own embedding; the head is the target's."""
        hidden, number = self.model.hidden_size, self.model.num_layers
        whole = (2 * hidden + 5) * hidden * self.width  # the joint projection, and norms of two inputs and three results
        mlp = self._mlp("model.mtp.layers.0.transformer_layer.mlp", inner=self.model.ffn_hidden_size, tp=self._dense_tp)
        return self.word() + whole + self._attention(2 * number) + mlp

    @property
    def _dense_tp(self) -> int:
        return self.parallel.dense_tp_size

    def _layer(self, layer: int) -> int:
        model, prefix = self.model, f"model.layers.{layer}"
        attentions = sum(self._attention(2 * layer + j) for j in (0, 1))
        norms = 4 * model.hidden_size * self.width
        router = model.num_router_outputs * (model.hidden_size + 1) * FP32
        mlps = sum(self._mlp(f"{prefix}.mlps.{j}", inner=model.ffn_hidden_size, tp=self._dense_tp) for j in (0, 1))
        first = self._mlp(f"{prefix}.mlp.experts.0", inner=model.expert_ffn_hidden_size, tp=self.parallel.moe_tp_size)
        return attentions + norms + router + mlps + first * (model.n_routed_experts // self.parallel.ep_size)

    def _attention(self, attention: int) -> int:
        """One attention's projections, of this rank's heads where they have heads, and its indexer if it owns one."""
        model, hidden = self.model, self.model.hidden_size
        heads = model.num_attention_heads // self.parallel.attn_tp_size
        latent, rope = model.kv_lora_rank, model.qk_rope_head_dim
        elements = (model.q_lora_rank + latent + rope) * hidden + model.q_lora_rank + latent
        elements += heads * model.qk_head_dim * model.q_lora_rank
        elements += heads * (model.qk_nope_head_dim + model.v_head_dim) * latent
        elements += heads * model.v_head_dim * hidden
        return elements * self.width + (self._indexer() if model.owns_index(attention) else 0)

    def _indexer(self) -> int:
        """Whole on every rank; the weights of the heads are in fp32."""
        indexer = self.model.indexer
        assert indexer is not None
        heads, dim = indexer.index_n_heads, indexer.index_head_dim
        norm = dim * (2 if indexer.index_k_norm_type == "layer" else 1)
        elements = heads * dim * self.model.q_lora_rank + dim * self.model.hidden_size + norm
        return elements * self.width + heads * self.model.hidden_size * FP32

    def _mlp(self, name: str, *, inner: int, tp: int) -> int:
        """A share of gate, up and down: int8 with fp32 scales where ``quantization_config`` says so."""
        quantization, hidden = self.model.quantization, self.model.hidden_size
        total = 0
        for part, num_rows in (("gate", inner), ("up", inner), ("down", hidden)):
            is_int8 = quantization is not None and quantization.covers(f"{name}.{part}_proj")
            total += inner * hidden * (1 if is_int8 else self.width) + (FP32 * num_rows if is_int8 else 0)
        return total // tp
