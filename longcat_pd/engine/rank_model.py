"""Building what a rank computes with: its cache, its part of the model, its weights. Done once, before the first plan."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from longcat_pd import kernels
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec, RankSpec
from longcat_pd.engine.grammar import Vocabulary
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.models.causal_lm import CausalLM
from longcat_pd.models.checkpoint import checkpoint_digest, int8_modules, open_checkpoint
from longcat_pd.models.context import ModelContext
from longcat_pd.models.weights import fill_weights
from longcat_pd.parallel.layout import layers_of_stage
from longcat_pd.parallel.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class RankModel:
    """A rank's part of the model, and its cache.

    ``ngram_order``: N of the over-embedding where this stage embeds with it, else 0. ``hidden_size`` and ``dtype`` are
    those of what travels between stages; ``vocab_size`` of what is drawn from. ``has_draft``: the draft layer is here.
    ``memory``: what is allocated. ``vocabulary``: for answers that are bound to a grammar, where tokens are drawn.
    """

    model: CausalLM
    ops: kernels.Ops
    cache: KVCache
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    ngram_order: int
    vocab_size: int
    model_digest: str
    weight_bytes: int
    load_s: float
    memory: tuple[tuple[str, int], ...] = ()
    has_draft: bool = False
    vocabulary: Vocabulary | None = None


def load_rank_model(spec: RankSpec, mesh: Mesh) -> RankModel:
    """Builds this rank's stage and fills it from the checkpoint.

    Raises:
        ConfigError: the checkpoint, the device or the configuration do not fit.
    """
    instance = spec.instance
    began = time.monotonic()
    config = ModelConfig.load(instance.model.path)
    dtype = _data_type(config.torch_dtype if instance.model.dtype == "auto" else instance.model.dtype)
    device, pp = torch.device(instance.device), mesh.axis("pp")
    layers = layers_of_stage(instance.parallel, config.num_layers, pp.rank)
    is_last = pp.rank == pp.size - 1
    has_draft = is_last and instance.engine.num_draft_tokens > 0
    cached = range(layers.start, layers.stop + has_draft)
    cache = KVCache.of_layers(config, cached, engine=instance.engine, dtype=dtype, device=device)
    has_weights = instance.model.weights == "checkpoint"
    int8 = int8_modules(open_checkpoint(Path(instance.model.path))) if has_weights else frozenset()
    context = ModelContext(
        config=config,
        ops=_operators(instance, is_steady=bool(int8)),
        mesh=mesh,
        cache=cache,
        layers=layers,
        is_first=pp.rank == 0,
        is_last=is_last,
        kv_access=mesh.cache_shard.access,
        dtype=dtype,
        device=device,
        int8=int8,
        moe_dispatch=instance.parallel.moe_dispatch,
        has_draft=has_draft,
    )
    model = CausalLM(context)
    weight_bytes = fill_weights(model.weight_specs(), instance.model, config=config)
    return RankModel(
        model=model,
        ops=context.ops,
        cache=cache,
        hidden_size=config.hidden_size,
        dtype=dtype,
        device=device,
        ngram_order=config.over_embedding.oe_neighbor_num if config.over_embedding and context.is_first else 0,
        vocab_size=config.vocab_size,
        model_digest=checkpoint_digest(Path(instance.model.path), has_weights=has_weights),
        weight_bytes=weight_bytes,
        load_s=time.monotonic() - began,
        memory=model.memory(cache),
        has_draft=has_draft,
        vocabulary=Vocabulary.load(instance.model.path, config.vocab_size, config.eos_token_id) if is_last else None,
    )


def _operators(instance: InstanceSpec, *, is_steady: bool) -> kernels.Ops:
    engine = instance.engine
    return kernels.load(instance.device, exe_mode=engine.exe_mode, is_steady=is_steady, unfused=engine.unfused)


def _data_type(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
