"""A head whose rows are spread over ranks: candidates say what all logits say, and so does whoever draws from them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longcat_pd import kernels
from longcat_pd.config.schema import ParallelConfig
from longcat_pd.engine.plan import SlotSampling
from longcat_pd.engine.sampler import SamplingRows, drawn
from longcat_pd.engine.slots import MAX_CANDIDATES, candidates_wanted
from longcat_pd.models.batch import Rows
from longcat_pd.models.embedding import LmHead
from tests.parity.ranks import thread_meshes
from tests.unit.stage import make_context

LAYOUTS = {
    "cp": ParallelConfig(cp_size=4, lmhead_tp_size=4),
    "group": ParallelConfig(attn_tp_size=4, kvp_size=4, lmhead_tp_size=4),
    "part of a group": ParallelConfig(attn_tp_size=4, kvp_size=4, lmhead_tp_size=2),
    "two groups": ParallelConfig(dp_size=2, attn_tp_size=2, kvp_size=2, lmhead_tp_size=4),
}
VOCAB, HIDDEN = 1024, 96
PLAIN = SlotSampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, choice=0, num_logprobs=None)


class HeadOnly:
    """As much of a model as ``drawn`` looks at."""

    def __init__(self, head: LmHead) -> None:
        self.logits, self.candidates = head, head.candidates


def weight() -> Tensor:
    """Few different values, so that many logits are equal, also across ranks."""
    return torch.randint(-2, 3, (VOCAB, HIDDEN), generator=torch.Generator().manual_seed(1)).float()


def make_head(mesh: Any = None) -> LmHead:
    context = make_context("chat")
    head = LmHead(context if mesh is None else replace(context, mesh=mesh))
    for spec in head.weight_specs():
        tensor = torch.ones(HIDDEN) if spec.shape == (HIDDEN,) else weight()
        spec.store(tensor[spec.region] if spec.region else tensor)
    return head


def finals(groups: int, count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randint(-1, 2, (count, HIDDEN), generator=draw).float() for _ in range(groups)]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("num_candidates", [0, 1, MAX_CANDIDATES])
def test_drawn(name: str, count: int, num_candidates: int) -> None:
    """One row less in the second group: what is handed in is not the same everywhere."""
    parallel = LAYOUTS[name]
    group_ranks = parallel.stage_size // parallel.dp_size
    by_group = finals(parallel.dp_size, count)
    by_group[-1] = by_group[-1][: count - (parallel.dp_size - 1)]
    share = -(-count // parallel.group_size)
    meshes = thread_meshes(parallel)

    def rules(num_rows: int) -> tuple[SamplingRows, Tensor]:
        top_k = {0: 0, 1: 0, MAX_CANDIDATES: 7}[num_candidates]
        temperature = 0.0 if num_candidates == 1 else 0.8
        rows = [replace(PLAIN, temperature=temperature, top_k=top_k, top_p=0.9, seed=row) for row in range(num_rows)]
        return SamplingRows.of(rows, torch.device("cpu")), torch.arange(num_rows)

    def one(rank: int) -> tuple[Tensor, Tensor]:
        final = by_group[rank // group_ranks]
        rows, positions = rules(len(final))
        model: Any = HeadOnly(make_head(meshes[rank]))
        at = Rows(len(final), share)
        how: dict[str, Any] = {"rows": rows, "positions": positions, "ops": kernels.load("cpu")}
        with torch.inference_mode():
            return drawn(model, final, at, num_candidates=num_candidates, **how)

    with ThreadPoolExecutor(len(meshes)) as pool:
        found = list(pool.map(one, range(len(meshes))))
    alone: Any = HeadOnly(make_head())
    for rank, (ids, logits) in enumerate(found):
        final = by_group[rank // group_ranks]
        rows, positions = rules(len(final))
        at = Rows.even(len(final), 1)
        wanted, all_logits = drawn(
            alone, final, at, rows=rows, positions=positions, num_candidates=0, ops=kernels.load("cpu")
        )
        assert ids.tolist() == wanted.tolist()
        assert torch.equal(logits, all_logits[:, :0] if num_candidates else all_logits)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_best_of_equal_ones_is_the_lowest_id(name: str) -> None:
    parallel = LAYOUTS[name]
    final = torch.zeros(2, HIDDEN)
    final[1, 0] = 1.0  # the logit of an id is its first weight
    meshes = thread_meshes(parallel)
    at = Rows(2, -(-2 // parallel.group_size))
    with ThreadPoolExecutor(len(meshes)) as pool:
        found = list(pool.map(lambda mesh: make_head(mesh).best(final, at).tolist(), meshes))
    first = int((weight()[:, 0] == 2.0).nonzero()[0])
    assert found == [[0, first]] * len(meshes)


def test_what_a_step_has_to_look_at() -> None:
    hot = replace(PLAIN, temperature=0.5)
    assert candidates_wanted([]) == candidates_wanted([PLAIN, replace(PLAIN, top_p=0.5)]) == 1
    assert candidates_wanted([PLAIN, replace(hot, top_k=64)]) == MAX_CANDIDATES
    assert candidates_wanted([PLAIN, replace(hot, top_k=65)]) == candidates_wanted([hot]) == 0
    assert candidates_wanted([replace(PLAIN, num_logprobs=0)]) == 0
