"""Multi-head latent attention in absorbed form: queries meet the cached latents themselves, never expanded keys.

Owns the projections of this rank's heads and the cache entries of its rows. Which keys a row sees, and what other ranks
contribute, is ``kv_access.py``'s business.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from longcat_pd.models.batch import ForwardInputs
from longcat_pd.models.context import ModelContext
from longcat_pd.models.front import Front
from longcat_pd.models.indexer import Indexer
from longcat_pd.models.kv_access import KVAccess
from longcat_pd.models.linear import summing_linear
from longcat_pd.models.rows import RowExchange
from longcat_pd.models.weight_spec import WeightSpec


class Attention(nn.Module):
    """Attention sub-layer number ``attention`` (2 * layer + place), with its indexer if it owns one."""

    def __init__(self, context: ModelContext, attention: int, *, name: str, kv_access: KVAccess) -> None:
        super().__init__()
        config, group = context.config, context.mesh.axis("attn_tp")
        self._attention = attention
        self._kv_access = kv_access
        self.front = Front(context, attention, name=name)
        o_shape = (config.hidden_size, config.num_attention_heads * config.v_head_dim)
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
        q, q_lora = self.front(x, rotation, inputs.slot_mapping)
        if self.indexer is not None:
            keys = self.indexer(x, q_lora, rotation=rotation, inputs=inputs)
        return self._attend(q, keys=keys, inputs=inputs), keys

    def reuse(
        self, x: Tensor, rotation: Tensor, *, inputs: ForwardInputs, keys: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Like ``forward`` with a selection that was made for an earlier row: it, and the new row's own position."""
        x = self._whole(x, inputs)
        q, _ = self.front(x, rotation, inputs.slot_mapping)
        if keys is not None:
            keys = self._kv_access.with_own(keys, inputs)
        return self._attend(q, keys=keys, inputs=inputs), keys

    def write(self, x: Tensor, rotation: Tensor, *, inputs: ForwardInputs) -> None:
        """Only the cache entries of the rows."""
        x = self._whole(x, inputs)
        self.front.write(x, rotation, inputs.slot_mapping)
        if self.indexer is not None:
            self.indexer.store(x, rotation, inputs=inputs)

    def weight_specs(self) -> Iterator[WeightSpec]:
        """All projections, norms and the indexer."""
        yield from self.front.weight_specs()
        yield from self.o_proj.weight_specs()
        if self.indexer is not None:
            yield from self.indexer.weight_specs()

    def _whole(self, stream: Tensor, inputs: ForwardInputs) -> Tensor:
        """An attention has all rows, whoever keeps them between attentions."""
        return self._exchange.spread(stream, inputs.rows)[: inputs.rows.num]

    def _attend(self, q: Tensor, *, keys: Tensor | None, inputs: ForwardInputs) -> Tensor:
        latents = self._kv_access.attend(self._attention, q, keys=keys, inputs=inputs)
        out: Tensor = self.o_proj(self.front.kv_up.values(latents.to(q.dtype)), inputs.rows)
        return out
