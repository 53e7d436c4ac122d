"""ModelConfig: a checkpoint's config.json under its official field names, with every alias resolved.

Owns which optional parts a checkpoint has (a record, or None where its fields are absent) and the sizes that follow from
the fields. Knows no tensors and no layout: divisibility against ranks is checked in ``resolve.py``. Fields that we do not
use are ignored; a field that is wrong, or asks for what no release of the family has, raises ConfigError with its name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from longcat_pd.config.fields import Fields
from longcat_pd.config.quantization import QuantizationConfig, read_quantization
from longcat_pd.errors import ConfigError

DataType = Literal["float32", "bfloat16"]
ZeroExpertType = Literal["identity", "copy", "drop"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """YaRN (arXiv:2309.00071) as `rope_scaling` states it. ``mscale`` and ``mscale_all_dim`` are None where absent."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None

    def magnitude(self, scale: float) -> float:
        """m(a) = 0.1 a ln(factor) + 1, and 1 where nothing is stretched."""
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0

    def correction_range(self, theta: float, dim: int) -> tuple[int, int]:
        """First pair that is stretched at all, and first that is stretched fully."""

        def pair_at(rotations: float) -> float:
            return dim * math.log(self.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = math.floor(pair_at(self.beta_fast)), math.ceil(pair_at(self.beta_slow))
        return max(low, 0), min(high, dim - 1)


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """The lightning indexer. ``cli_factor`` consecutive attention sub-layers share one selection."""

    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_init_tokens: int
    index_local_tokens: int
    index_k_norm_type: Literal["rms", "layer"]
    index_k_norm_eps: float
    indexer_rope_interleave: bool
    cli_factor: int


@dataclass(frozen=True, kw_only=True)
class OverEmbeddingConfig:
    """The n-gram embedding: one table per order 2 ... N and split. Table ``b``: order ``b // oe_split_num + 2``.

    ``tensor_family`` is the spelling of the tables' names in the checkpoint, which goes with the spelling of the fields.
    ``hash_vocab_size`` is the V of the row hash. ``ignored_ranges`` are half-open ranges of token ids.
    """

    oe_vocab_size_ratio: float
    oe_neighbor_num: int
    oe_split_num: int
    hash_vocab_size: int
    ignored_ranges: tuple[tuple[int, int], ...]
    tensor_family: Literal["oe_embed", "ngram_embeddings"]

    @property
    def num_tables(self) -> int:
        """B = K (N - 1)."""
        return self.oe_split_num * (self.oe_neighbor_num - 1)

    @property
    def table_sizes(self) -> tuple[int, ...]:
        """Rows of every table, which are also the moduli of the hash."""
        base = math.floor(self.oe_vocab_size_ratio * self.hash_vocab_size)
        return tuple(base + 2 * b + 1 for b in range(self.num_tables))

    def order_of(self, table: int) -> int:
        """How many tokens the rows of a table stand for."""
        return table // self.oe_split_num + 2

    def powers_of(self, table: int) -> tuple[int, ...]:
        """V^j mod rows, j = 0 ... N - 1; 0 beyond the table's order, so that farther tokens do not count."""
        modulus, order = self.table_sizes[table], self.order_of(table)
        return tuple(pow(self.hash_vocab_size, j, modulus) if j < order else 0 for j in range(self.oe_neighbor_num))


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Multi-token prediction as the checkpoint states it."""

    mtp_num_layers: int
    mtp_replicate_modules: bool
    mtp_disable_over_tokenizer: bool
    dsa_mtp_cli: bool


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One member of the family. See the module for what the optional records mean."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    ffn_hidden_size: int
    expert_ffn_hidden_size: int
    n_routed_experts: int
    zero_expert_num: int
    zero_expert_type: ZeroExpertType
    moe_topk: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_scale_q_lora: bool
    mla_scale_kv_lora: bool
    rms_norm_eps: float
    lora_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: tuple[int, ...]
    tie_word_embeddings: bool
    torch_dtype: DataType
    indexer: IndexerConfig | None
    over_embedding: OverEmbeddingConfig | None
    draft: DraftConfig | None
    quantization: QuantizationConfig | None

    @classmethod
    def load(cls, directory: str | Path) -> ModelConfig:
        """Read ``config.json`` of a checkpoint's folder. Raises ConfigError when there is none or it does not parse."""
        path = Path(directory) / "config.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}", param="model.path") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{path} holds no JSON object", param="model.path")
        return cls.from_dict(content)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ModelConfig:
        """Resolve aliases and defaults. Raises ConfigError that names the field."""
        read = Fields(content)
        _refuse_unused_biases(read)
        vocab_size = read.integer("vocab_size")
        max_positions = read.integer("max_position_embeddings", default=131072)
        theta, scaling = _rope(read, max_positions)
        rms_norm_eps = read.number("rms_norm_eps", default=1e-5)
        config = cls(
            vocab_size=vocab_size,
            hidden_size=read.integer("hidden_size"),
            num_layers=_num_layers(read),
            num_attention_heads=read.integer("num_attention_heads"),
            ffn_hidden_size=read.integer("ffn_hidden_size", "intermediate_size"),
            expert_ffn_hidden_size=read.integer("expert_ffn_hidden_size", "moe_intermediate_size"),
            n_routed_experts=read.integer("n_routed_experts", "num_experts", "num_local_experts"),
            zero_expert_num=read.integer("zero_expert_num", default=0, minimum=0),
            zero_expert_type=read.choice("zero_expert_type", ("identity", "copy", "drop"), default="identity"),
            moe_topk=read.integer("moe_topk", "num_experts_per_tok", default=12),
            norm_topk_prob=read.boolean("norm_topk_prob", default=False),
            routed_scaling_factor=read.number("routed_scaling_factor", default=1.0),
            q_lora_rank=read.integer("q_lora_rank"),
            kv_lora_rank=read.integer("kv_lora_rank"),
            qk_nope_head_dim=read.integer("qk_nope_head_dim"),
            qk_rope_head_dim=read.integer("qk_rope_head_dim"),
            v_head_dim=read.integer("v_head_dim"),
            mla_scale_q_lora=read.boolean("mla_scale_q_lora", default=True),
            mla_scale_kv_lora=read.boolean("mla_scale_kv_lora", default=True),
            rms_norm_eps=rms_norm_eps,
            lora_norm_eps=read.number("lora_norm_eps", default=rms_norm_eps),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=max_positions,
            bos_token_id=read.integer("bos_token_id", default=1, minimum=0),
            eos_token_id=read.integers("eos_token_id", default=(2,)),
            tie_word_embeddings=read.boolean("tie_word_embeddings", default=False),
            torch_dtype=read.choice("torch_dtype", ("float32", "bfloat16"), "dtype", default="bfloat16"),
            indexer=_indexer(read),
            over_embedding=_over_embedding(read, vocab_size),
            draft=_draft(read),
            quantization=read_quantization(read),
        )
        _check(config)
        return config

    @property
    def num_router_outputs(self) -> int:
        """Routed and zero experts: R + Z."""
        return self.n_routed_experts + self.zero_expert_num

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head: nope, then rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def q_lora_scale(self) -> float:
        """sqrt(H / q_lora_rank), or 1 where the flag is off."""
        return math.sqrt(self.hidden_size / self.q_lora_rank) if self.mla_scale_q_lora else 1.0

    @property
    def kv_lora_scale(self) -> float:
        """sqrt(H / kv_lora_rank), or 1 where the flag is off. The cached latent contains it."""
        return math.sqrt(self.hidden_size / self.kv_lora_rank) if self.mla_scale_kv_lora else 1.0

    @property
    def softmax_scale(self) -> float:
        """Sigma: what the dot product of query and key is multiplied by, YaRN's temperature included."""
        scaling = self.rope_scaling
        stretch = 1.0 if scaling is None else scaling.magnitude(scaling.mscale_all_dim or 0.0)
        return stretch * stretch / math.sqrt(self.qk_head_dim)

    @property
    def rope_magnitude(self) -> float:
        """What cos and sin are multiplied by: m(mscale) / m(mscale_all_dim), or m(1) unless both are given."""
        scaling = self.rope_scaling
        if scaling is None:
            return 1.0
        if not scaling.mscale or not scaling.mscale_all_dim:
            return scaling.magnitude(1.0)
        return scaling.magnitude(scaling.mscale) / scaling.magnitude(scaling.mscale_all_dim)

    @property
    def rope_frequencies(self) -> tuple[float, ...]:
        """Angle per position of every pair of rope dimensions, ``qk_rope_head_dim / 2`` of them."""
        dim = self.qk_rope_head_dim
        plain = [self.rope_theta ** (-2 * i / dim) for i in range(dim // 2)]
        scaling = self.rope_scaling
        if scaling is None:
            return tuple(plain)
        low, high = scaling.correction_range(self.rope_theta, dim)
        span = float(high - low) or 0.001
        ramps = [min(max((i - low) / span, 0.0), 1.0) for i in range(dim // 2)]
        return tuple(w * (ramp / scaling.factor + 1.0 - ramp) for w, ramp in zip(plain, ramps, strict=True))

    @property
    def oe_width(self) -> int:
        """Columns of an n-gram table: H / B; 0 without n-gram embedding."""
        return self.hidden_size // self.over_embedding.num_tables if self.over_embedding else 0

    def cached_widths(self, attention: int) -> dict[str, int]:
        """What a token leaves in the cache of an attention sub-layer: kind of vector -> width, in the order of entries."""
        widths = {"latent": self.kv_lora_rank, "rope": self.qk_rope_head_dim}
        if self.indexer is not None and self.owns_index(attention):
            widths["index"] = self.indexer.index_head_dim
        return widths

    def owns_index(self, attention: int) -> bool:
        """Whether an attention sub-layer computes a selection (and caches index keys) or uses its predecessor's."""
        return self.indexer is not None and attention % self.indexer.cli_factor == 0


def attentions_of(config: ModelConfig, layer: int) -> range:
    """Numbers of a layer's attention sub-layers: two, or one for ``num_layers``, the draft layer behind the others."""
    return range(2 * layer, 2 * layer + (2 if layer < config.num_layers else 1))


def _refuse_unused_biases(read: Fields) -> None:
    for name in ("attention_bias", "router_bias"):
        if read.boolean(name, default=False):
            raise ConfigError(f"{name} is true; no release of the family has these tensors and none are read", param=name)


def _num_layers(read: Fields) -> int:
    """``num_hidden_layers`` counts attentions where transformers wrote it, so it is the second choice."""
    if read.has("num_layers"):
        return read.integer("num_layers")
    count = read.integer("num_layers", "num_hidden_layers")
    if not read.text("model_type", default="").startswith("longcat_flash"):
        return count
    if count % 2:
        raise ConfigError(
            f"num_hidden_layers = {count} is odd: it counts two attentions a layer", param="num_hidden_layers"
        )
    return count // 2


def _rope(read: Fields, max_positions: int) -> tuple[float, RopeScaling | None]:
    newer = read.record("rope_parameters")
    scaling = newer if newer is not None else read.record("rope_scaling")
    if newer is not None and newer.has("rope_theta"):
        theta = newer.number("rope_theta")
    else:
        theta = read.number("rope_theta", default=1e7)
    if scaling is None:
        return theta, None
    kind = scaling.choice("rope_type", ("default", "yarn", "deepseek_yarn"), "type", default="default")
    if kind == "default":
        return theta, None
    factor = scaling.number("factor")
    return theta, RopeScaling(
        factor=factor,
        original_max_position_embeddings=scaling.integer(
            "original_max_position_embeddings", default=max(round(max_positions / factor), 1)
        ),
        beta_fast=scaling.number("beta_fast", default=32.0),
        beta_slow=scaling.number("beta_slow", default=1.0),
        mscale=scaling.number("mscale", minimum=0.0) if scaling.has("mscale") else None,
        mscale_all_dim=scaling.number("mscale_all_dim", minimum=0.0) if scaling.has("mscale_all_dim") else None,
    )


def _indexer(read: Fields) -> IndexerConfig | None:
    if not read.has("index_topk"):
        return None
    return IndexerConfig(
        index_n_heads=read.integer("index_n_heads"),
        index_head_dim=read.integer("index_head_dim"),
        index_topk=read.integer("index_topk"),
        index_init_tokens=read.integer("index_init_tokens", default=0, minimum=0),
        index_local_tokens=read.integer("index_local_tokens", default=0, minimum=0),
        index_k_norm_type=read.choice("index_k_norm_type", ("rms", "layer"), default="layer"),
        index_k_norm_eps=read.number("index_k_norm_eps", default=1e-6),
        indexer_rope_interleave=read.boolean("indexer_rope_interleave", default=True),
        cli_factor=read.integer("cli_factor", default=1),
    )


def _over_embedding(read: Fields, vocab_size: int) -> OverEmbeddingConfig | None:
    if not read.has("oe_vocab_size_ratio", "ngram_vocab_size_ratio"):
        return None
    return OverEmbeddingConfig(
        oe_vocab_size_ratio=read.number("oe_vocab_size_ratio", "ngram_vocab_size_ratio"),
        oe_neighbor_num=read.integer("oe_neighbor_num", "emb_neighbor_num", minimum=2),
        oe_split_num=read.integer("oe_split_num", "emb_split_num"),
        hash_vocab_size=read.integer("text_vocab_size", default=vocab_size),
        ignored_ranges=read.ranges("ignored_token_ids"),
        tensor_family="oe_embed" if read.has("oe_vocab_size_ratio") else "ngram_embeddings",
    )


def _draft(read: Fields) -> DraftConfig | None:
    count = read.integer("mtp_num_layers", "num_nextn_predict_layers", default=0, minimum=0)
    if count == 0:
        return None
    return DraftConfig(
        mtp_num_layers=count,
        mtp_replicate_modules=read.boolean("mtp_replicate_modules", default=True),
        mtp_disable_over_tokenizer=read.boolean("mtp_disable_over_tokenizer", default=True),
        dsa_mtp_cli=read.boolean("dsa_mtp_cli", default=True),
    )


def _check(config: ModelConfig) -> None:
    """What involves more than one field. Raises ConfigError that names the first of them."""
    indexer, tables = config.indexer, config.over_embedding
    checks = [
        ("qk_rope_head_dim", config.qk_rope_head_dim % 2 == 0, "must be even"),
        ("moe_topk", config.moe_topk <= config.num_router_outputs, "is more than there are experts"),
        ("eos_token_id", all(0 <= i < config.vocab_size for i in config.eos_token_id), "lies outside the vocabulary"),
    ]
    if indexer is not None:
        forced = indexer.index_init_tokens + indexer.index_local_tokens
        checks += [
            ("index_topk", forced <= indexer.index_topk, f"is less than init + local = {forced}"),
            ("index_head_dim", indexer.index_head_dim >= config.qk_rope_head_dim, "is less than qk_rope_head_dim"),
            ("cli_factor", indexer.cli_factor in (1, 2), "is not 1 or 2: a selection is not carried into the next layer"),
        ]
    if tables is not None:
        divides = config.hidden_size % tables.num_tables == 0
        checks.append(("oe_split_num", divides, f"gives {tables.num_tables} tables, which do not divide hidden_size"))
    for name, ok, complaint in checks:
        if not ok:
            raise ConfigError(f"{name} {complaint}", param=name)
