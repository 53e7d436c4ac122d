"""Which vectors each attention caches: the entries of a pipeline stage. Knows the checkpoint's shape, no blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longcat_pd.config.model import ModelConfig, attentions_of


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One vector for each token: ``latent.{a}`` and ``rope.{a}`` of attention a, ``index.{a}`` where a owns an indexer."""

    name: str
    attention: int  # global number (``attentions_of``)
    width: int
    dtype: torch.dtype

    @property
    def layer(self) -> int:
        """The layer; the draft layer is the one behind the decoder layers."""
        return self.attention // 2

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.width * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The entries of some layers, in the order of attentions."""

    entries: tuple[CacheEntry, ...]

    @classmethod
    def of(cls, config: ModelConfig, layers: range, dtype: torch.dtype) -> CacheSpec:
        """What ``layers`` of this checkpoint cache; number ``num_layers`` is the draft layer."""
        return cls(
            tuple(
                CacheEntry(f"{kind}.{attention}", attention, width, dtype)
                for layer in layers
                for attention in attentions_of(config, layer)
                for kind, width in config.cached_widths(attention).items()
            )
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all entries."""
        return sum(entry.token_bytes for entry in self.entries)

    def entries_of_layer(self, layer: int) -> tuple[CacheEntry, ...]:
        """The entries that are final when ``layer`` was computed."""
        return tuple(entry for entry in self.entries if entry.layer == layer)
