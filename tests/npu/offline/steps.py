"""The decode step of a model of any size on tensors without memory: built as a rank builds it, of device "npu".

`make_step` takes the table of operators, so the same step is compiled with whatever table there is. Knows no compiler.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import EngineConfig
from longcat_pd.engine.decode_state import DecodeShape, DecodeState
from longcat_pd.engine.decode_step import DecodeStep
from longcat_pd.engine.grammar import Vocabulary
from longcat_pd.engine.speculative import ModelDrafts
from longcat_pd.kernels import Ops
from longcat_pd.kv_cache.spec import CacheSpec
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.models.causal_lm import CausalLM
from longcat_pd.models.context import ModelContext
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.tiny.configs import make_config

# the narrowest that the operators take
WIDTHS = (
    "hidden_size=1024",
    "kv_lora_rank=512",
    "q_lora_rank=1536",
    "qk_rope_head_dim=64",
    "qk_nope_head_dim=128",
    "v_head_dim=128",
    "num_attention_heads=4",
    "ffn_hidden_size=256",
    "expert_ffn_hidden_size=128",
)
SPARSE_WIDTHS = ("index_head_dim=128", "index_n_heads=4")


def config_of(variant: str, *overrides: str) -> ModelConfig:
    """A tiny configuration of the family with the device's widths."""
    more = {"2.0": SPARSE_WIDTHS, "lite-sparse": SPARSE_WIDTHS, "lite": ("emb_neighbor_num=3",)}.get(variant, ())
    return ModelConfig.from_dict(make_config(variant, (*WIDTHS, *more, *overrides), dtype="bfloat16"))


@dataclass(frozen=True, kw_only=True)
class Size:
    """What of a step is not the model's. `layers`: the first so many of the model; 0: all."""

    num_seqs: int = 8
    num_drafts: int = 3
    num_blocks: int = 16
    block_size: int = 128
    max_model_len: int = 1024
    layers: int = 0
    device: str = "npu"
    dtype: torch.dtype = torch.bfloat16
    moe_dispatch: str = "gather"
    num_groups: int = 1
    group_size: int = 1
    int8: frozenset[str] = field(default=frozenset())


def make_step(
    config: ModelConfig, ops: Ops, size: Size, *, mesh: Mesh | None = None, vocabulary: Vocabulary | None = None
) -> DecodeStep:
    """The step of one rank that has all layers; weights are whatever memory holds."""
    mesh = mesh or Mesh.single()
    device = torch.device(size.device)
    layers = range(size.layers or config.num_layers)
    has_draft = size.num_drafts > 0
    cached = range(layers.stop) if not has_draft else range(config.num_layers + 1)
    cache = KVCache(CacheSpec.of(config, cached, size.dtype), size.num_blocks, size.block_size, device)
    context = ModelContext(
        config=config,
        ops=ops,
        mesh=mesh,
        cache=cache,
        layers=layers,
        is_first=True,
        is_last=True,
        kv_access=mesh.cache_shard.access,
        dtype=size.dtype,
        device=device,
        int8=size.int8,
        moe_dispatch=size.moe_dispatch,
        has_draft=has_draft,
    )
    model = CausalLM(context)
    model.prepare()
    engine = EngineConfig(
        block_size=size.block_size,
        max_num_seqs=size.num_seqs,
        max_model_len=size.max_model_len,
        num_draft_tokens=size.num_drafts,
    )
    shape = DecodeShape.of(
        engine,
        mesh.cache_shard,
        num_groups=size.num_groups,
        group_size=size.group_size,
        ngram_order=config.over_embedding.oe_neighbor_num if config.over_embedding is not None else 0,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
    )
    state = DecodeState(shape, mesh.cache_shard, dtype=size.dtype, device=device, vocabulary=vocabulary)
    return DecodeStep(model, state, ops=ops, drafts=ModelDrafts(model, state) if has_draft else None)


def kinds_of(histogram: Mapping[str, int]) -> str:
    """A line of a histogram, for people."""
    return ", ".join(f"{kind} {count}" for kind, count in histogram.items())
