"""The cache tensors of one rank. Knows entries and blocks, no sequences."""

from __future__ import annotations

import torch
from torch import nn

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import EngineConfig
from longcat_pd.errors import ConfigError
from longcat_pd.kv_cache.spec import CacheSpec


class KVCache(nn.Module):
    """One tensor ``[num_blocks, block_size, 1, width]`` for each entry of the rank's layers: the buffers of a module.

    The third dimension is the one head that a latent attention has. Operators that write want to see it: a compiler of
    graphs that finds a view between a buffer and who writes it may copy the whole buffer.

    Filled with zeros: attention reads whole blocks and masks what is not valid, and no mask survives a NaN.
    """

    def __init__(self, spec: CacheSpec, num_blocks: int, block_size: int, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._names = {entry.name: entry.name.replace(".", "_") for entry in spec.entries}
        for entry in spec.entries:
            blocks = torch.zeros((num_blocks, block_size, 1, entry.width), dtype=entry.dtype, device=device)
            self.register_buffer(self._names[entry.name], blocks, persistent=False)

    @classmethod
    def of_layers(
        cls,
        config: ModelConfig,
        layers: range,
        *,
        engine: EngineConfig,
        dtype: torch.dtype,
        device: torch.device,
        memory: tuple[int, int] | None = None,
    ) -> KVCache:
        """The cache of some layers of a checkpoint.

        ``memory``: bytes of the device that are free, and all; None where that is not known. Weights come later.

        Raises:
            ConfigError: the cache alone is more than what is free.
        """
        spec, blocks = CacheSpec.of(config, layers, dtype), engine.num_blocks
        needed = blocks * engine.block_size * sum(entry.token_bytes for entry in spec.entries)
        if memory is not None and needed > memory[0]:
            text = f"a cache of {needed} bytes on a device of which {memory[0]} of {memory[1]} are free"
            raise ConfigError(f"engine.num_blocks={blocks}: {text}", param="engine.num_blocks")
        return cls(spec, blocks, engine.block_size, device)

    def tensor(self, name: str) -> torch.Tensor:
        """The blocks of one entry: ``[num_blocks, block_size, width]``."""
        return self.pages(name).squeeze(2)

    def pages(self, name: str) -> torch.Tensor:
        """The same, ``[num_blocks, block_size, 1, width]``, as it is kept."""
        return self.get_buffer(self._names[name])
