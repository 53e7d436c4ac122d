"""Weights without a file: the same numbers for every layout, other ones for every tensor, of a size that computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from longcat_pd.models import random_weights
from longcat_pd.models.random_weights import fill_random
from longcat_pd.models.weight_spec import WeightSpec

NAME = "model.layers.0.mlps.0.down_proj.weight"


def filled(name: str, shape: tuple[int, ...], region: tuple[slice, ...] = ()) -> torch.Tensor:
    got: list[torch.Tensor] = []
    store: Callable[[torch.Tensor], None] = got.append
    num_bytes = fill_random([WeightSpec(name, shape, store, region)])
    assert num_bytes == got[0].numel() * 4
    return got[0]


@pytest.mark.parametrize("region", [(slice(3, 7), slice(None)), (slice(None), slice(8, 16)), (slice(6, 9), slice(1, 2))])
def test_a_part_is_a_part_of_the_whole(region: tuple[slice, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = filled(NAME, (9, 20))
    monkeypatch.setattr(random_weights, "_CHUNK", 17)  # several rounds, the last one short
    assert torch.equal(filled(NAME, (9, 20), region), whole[region])


def test_a_vector_has_parts_too() -> None:
    norm = "model.norm.weight"
    assert torch.equal(filled(norm, (40,), (slice(11, 30),)), filled(norm, (40,))[11:30])


def test_numbers_differ_between_places_and_between_tensors() -> None:
    one, other = filled(NAME, (64, 64)), filled(NAME.replace("0", "1"), (64, 64))
    assert one.unique().numel() > 4090
    assert (one != other).float().mean() > 0.99
    assert abs(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]) < 0.06


def test_products_keep_their_variance() -> None:
    weights = filled(NAME, (256, 512))
    assert weights.mean().abs() < 1e-3
    assert torch.isclose(weights.var() * 512, torch.tensor(1.0), atol=0.02)
    assert torch.isclose(filled("model.embed_tokens.weight", (256, 512)).var(), torch.tensor(1.0), atol=0.02)
    assert (filled("model.norm.weight", (512,)) - 1.0).abs().max() <= 0.1
