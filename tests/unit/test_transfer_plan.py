"""Every block of every entry goes exactly once from the rank that has it to the rank that wants it."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from longcat_pd.kv_cache.layout import BlockSplit
from longcat_pd.kv_transfer.plan import TransferPlan, travelling_layers

STAGES = [(3,), (2, 1), (1, 2), (1, 1, 1), (2, 3, 1)]


def entries_of(layer: int) -> list[str]:
    return [f"latent.{2 * layer}", f"latent.{2 * layer + 1}", f"index.{2 * layer}"]


@pytest.mark.parametrize(
    ("cp", "kvp"), [(1, 1), (1, 4), (2, 1), (2, 2), (2, 3), (3, 2), (3, 4), (4, 3), (4, 1), (8, 6), (5, 7)]
)
def test_every_item_once(cp: int, kvp: int) -> None:
    for stages, num_blocks in itertools.product(STAGES, (1, 2, 3, 5, 12, 25)):
        for start in {0, 1 % cp, cp - 1}:
            source, target = BlockSplit(cp, 4, start), BlockSplit(kvp, 4, (start + 1) % kvp)
            plan = TransferPlan(stages, source, target, kvp, num_blocks)
            seen: Counter[tuple[str, int]] = Counter()
            for layer, first in itertools.product(range(sum(stages)), range(0, num_blocks, 3)):
                for move in plan.moves(layer, entries_of(layer), first, first + 3):
                    seen[move.entry, move.block] += 1
                    stage, cp_rank = divmod(move.source, cp)
                    assert layer in range(sum(stages[:stage]), sum(stages[: stage + 1]))
                    assert cp_rank == source.rank_of(move.block)
                    assert move.target == kvp + target.rank_of(move.block)
                    assert move.target in plan.targets_of(move.source)
                    assert move.source in plan.sources_of(move.target)
            wanted = {(e, b) for layer in range(sum(stages)) for e in entries_of(layer) for b in range(num_blocks)}
            assert set(seen) == wanted
            assert set(seen.values()) == {1}


@pytest.mark.parametrize(("cp", "kvp"), [(1, 1), (3, 4), (2, 1), (1, 3), (4, 2)])
def test_views_of_ranks_agree_with_the_moves(cp: int, kvp: int) -> None:
    plan = TransferPlan((2, 1), BlockSplit(cp, 4, cp - 1), BlockSplit(kvp, 4, 0), 0, 13)
    for layer, (first, end) in itertools.product(range(3), [(0, 5), (5, 6), (6, 13), (0, 13)]):
        by_pair: dict[tuple[int, int], list[int]] = {}
        for move in plan.moves(layer, ["latent"], first, end):
            by_pair.setdefault((move.source, move.target), []).append(move.block)
        sources = [r for r in range(2 * cp) if layer in plan.layers_of(r)]
        for source, target in itertools.product(sources, range(kvp)):
            assert plan.blocks_between(source, target, first, end) == by_pair.get((source, target), [])


@pytest.mark.parametrize(("cp", "kvp"), [(1, 1), (3, 4), (2, 1), (1, 3), (4, 2)])
def test_only_what_the_target_lacks_travels(cp: int, kvp: int) -> None:
    splits = BlockSplit(cp, 4, cp - 1), BlockSplit(kvp, 4, 0)
    whole = TransferPlan((2, 1), *splits, 0, 13)
    for held in range(13):
        rest = TransferPlan((2, 1), *splits, 0, 13, held)
        for first, end in [(0, 5), (5, 6), (6, 13), (0, 13), (held, 13)]:
            moves = list(rest.moves(0, ["latent"], first, end))
            assert moves == [move for move in whole.moves(0, ["latent"], first, end) if move.block >= held]
            for source, target in itertools.product(range(2 * cp), range(kvp)):
                left = [b for b in whole.blocks_between(source, target, first, end) if b >= held]
                assert rest.blocks_between(source, target, first, end) == left
        pairs = {(move.source, move.target) for layer in (0, 2) for move in rest.moves(layer, ["latent"], 0, 13)}
        assert {(s, t) for s in range(2 * cp) for t in rest.targets_of(s)} == pairs
        assert {(s, t) for t in range(kvp) for s in rest.sources_of(t)} == pairs


def test_a_short_prompt_leaves_ranks_without_work() -> None:
    plan = TransferPlan((1, 1), BlockSplit(3, 4, 2), BlockSplit(4, 4, 1), 4, 1)
    assert [plan.targets_of(r) for r in range(6)] == [(), (), (5,), (), (), (5,)]
    assert [plan.sources_of(r) for r in range(4, 8)] == [(), (2, 5), (), ()]


def test_the_draft_layer_travels_with_the_last_stage() -> None:
    assert travelling_layers((2, 1), has_draft=True) == (2, 2)
    assert travelling_layers((2, 1), has_draft=False) == (2, 1)
