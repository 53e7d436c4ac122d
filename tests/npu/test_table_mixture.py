"""The mixture of experts with the NPU table says what it says with the reference: every dispatch, floats and int8."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longcat_pd.config.schema import ParallelConfig
from longcat_pd.kernels import Ops
from longcat_pd.models.batch import Rows
from longcat_pd.models.moe import MixtureOfExperts
from tests.npu.expert_rig import HIDDEN, REFERENCE, close, npu_ops, randn
from tests.npu.kernels import dispatch, groups
from tests.parity.ranks import ThreadMesh, thread_meshes
from tests.unit.stage import make_context

ROUTED, ZERO = 16, 4  # of the tiny chat checkpoint, which chooses 4 experts for each row
SIZES = (f"hidden_size={HIDDEN}", "expert_ffn_hidden_size=64")
NAME = "ep of a mixture"
CASES = {"mixed": None, "zero experts only": range(ROUTED, ROUTED + ZERO), "one rank's experts": range(4)}
SPLITS: list[dict[str, Any]] = [
    {"ep_size": 4, "moe_dispatch": "gather"},
    {"ep_size": 4, "moe_dispatch": "all_to_all"},
    {"ep_size": 4, "moe_dispatch": "two_level", "node_size": 2},
    {"ep_size": 4, "moe_dispatch": "fused"},
    {"ep_size": 2, "moe_dispatch": "fused"},
    {"ep_size": 2, "moe_dispatch": "gather"},
    {"ep_size": 1, "moe_dispatch": "gather"},
]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    for name in (NAME, f"{NAME} 0", f"{NAME} 1"):
        groups.unregister_group(name)
    dispatch.forget_dispatches()
    dispatch.choose_soc("A3")


def mixture(ops: Ops, tensors: dict[str, Tensor], *, mesh: Any = None, kind: str = "gather") -> MixtureOfExperts:
    context = replace(make_context("chat", *SIZES), moe_dispatch=kind, ops=ops)
    stored = {name[: -len(".weight_scale")] for name in tensors if name.endswith("_scale")}
    context = replace(context, int8=frozenset(stored | {"m.s.0.down_proj"}))  # an MLP is, whatever experts are
    made = MixtureOfExperts(context if mesh is None else replace(context, mesh=mesh), "m")
    for spec in made.weight_specs():
        spec.store(tensors[spec.name][spec.region] if spec.region else tensors[spec.name])
    for module in (made, made.router.classifier):
        module.prepare()
    return made


def drawn(favoured: range | None, *, is_int8: bool) -> dict[str, Tensor]:
    """Of all experts. With ``favoured`` the router's bias makes every row choose among them."""
    draw, tensors = torch.Generator().manual_seed(3), {}
    for spec in MixtureOfExperts(make_context("chat", *SIZES), "m").weight_specs():
        tensors[spec.name] = torch.randn(spec.shape, generator=draw) * spec.shape[-1] ** -0.5
        if is_int8 and ".experts." in spec.name:
            tensors[spec.name] = torch.randint(-127, 128, spec.shape, generator=draw).to(torch.int8)
            scale = (0.5 + torch.rand(spec.shape[0], generator=draw)) * spec.shape[-1] ** -0.5 / 64
            tensors[f"{spec.name}_scale"] = scale
    if favoured is not None:
        bias = tensors["m.router.e_score_correction_bias"].fill_(-10.0)
        bias[favoured.start : favoured.stop] = 10.0
    return tensors


def named(meshes: list[ThreadMesh], size: int) -> list[ThreadMesh]:
    """Every group of experts has a communicator, as on a device."""
    for rank, mesh in enumerate(meshes):
        mesh.axis("ep").communicator = f"{NAME} {rank // size}"
    for number in range(len(meshes) // size):
        groups.register_group(f"{NAME} {number}", groups.thread_exchange(size, 10.0))
    return meshes


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: " ".join(map(str, split.values())))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("counts", [(5, 3, 0, 7), (0, 0, 1, 0)])
@pytest.mark.parametrize("is_int8", [False, True])
def test_shares(split: dict[str, Any], case: str, counts: tuple[int, ...], is_int8: bool) -> None:
    """Every rank has rows of its own, some have none."""
    parallel, tensors = ParallelConfig(cp_size=4, **split), drawn(CASES[case], is_int8=is_int8)
    streams = [randn(count, HIDDEN, seed=rank) for rank, count in enumerate(counts)]
    meshes = thread_meshes(parallel)
    if parallel.moe_dispatch == "fused":
        meshes = named(meshes, parallel.ep_size)

    def one(rank: int) -> Tensor:
        ops = npu_ops(is_series_a3=True)
        there = mixture(ops, tensors, mesh=meshes[rank], kind=parallel.moe_dispatch)
        with torch.inference_mode():
            out: Tensor = there(streams[rank], Rows(counts[rank], max(counts)))
        return out

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(one, range(4)))
    alone = mixture(REFERENCE, tensors)
    for stream, out in zip(streams, got, strict=True):
        close(out, alone(stream, Rows.even(len(stream), 1)))
