"""A model in stages against a model in one piece."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from longcat_pd.kv_cache.spec import CacheSpec
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.models.batch import Rows
from longcat_pd.models.causal_lm import CausalLM
from longcat_pd.models.weights import load_weights
from tests.parity.conftest import MakeCheckpoint
from tests.parity.ranks import Piece, Ranks


@pytest.mark.parametrize("variant", ["2.0", "chat"])
@pytest.mark.parametrize("cuts", [(1,), (1, 2), (2,)])
def test_stages_in_a_row_give_the_same_bits(tiny: MakeCheckpoint, variant: str, cuts: tuple[int, ...]) -> None:
    path, tokens = tiny(variant), [1, *range(100, 160)]
    ranks = Ranks(path, [tokens])
    wanted = ranks.step(Piece(0, 0, 61))[0]
    whole = ranks.members[0]
    inputs = whole.inputs.build(ranks.spans([Piece(0, 0, 61)]))
    bounds = (0, *cuts, 3)
    hidden, order = None, []
    for first, end in itertools.pairwise(bounds):
        spec = CacheSpec.of(ranks.config, range(first, end), torch.float32)
        context = dataclasses.replace(
            whole.context,
            layers=range(first, end),
            is_first=first == 0,
            is_last=end == 3,
            cache=KVCache(spec, whole.context.cache.num_blocks, 8, torch.device("cpu")),
        )
        stage = CausalLM(context)
        load_weights(stage.weight_specs(), path, config=ranks.config)
        hidden = stage.forward(inputs, hidden, order.append)
        for entry in spec.entries:
            assert torch.equal(context.cache.tensor(entry.name), whole.context.cache.tensor(entry.name)), entry.name
    assert order == [0, 1, 2]
    assert hidden is not None
    final = stage.final(hidden, dataclasses.replace(inputs, output_rows=torch.tensor([60, 3])))
    logits = stage.logits(final, Rows.even(2, 1))
    assert torch.equal(logits, wanted[[60, 3]])


def test_a_layer_is_announced_when_its_cache_is_written_and_the_next_is_not(tiny: MakeCheckpoint) -> None:
    ranks = Ranks(tiny("2.0"), [[1, 5, 6, 7]])
    member = ranks.members[0]
    cache = member.context.cache
    written: list[list[bool]] = []

    def look(layer: int) -> None:
        entries = member.context.cache.spec.entries_of_layer
        written.append([all(bool(cache.tensor(e.name).any()) for e in entries(number)) for number in range(3)])

    member.model.forward(member.inputs.build(ranks.spans([Piece(0, 0, 4)])), None, look)
    assert written == [[True, False, False], [True, True, False], [True, True, True]]
