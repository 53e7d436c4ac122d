"""The front of an attention: the weights of all that comes before its keys are looked at, and its cache entries.

Owns the projections of this rank's heads, as they are loaded and as the operators want them. Knows no keys of other rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from longcat_pd.kernels.ops import PrologScales, PrologWeights
from longcat_pd.models.context import ModelContext
from longcat_pd.models.linear import Matrix, Piece, RmsNorm, copy_into, empty_parameter, share_of
from longcat_pd.models.preparing import prepared
from longcat_pd.models.weight_spec import WeightSpec


class Front(nn.Module):
    """Down and up projections, norms and absorbed keys of attention sub-layer number ``attention``."""

    def __init__(self, context: ModelContext, attention: int, *, name: str) -> None:
        super().__init__()
        config, group = context.config, context.mesh.axis("attn_tp")
        self._ops = context.ops
        self._cache = context.cache
        self._attention = attention
        self._scales = PrologScales(config.lora_norm_eps, config.kv_lora_scale)
        heads = share_of(config.num_attention_heads, group)
        hidden, q_rank, kv_rank = config.hidden_size, config.q_lora_rank, config.kv_lora_rank
        kv_rows = kv_rank + config.qk_rope_head_dim
        own_q = slice(heads.start * config.qk_head_dim, heads.stop * config.qk_head_dim) if group.size > 1 else None
        self.down = Matrix(context, hidden, Piece(f"{name}.q_a_proj", q_rank), Piece(f"{name}.kv_a_proj_with_mqa", kv_rows))
        self.q_norm = RmsNorm(context, f"{name}.q_a_layernorm", width=q_rank, eps=config.lora_norm_eps)
        self.kv_norm = RmsNorm(context, f"{name}.kv_a_layernorm", width=kv_rank, eps=config.lora_norm_eps)
        self.q_up = Matrix(
            context, q_rank, Piece(f"{name}.q_b_proj", config.num_attention_heads * config.qk_head_dim, own_q)
        )
        self.kv_up = HeadMaps(context, f"{name}.kv_b_proj", heads=heads)
        self.prepared = nn.ParameterList()  # empty: operators take the weights as they are loaded

    def forward(self, x: Tensor, rotation: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the cache entries; queries [T, own heads, C + R] and the normed query latents [T, q_lora_rank].

        The factor sqrt(H / q_lora_rank) of the queries is part of the softmax scale.
        """
        return self._ops.mla_prolog(
            x, rotation, weights=self.weights(), slots=slots, cache=self._entries(), scales=self._scales
        )

    def write(self, x: Tensor, rotation: Tensor, slots: Tensor) -> None:
        """Only the cache entries."""
        self._ops.mla_store(x, rotation, weights=self.weights(), slots=slots, cache=self._entries(), scales=self._scales)

    def weights(self) -> tuple[Tensor, ...]:
        """As the operators want them."""
        return tuple(self.prepared) if len(self.prepared) else self._loaded()

    def prepare(self) -> None:
        """See Preparable. What was loaded goes if something else takes its place."""
        loaded = self._loaded()
        made = self._ops.prepare_prolog(loaded, self._scales)
        if made is loaded:
            return
        self.prepared.extend(nn.Parameter(tensor, requires_grad=False) for tensor in made)
        nothing = nn.Parameter(torch.empty(0), requires_grad=False)
        self.down.weight = self.q_up.weight = self.kv_up.key = nothing

    def weight_specs(self) -> Iterator[WeightSpec]:
        """All projections and norms."""
        for module in (self.down, self.q_norm, self.kv_norm, self.q_up, self.kv_up):
            yield from module.weight_specs()

    def _loaded(self) -> PrologWeights:
        return PrologWeights(self.down.weight, self.q_norm.weight, self.q_up.weight, self.kv_up.key, self.kv_norm.weight)

    def _entries(self) -> tuple[Tensor, Tensor]:
        """Latents and rope parts of this attention in the cache."""
        return self._cache.pages(f"latent.{self._attention}"), self._cache.pages(f"rope.{self._attention}")


class HeadMaps(nn.Module):
    """The two halves of every own head of ``kv_b_proj``: latent to key (nope part) and latent to value."""

    def __init__(self, context: ModelContext, name: str, *, heads: slice) -> None:
        super().__init__()
        config = context.config
        self._ops = context.ops
        self._name = name
        self._heads = heads
        self._all_heads = config.num_attention_heads
        num_heads = heads.stop - heads.start
        self.key = empty_parameter(context, num_heads, config.qk_nope_head_dim, config.kv_lora_rank)
        self.value = empty_parameter(context, num_heads, config.kv_lora_rank, config.v_head_dim)

    def values(self, latents: Tensor) -> Tensor:
        """Weighted latents [T, h, C] as values of all heads side by side, [T, h * v]."""
        return self._ops.head_linear(latents, self.value).flatten(1)

    def prepare(self) -> None:
        """See Preparable. The keys' half is the front's."""
        self.value = prepared(self._ops, self.value, "heads")

    def weight_specs(self) -> Iterator[WeightSpec]:
        """``kv_b_proj``, the rows of own heads."""
        rows_each, width = self.key.shape[1] + self.value.shape[2], self.key.shape[2]

        def store(rows: Tensor) -> None:
            by_head = rows.view(-1, rows_each, width)
            copy_into(self.key)(by_head[:, : self.key.shape[1]])
            copy_into(self.value)(by_head[:, self.key.shape[1] :].transpose(1, 2))

        region = (slice(self._heads.start * rows_each, self._heads.stop * rows_each), slice(0, width))
        yield WeightSpec(f"{self._name}.weight", (self._all_heads * rows_each, width), store, region)
