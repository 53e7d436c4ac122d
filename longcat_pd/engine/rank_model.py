"""Building what a rank computes with: its cache, its part of the model, its weights. Done once, before the first plan."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import RankSpec
from longcat_pd.engine.grammar import Vocabulary
from longcat_pd.engine.stage_model import StageOperators, build_stage, stage_operators
from longcat_pd.kernels import Ops
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.models.causal_lm import CausalLM
from longcat_pd.models.stage import Stage, data_type
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.progress.steps import Tell, untold


@dataclass(frozen=True, kw_only=True)
class RankModel:
    """A rank's part of the model, and its cache.

    ``ngram_order``: N of the over-embedding where this stage embeds with it, else 0. ``hidden_size`` and ``dtype`` are
    those of what travels between stages; ``vocab_size`` of what is drawn from. ``has_draft``: the draft layer is here.
    ``memory``: what is allocated. ``vocabulary``: for answers that are bound to a grammar, where tokens are drawn.
    ``tell``: of what is left to do before the first plan.
    """

    model: CausalLM
    ops: Ops
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
    tell: Tell = untold

    def expect(self, grammar: str) -> None:
        """An answer will be bound to it soon, where tokens are drawn; empty: to none."""
        if grammar and self.vocabulary is not None:
            self.vocabulary.prepare(grammar)


def load_rank_model(
    spec: RankSpec, mesh: Mesh, *, operators: StageOperators | None = None, tell: Tell = untold
) -> RankModel:
    """Builds this rank's stage and fills it from the checkpoint. ``operators``: in place of the device's own.

    First it is seen whether operators take the sizes; then come communicators, whose buffers take memory of the device too;
    then the cache, if it finds room.

    Raises:
        ConfigError: the checkpoint, the device or the configuration do not fit.
    """
    instance = spec.instance
    began = time.monotonic()
    config = ModelConfig.load(instance.model.path)
    dtype, device = data_type(instance, config), mesh.device
    operators = operators or stage_operators(instance, config)
    mesh.warm_up(tell)
    stage = Stage.of(instance, config, mesh.axis("pp").rank)
    memory = mesh.platform.runtime.memory()
    cache = KVCache.of_layers(config, stage.cached, engine=instance.engine, dtype=dtype, device=device, memory=memory)
    built = build_stage(instance, mesh, stage=stage, config=config, cache=cache, operators=operators, tell=tell)
    return RankModel(
        model=built.model,
        ops=operators.ops,
        cache=cache,
        hidden_size=config.hidden_size,
        dtype=dtype,
        device=device,
        ngram_order=config.over_embedding.oe_neighbor_num if config.over_embedding and stage.is_first else 0,
        vocab_size=config.vocab_size,
        model_digest=built.digest,
        weight_bytes=built.weight_bytes,
        load_s=time.monotonic() - began,
        memory=built.model.memory(cache),
        has_draft=stage.has_draft,
        vocabulary=Vocabulary.load(instance.model.path, config.vocab_size, config.eos_token_id) if stage.is_last else None,
        tell=tell,
    )
