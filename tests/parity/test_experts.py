"""Experts split in any way say what one rank says: every dispatch, ranks without rows, rows for zero experts only, all rows
at one expert; nothing is summed twice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longcat_pd import kernels
from longcat_pd.config.schema import ParallelConfig
from longcat_pd.models.batch import Rows
from longcat_pd.models.dispatch import make_dispatch
from longcat_pd.models.moe import MixtureOfExperts
from tests.parity.ranks import thread_meshes
from tests.unit.stage import make_context

HIDDEN, ROUTED, ZERO = 96, 16, 4  # of the tiny chat checkpoint, which chooses 4 experts for each row
CASES = {"mixed": None, "zero experts only": range(ROUTED, ROUTED + ZERO), "one rank's experts": range(4)}
DISPATCHES: list[dict[str, Any]] = [
    {"ep_size": 4, "moe_dispatch": "gather"},
    {"ep_size": 4, "moe_dispatch": "all_to_all"},
    {"ep_size": 4, "moe_dispatch": "two_level", "node_size": 2},
    {"ep_size": 4, "moe_dispatch": "two_level", "node_size": 4},
    {"ep_size": 4, "moe_dispatch": "two_level", "node_size": 1},
    {"ep_size": 2, "moe_dispatch": "all_to_all"},
    {"ep_size": 2, "moe_dispatch": "gather"},
    {"ep_size": 2, "moe_dispatch": "two_level", "node_size": 2},
    {"ep_size": 1, "moe_dispatch": "gather"},
    {"ep_size": 1, "moe_dispatch": "all_to_all"},
    {"ep_size": 1, "moe_dispatch": "two_level"},
    {"moe_tp_size": 2},
    {"moe_tp_size": 4},
]


def weights_of(favoured: range | None) -> dict[str, Tensor]:
    """Of all experts. With ``favoured`` the router's bias makes every row choose among them."""
    whole = MixtureOfExperts(make_context("chat"), "m")
    draw = torch.Generator().manual_seed(3)
    tensors = {spec.name: 0.1 * torch.randn(spec.shape, generator=draw) for spec in whole.weight_specs()}
    if favoured is not None:
        bias = tensors["m.router.e_score_correction_bias"].fill_(-10.0)
        bias[favoured.start : favoured.stop] = 10.0
    return tensors


def experts(tensors: dict[str, Tensor], *, is_steady: bool, mesh: Any = None, kind: str = "gather") -> MixtureOfExperts:
    context = replace(make_context("chat"), moe_dispatch=kind, ops=kernels.load("cpu", is_steady=is_steady))
    if mesh is not None:
        context = replace(context, mesh=mesh)
    made = MixtureOfExperts(context, "m")
    for spec in made.weight_specs():
        tensor = tensors[spec.name]
        spec.store(tensor[spec.region] if spec.region else tensor)
    return made


def outputs(
    parallel: ParallelConfig, tensors: dict[str, Tensor], streams: list[Tensor], rows: list[Rows], *, is_steady: bool
) -> list[Tensor]:
    """What every rank's mixture makes of its stream, all at once."""

    def one(rank: int) -> Tensor:
        mixture = experts(tensors, is_steady=is_steady, mesh=meshes[rank], kind=parallel.moe_dispatch)
        with torch.inference_mode():
            out: Tensor = mixture(streams[rank], rows[rank])
        return out

    meshes = thread_meshes(parallel)
    with ThreadPoolExecutor(len(meshes)) as pool:
        return list(pool.map(one, range(len(meshes))))


