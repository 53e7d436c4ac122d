"""The cache tensors of one rank. Knows entries and blocks, no sequences."""

from __future__ import annotations

import torch

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import EngineConfig
from longcat_pd.kv_cache.spec import CacheSpec


class KVCache:
    """One tensor ``[num_blocks, block_size, width]`` for each entry of the rank's layers.

    Filled with zeros: attention reads whole blocks and masks what is not valid, and no mask survives a NaN.
    """

    def __init__(self, spec: CacheSpec, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._tensors = {
            entry.name: torch.zeros((num_blocks, block_size, entry.width), dtype=entry.dtype, device=device)
            for entry in spec.entries
        }

    @classmethod
    def of_layers(
        cls, config: ModelConfig, layers: range, *, engine: EngineConfig, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """The cache of some layers of a checkpoint."""
        return cls(CacheSpec.of(config, layers, dtype), engine.num_blocks, engine.block_size, device)

    def tensor(self, name: str) -> torch.Tensor:
        """The blocks of one entry: ``[num_blocks, block_size, width]``."""
        return self._tensors[name]
