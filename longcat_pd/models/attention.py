"""Multi-head latent attention in absorbed form: queries meet the cached latents themselves, never expanded keys.

Owns the projections of this rank's heads and the cache entries of its rows. Which keys a row sees, and what other ranks
contribute, is ``kv_access.py``'s business.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from longcat_pd.kernels.ops import PrologWeights
from longcat_pd.models.batch import ForwardInputs
from longcat_pd.models.context import ModelContext
from longcat_pd.models.indexer import Indexer
from longcat_pd.models.kv_access import KVAccess
from longcat_pd.models.linear import (
    Linear,
    Piece,
    RmsNorm,
    copy_into,
    empty_parameter,
    share_of,
    summing_linear,
)
from longcat_pd.models.rows import RowExchange
from longcat_pd.models.weight_spec import WeightSpec


class Attention(nn.Module):
    """Attention sub-layer number ``attention`` (2 * layer + place), with its indexer if it owns one."""

    def __init__(self, context: ModelContext, attention: int, *, name: str, kv_access: KVAccess) -> None:
        super().__init__()
        config, group = context.config, context.mesh.axis("attn_tp")
        self._config = config
        self._ops = context.ops
        self._attention = attention
        self._kv_access = kv_access
        self._cache = context.cache
        heads = share_of(config.num_attention_heads, group)
        hidden, q_rank, kv_rank = config.hidden_size, config.q_lora_rank, config.kv_lora_rank
        kv_rows = kv_rank + config.qk_rope_head_dim
        own_q = slice(heads.start * config.qk_head_dim, heads.stop * config.qk_head_dim) if group.size > 1 else None
        self.down = Linear(context, hidden, Piece(f"{name}.q_a_proj", q_rank), Piece(f"{name}.kv_a_proj_with_mqa", kv_rows))
        self.q_norm = RmsNorm(context, f"{name}.q_a_layernorm", width=q_rank, eps=config.lora_norm_eps)
        self.kv_norm = RmsNorm(context, f"{name}.kv_a_layernorm", width=kv_rank, eps=config.lora_norm_eps)
        self.q_up = Linear(
            context, q_rank, Piece(f"{name}.q_b_proj", config.num_attention_heads * config.qk_head_dim, own_q)
        )
        self.kv_up = _HeadMaps(context, f"{name}.kv_b_proj", heads=heads)
        o_shape = (hidden, config.num_attention_heads * config.v_head_dim)
        self._exchange = RowExchange(group, group)
        self.o_proj = summing_linear(context, f"{name}.o_proj", shape=o_shape, exchange=self._exchange)
        self.indexer = (
            Indexer(context, attention, name=f"{name}.indexer", kv_access=kv_access)
            if config.owns_index(attention)
            else None
        )

    def forward(
        self, x: Tensor, rotation: Tensor, *, inputs: ForwardInputs, keys: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The stream [T, hidden] -> the stream [T, hidden], and the keys that the rows attended to.

        ``keys`` is the selection of the attention before, used where this one owns no indexer; None: all visible keys.
        """
        x = self._whole(x, inputs)
        q, q_lora = self._prolog(x, rotation, inputs)
        if self.indexer is not None:
            keys = self.indexer(x, q_lora, rotation=rotation, inputs=inputs)
        return self._attend(q, keys=keys, inputs=inputs), keys

    def reuse(
        self, x: Tensor, rotation: Tensor, *, inputs: ForwardInputs, keys: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Like ``forward`` with a selection that was made for an earlier row: it, and the new row's own position."""
        x = self._whole(x, inputs)
        q, _ = self._prolog(x, rotation, inputs)
        if keys is not None:
            keys = self._kv_access.with_own(keys, inputs)
        return self._attend(q, keys=keys, inputs=inputs), keys

    def write(self, x: Tensor, rotation: Tensor, *, inputs: ForwardInputs) -> None:
        """Only the cache entries of the rows."""
        x = self._whole(x, inputs)
        self._store(x, rotation, inputs)
        if self.indexer is not None:
            self.indexer.store(x, rotation, inputs=inputs)

    def weight_specs(self) -> Iterator[WeightSpec]:
        """All projections, norms and the indexer."""
        for module in (self.down, self.q_norm, self.kv_norm, self.q_up, self.kv_up, self.o_proj):
            yield from module.weight_specs()
        if self.indexer is not None:
            yield from self.indexer.weight_specs()

    def _whole(self, stream: Tensor, inputs: ForwardInputs) -> Tensor:
        """An attention has all rows, whoever keeps them between attentions."""
        return self._exchange.spread(stream, inputs.rows)[: inputs.rows.num]

    def _prolog(self, x: Tensor, rotation: Tensor, inputs: ForwardInputs) -> tuple[Tensor, Tensor]:
        """Writes the cache entries; queries [T, own heads, C + R] and the normed query latents [T, q_lora_rank].

        The factor sqrt(H / q_lora_rank) of the queries is part of the softmax scale.
        """
        weights = PrologWeights(self.down.weight, self.q_norm.weight, self.q_up.weight, self.kv_up.key, self.kv_norm.weight)
        return self._ops.mla_prolog(
            x,
            rotation,
            weights=weights,
            slots=inputs.slot_mapping,
            cache=self._entries(),
            eps=self._config.lora_norm_eps,
            kv_scale=self._config.kv_lora_scale,
        )

    def _store(self, x: Tensor, rotation: Tensor, inputs: ForwardInputs) -> None:
        """Writes latents and rope parts."""
        _, latent, rope_key = self.down(x).split(
            (self._config.q_lora_rank, self._config.kv_lora_rank, self._config.qk_rope_head_dim), -1
        )
        latents, rope_keys = self._entries()
        self._ops.store(latents, inputs.slot_mapping, self.kv_norm(latent) * self._config.kv_lora_scale)
        self._ops.store(rope_keys, inputs.slot_mapping, self._ops.rope(rope_key, rotation, is_interleaved=True))

    def _entries(self) -> tuple[Tensor, Tensor]:
        """Latents and rope parts of this attention in the cache."""
        return self._cache.tensor(f"latent.{self._attention}"), self._cache.tensor(f"rope.{self._attention}")

    def _attend(self, q: Tensor, *, keys: Tensor | None, inputs: ForwardInputs) -> Tensor:
        latents = self._kv_access.attend(self._attention, q, keys=keys, inputs=inputs)
        out: Tensor = self.o_proj(self.kv_up.values(latents.to(q.dtype)), inputs.rows)
        return out


class _HeadMaps(nn.Module):
    """The two halves of every own head of ``kv_b_proj``: latent to key (nope part) and latent to value."""

    def __init__(self, context: ModelContext, name: str, *, heads: slice) -> None:
        super().__init__()
        config = context.config
        self._map = context.ops.head_linear
        self._name = name
        self._heads = heads
        self._all_heads = config.num_attention_heads
        num_heads = heads.stop - heads.start
        self.key = empty_parameter(context, num_heads, config.qk_nope_head_dim, config.kv_lora_rank)
        self.value = empty_parameter(context, num_heads, config.kv_lora_rank, config.v_head_dim)

    def values(self, latents: Tensor) -> Tensor:
        """Weighted latents [T, h, C] as values of all heads side by side, [T, h * v]."""
        return self._map(latents, self.value).flatten(1)

    def weight_specs(self) -> Iterator[WeightSpec]:
        """``kv_b_proj``, the rows of own heads."""
        rows_each, width = self.key.shape[1] + self.value.shape[2], self.key.shape[2]

        def store(rows: Tensor) -> None:
            by_head = rows.view(-1, rows_each, width)
            copy_into(self.key)(by_head[:, : self.key.shape[1]])
            copy_into(self.value)(by_head[:, self.key.shape[1] :].transpose(1, 2))

        region = (slice(self._heads.start * rows_each, self._heads.stop * rows_each), slice(0, width))
        yield WeightSpec(f"{self._name}.weight", (self._all_heads * rows_each, width), store, region)
