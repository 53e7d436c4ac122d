"""kv_cache/storage.py: a cache finds room on a device before it is allocated."""

from __future__ import annotations

import pytest
import torch

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import EngineConfig
from longcat_pd.errors import ConfigError
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.tiny.configs import make_config

ENGINE = EngineConfig(block_size=16, num_blocks=10)


def cache(memory: tuple[int, int] | None) -> KVCache:
    config = ModelConfig.from_dict(make_config("chat", (), dtype="bfloat16"))
    device = torch.device("cpu")
    return KVCache.of_layers(config, range(1), engine=ENGINE, dtype=torch.bfloat16, device=device, memory=memory)


def test_a_cache_that_fits_is_as_large_as_said() -> None:
    needed = sum(buffer.nbytes for buffer in cache(None).buffers())
    assert sum(buffer.nbytes for buffer in cache((needed, 2 * needed)).buffers()) == needed
    text = f"engine.num_blocks=10: a cache of {needed} bytes on a device of which {needed - 1} of {2 * needed} are free"
    with pytest.raises(ConfigError, match=text) as caught:
        cache((needed - 1, 2 * needed))
    assert caught.value.param == "engine.num_blocks"
