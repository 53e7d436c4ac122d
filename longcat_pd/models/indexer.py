"""The lightning indexer of one attention: it scores keys cheaply and picks those that the attention may see.

Owns the index projections and the index keys in the cache. The pick itself (forced prefix and window, best of the rest)
and whose keys are seen belong to ``kv_access.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from longcat_pd.models.batch import ForwardInputs
from longcat_pd.models.context import ModelContext
from longcat_pd.models.kv_access import KVAccess
from longcat_pd.models.linear import Linear, Piece, copy_into, empty_parameter
from longcat_pd.models.weight_spec import WeightSpec


class Indexer(nn.Module):
    """Whole on every rank: a score needs all index heads."""

    def __init__(self, context: ModelContext, attention: int, *, name: str, kv_access: KVAccess) -> None:
        super().__init__()
        config, indexer = context.config, context.config.indexer
        assert indexer is not None
        self._ops = context.ops
        self._attention = attention
        self._kv_access = kv_access
        self._settings = indexer
        self._rope_dim = config.qk_rope_head_dim
        self._cache = context.cache
        heads, width = indexer.index_n_heads, indexer.index_head_dim
        self.wq_b = Linear(context, config.q_lora_rank, Piece(f"{name}.wq_b", heads * width))
        self.wk = Linear(context, config.hidden_size, Piece(f"{name}.wk", width))
        self.weights_proj = Linear(context, config.hidden_size, Piece(f"{name}.weights_proj", heads), dtype=torch.float32)
        self.k_norm = _KeyNorm(context, f"{name}.k_norm")

    def forward(self, x: Tensor, q_lora: Tensor, *, rotation: Tensor, inputs: ForwardInputs) -> Tensor | None:
        """Stores the index keys of the rows and returns what they attend to (see ``KVAccess.select``).

        ``x`` [T, hidden] is what the attention reads, ``q_lora`` [T, q_lora_rank] its normed query latent.
        """
        settings = self._settings
        self.store(x, rotation, inputs=inputs)
        queries = self._turn(self.wq_b(q_lora).view(len(x), settings.index_n_heads, settings.index_head_dim), rotation)
        weights = self.weights_proj(x.float()) * (settings.index_n_heads * settings.index_head_dim) ** -0.5
        return self._kv_access.select(self._attention, queries, weights=weights, inputs=inputs)

    def store(self, x: Tensor, rotation: Tensor, *, inputs: ForwardInputs) -> None:
        """Stores the index keys of the rows, for rows that attend to nothing."""
        keys = self._turn(self.k_norm(self.wk(x)), rotation)
        self._ops.store(self._cache.pages(f"index.{self._attention}"), inputs.slot_mapping, keys)

    def weight_specs(self) -> Iterator[WeightSpec]:
        """The four projections and norms."""
        for module in (self.wq_b, self.wk, self.weights_proj, self.k_norm):
            yield from module.weight_specs()

    def _turn(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Rope on the first dimensions; the others carry no position."""
        turned = self._ops.rope(x[..., : self._rope_dim], rotation, is_interleaved=self._settings.indexer_rope_interleave)
        return torch.cat((turned, x[..., self._rope_dim :]), -1)


class _KeyNorm(nn.Module):
    """Norm of the index keys: rms in all releases, or LayerNorm with bias where a checkpoint says so."""

    def __init__(self, context: ModelContext, name: str) -> None:
        super().__init__()
        indexer = context.config.indexer
        assert indexer is not None
        self._ops = context.ops
        self._name = name
        self._eps = indexer.index_k_norm_eps
        self.weight = empty_parameter(context, indexer.index_head_dim)
        self.bias = empty_parameter(context, indexer.index_head_dim) if indexer.index_k_norm_type == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        if self.bias is None:
            return self._ops.rms_norm(x, self.weight, self._eps)
        return self._ops.layer_norm(x, self.weight, bias=self.bias, eps=self._eps)

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Weight, and bias if there is one."""
        shape = tuple(self.weight.shape)
        yield WeightSpec(f"{self._name}.weight", shape, copy_into(self.weight))
        if self.bias is not None:
            yield WeightSpec(f"{self._name}.bias", shape, copy_into(self.bias))
