"""kv_cache/spec.py and storage.py: the entries of a stage, and tensors that begin as zeros."""

import pytest
import torch

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import EngineConfig
from longcat_pd.kv_cache.spec import CacheSpec
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.kv_transfer.hello import cache_entries
from longcat_pd.tiny.configs import VARIANTS, make_config


@pytest.mark.parametrize("variant", VARIANTS)
def test_stages_together_hold_every_entry_once(variant: str) -> None:
    config = ModelConfig.from_dict(make_config(variant, (), dtype="float32"))
    whole = CacheSpec.of(config, range(config.num_layers), torch.bfloat16)
    parts = [CacheSpec.of(config, layers, torch.bfloat16) for layers in (range(1), range(1, config.num_layers))]
    assert parts[0].entries + parts[1].entries == whole.entries
    names = [entry.name for entry in whole.entries]
    assert len(set(names)) == len(names)
    has_index = config.indexer is not None
    assert names[: 5 if has_index else 4] == (
        ["latent.0", "rope.0", "index.0", "latent.1", "rope.1"]
        if has_index
        else ["latent.0", "rope.0", "latent.1", "rope.1"]
    )
    by_layer = [entry for layer in range(config.num_layers) for entry in whole.entries_of_layer(layer)]
    assert tuple(by_layer) == whole.entries
    assert {entry.layer for entry in parts[1].entries} == set(range(1, config.num_layers))
    values = 2 * (config.kv_lora_rank + config.qk_rope_head_dim)
    values += config.indexer.index_head_dim if config.indexer else 0
    assert whole.token_bytes == 2 * config.num_layers * values


def test_the_draft_layer_is_one_more_with_one_attention() -> None:
    config = ModelConfig.from_dict(make_config("2.0", (), dtype="float32"))
    spec = CacheSpec.of(config, range(2, 4), torch.float32)
    assert [entry.name for entry in spec.entries_of_layer(3)] == ["latent.6", "rope.6", "index.6"]
    assert len(spec.entries) == 5 + 3
    told = cache_entries(config, "float32", has_draft=True)
    assert told[-3:] == tuple((e.name, e.width, "float32") for e in spec.entries_of_layer(3))


def test_storage() -> None:
    config = ModelConfig.from_dict(make_config("2.0", (), dtype="float32"))
    engine = EngineConfig(block_size=4, num_blocks=5)
    cache = KVCache.of_layers(config, range(1, 2), engine=engine, dtype=torch.float32, device=torch.device("cpu"))
    assert cache.tensor("index.2").shape == (5, 4, 16)
    assert cache.tensor("latent.3").shape == (5, 4, config.kv_lora_rank)
    assert not cache.tensor("rope.3").any()
    with pytest.raises(KeyError):
        cache.tensor("latent.0")