def draw_rows(count: int, seed: int) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("split", DISPATCHES, ids=lambda split: " ".join(str(v) for v in split.values()))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("counts", [(5, 3, 0, 7), (0, 0, 1, 0), (4, 4, 4, 4)])
def test_prefill_shares(split: dict[str, Any], case: str, counts: tuple[int, ...]) -> None:
    """Context parallel: every rank has rows of its own, some have none."""
    tensors = weights_of(CASES[case])
    streams = [draw_rows(count, rank) for rank, count in enumerate(counts)]
    rows = [Rows(count, max(counts)) for count in counts]
    got = outputs(ParallelConfig(cp_size=4, **split), tensors, streams, rows, is_steady=False)
    alone = experts(tensors, is_steady=False)
    for stream, out in zip(streams, got, strict=True):
        torch.testing.assert_close(out, alone(stream, Rows.even(len(stream), 1)), rtol=1e-5, atol=1e-5)


GROUPS = {"dp_size": 2, "attn_tp_size": 2, "kvp_size": 2}


@pytest.mark.parametrize("split", DISPATCHES, ids=lambda split: " ".join(str(v) for v in split.values()))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("counts", [(5, 3), (0, 4), (1, 1)])
@pytest.mark.parametrize("is_split", [False, True])
def test_groups(split: dict[str, Any], case: str, counts: tuple[int, int], is_split: bool) -> None:
    """Groups whose ranks have the same rows, or shares of them (sequence parallel)."""
    tensors = weights_of(CASES[case])
    share = -(-max(counts) // 2)
    by_group = [draw_rows(count, group) for group, count in enumerate(counts)]
    rows = [Rows(counts[rank // 2], share, is_split) for rank in range(4)]
    streams = [part(by_group[rank // 2], rank % 2, share) if is_split else by_group[rank // 2] for rank in range(4)]
    got = outputs(ParallelConfig(**GROUPS, **split), tensors, streams, rows, is_steady=False)
    alone = experts(tensors, is_steady=False)
    for rank, out in enumerate(got):
        wanted = alone(by_group[rank // 2], Rows.even(counts[rank // 2], 1))
        if is_split:
            wanted = wanted[rank % 2 * share : (rank % 2 + 1) * share]
        torch.testing.assert_close(out[: len(wanted)], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "split",
    [split for split in DISPATCHES if "ep_size" in split],  # int8 experts are whole
    ids=lambda split: " ".join(str(v) for v in split.values()),
)
def test_a_steady_table_gives_the_same_bits(split: dict[str, Any]) -> None:
    """What int8 models rely on: where sums are made does not show."""
    tensors = weights_of(None)
    streams = [draw_rows(count, count) for count in (9, 2, 6, 1)]
    rows = [Rows(len(stream), 9) for stream in streams]
    got = outputs(ParallelConfig(cp_size=4, **split), tensors, streams, rows, is_steady=True)
    alone = experts(tensors, is_steady=True)
    for stream, out in zip(streams, got, strict=True):
        assert torch.equal(out, alone(stream, Rows.even(len(stream), 1)))


def test_rows_that_are_missing_are_nobodys_business() -> None:
    """Their results would be dropped, so only the routing shows that none are computed."""
    counts, each = (5, 3, 0, 7), ROUTED // 4
    meshes = thread_meshes(ParallelConfig(cp_size=4, ep_size=4))
    tensors = weights_of(range(ROUTED))

    def one(rank: int) -> Tensor:
        mixture = experts(tensors, is_steady=False, mesh=meshes[rank])
        pair = make_dispatch(replace(make_context("chat"), mesh=meshes[rank], moe_dispatch="gather"), is_int8=False)
        rows = Rows(counts[rank], max(counts))
        with torch.inference_mode():
            return pair.dispatch(pair.take(draw_rows(counts[rank], rank), rows), mixture.router, rows).routing.expert_ids

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(one, range(4)))
    is_chosen = sum((ids < each).sum(1) for ids in found).view(4, max(counts))
    for chosen, count in zip(is_chosen, counts, strict=True):
        assert chosen[:count].tolist() == [4] * count and chosen[count:].tolist() == [0] * (max(counts) - count)


def part(rows: Tensor, place: int, share: int) -> Tensor:
    padded = torch.nn.functional.pad(rows, (0, 0, 0, 2 * share - len(rows)))
    return padded[place * share : (place + 1) * share]
