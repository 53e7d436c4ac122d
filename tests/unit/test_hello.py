"""A driver says without torch what its ranks will cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longcat_pd.config.model import ModelConfig
from longcat_pd.kv_cache.spec import CacheSpec
from longcat_pd.kv_transfer.hello import cache_entries
from longcat_pd.tiny.configs import VARIANTS, make_config


@pytest.mark.parametrize("variant", VARIANTS)
def test_cache_entries_are_those_of_the_ranks(variant: str) -> None:
    model = ModelConfig.from_dict(make_config(variant, (), dtype="float32"))
    spec = CacheSpec.of(model, range(model.num_layers), torch.bfloat16)
    assert cache_entries(model, "bfloat16") == tuple((e.name, e.width, "bfloat16") for e in spec.entries)


def test_an_indexer_that_is_shared_owns_fewer_entries() -> None:
    model = ModelConfig.from_dict(make_config("2.0", (), dtype="float32"))
    assert model.indexer is not None
    other = replace(model, indexer=None)
    assert len(cache_entries(model, "float32")) > len(cache_entries(other, "float32")) == 4 * model.num_layers
