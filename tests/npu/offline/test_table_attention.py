"""Rotations, fronts, indexer and attention of the NPU table on the real release: shapes without a device, and GE graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.npu.offline.capture import Captured, ge_graph
from tests.npu.offline.real import SOCS
from tests.npu.offline.shapes import empty, fake

from longcat_pd import kernels  # isort: skip
from longcat_pd.kernels import NpuSettings, Ops  # isort: skip
from longcat_pd.kernels.npu import operators, prolog  # isort: skip
from longcat_pd.kernels.ops import PrologScales, PrologWeights  # isort: skip

FLOAT, INT64 = torch.float32, torch.int64
BATCH, WINDOW, HEADS, HIDDEN, RANK, BLOCKS, BLOCK, COLUMNS = 4, 2, 64, 8192, 1536, 10, 128, 6
ROWS = BATCH * WINDOW
INDEX_HEADS, LOW, BUDGET, PICKED = 32, 16, 1008, 2048
SCALES = PrologScales(1e-5, 4.0)
PLUMBING = {"Unsqueeze", "Reshape", "Data", "RefData", "Const", "ConstPlaceHolder", "NetOutput", "Identity", "NoOp", "Squeeze"}


def ops() -> Ops:
    return kernels.load("npu", exe_mode="ge_graph", npu=NpuSettings())


def launches(captured: Captured) -> dict[str, int]:
    """What runs on the device."""
    return dict(Counter(node.type for node in captured.nodes if node.type not in PLUMBING))


def rotation() -> Tensor:
    return empty(4, ROWS, 64)


def weights() -> PrologWeights:
    return PrologWeights(
        empty(HIDDEN, RANK + 576), empty(RANK), empty(RANK, HEADS * 192), empty(HEADS, 128, 512), empty(512)
    )


def caches() -> tuple[Tensor, Tensor]:
    return empty(BLOCKS, BLOCK, 512), empty(BLOCKS, BLOCK, 64)


def tables() -> dict[str, Tensor]:
    return {name: empty(BATCH, COLUMNS, dtype=INT64) for name in ("block_tables", "block_starts")}


def rotations(of: Ops) -> Callable[..., Any]:
    prepared = empty(4, 3072, 128)  # fp32 seen as bf16
    return lambda: of.rotation(empty(ROWS, dtype=INT64), prepared)


def turning(of: Ops) -> Callable[..., Any]:
    return lambda: of.rope(empty(ROWS, INDEX_HEADS, 128)[..., :64], rotation(), is_interleaved=True)


def front(of: Ops) -> Callable[..., Any]:
    prepared = of.prepare_prolog(weights(), SCALES)
    slots = empty(ROWS, dtype=INT64)
    return lambda: of.mla_prolog(
        empty(ROWS, HIDDEN), rotation(), weights=prepared, slots=slots, cache=caches(), scales=SCALES
    )


def storing(of: Ops) -> Callable[..., Any]:
    prepared = of.prepare_prolog(weights(), SCALES)

    def run() -> Tensor:
        x = empty(ROWS, HIDDEN)
        of.mla_store(
            x, rotation(), weights=prepared, slots=empty(ROWS, dtype=INT64), cache=caches(), scales=SCALES
        )
        return x

    return run


def dense(of: Ops) -> Callable[..., Any]:
    latent, rope = caches()
    return lambda: of.paged_attention(
        empty(BATCH, WINDOW, HEADS, 576), empty(BATCH, WINDOW, dtype=INT64), latent=latent, rope=rope, scale=0.1, **tables()
    )


def sparse(of: Ops) -> Callable[..., Any]:
    latent, rope = caches()
    return lambda: of.sparse_attention(
        empty(BATCH, WINDOW, HEADS, 576),
        empty(BATCH, WINDOW, PICKED, dtype=INT64),
        latent=latent,
        rope=rope,
        block_tables=tables()["block_tables"],
        scale=0.1,
    )


def candidates(of: Ops) -> Callable[..., Any]:
    return lambda: of.index_candidates(
        empty(BATCH, WINDOW, INDEX_HEADS, 128),
        empty(BATCH, WINDOW, INDEX_HEADS, dtype=FLOAT),
        cache=empty(BLOCKS, BLOCK, 128),
        high=empty(BATCH, WINDOW, dtype=INT64),
        limits=(LOW, BUDGET),
        **tables(),
    )


def choice(of: Ops) -> Callable[..., Any]:
    return lambda: of.select_positions(
        empty(ROWS, 4 * BUDGET, dtype=FLOAT),
        empty(ROWS, 4 * BUDGET, dtype=INT64),
        low=0,
        high=empty(ROWS, dtype=INT64),
        budget=BUDGET,
    )


def merging(of: Ops) -> Callable[..., Any]:
    return lambda: of.merge_partials(empty(4, ROWS, 16, 512, dtype=FLOAT), empty(4, ROWS, 16, dtype=FLOAT))


SHAPES: dict[Callable[[Ops], Callable[..., Any]], list[tuple[tuple[int, ...], torch.dtype]]] = {
    rotations: [((4, ROWS, 64), torch.bfloat16)],
    turning: [((ROWS, INDEX_HEADS, 64), torch.bfloat16)],
    front: [((ROWS, HEADS, 576), torch.bfloat16), ((ROWS, RANK), torch.bfloat16)],
    storing: [((ROWS, HIDDEN), torch.bfloat16)],
    sparse: [((BATCH, WINDOW, HEADS, 512), FLOAT), ((BATCH, WINDOW, HEADS), FLOAT)],
    candidates: [((BATCH, WINDOW, BUDGET), FLOAT), ((BATCH, WINDOW, BUDGET), INT64)],
    choice: [((ROWS, BUDGET), FLOAT), ((ROWS, BUDGET), INT64)],
    merging: [((ROWS, 16, 512), FLOAT)],
}


@pytest.mark.parametrize("entry", SHAPES, ids=lambda entry: entry.__name__)
def test_shapes(entry: Callable[[Ops], Callable[..., Any]]) -> None:
    with fake():
        found = entry(ops())()
    found = (found,) if isinstance(found, Tensor) else found
    assert [(tuple(x.shape), x.dtype) for x in found] == SHAPES[entry]
    assert all(x.device.type == "npu" for x in found)


NODES: dict[Callable[[Ops], Callable[..., Any]], dict[str, int]] = {
    rotations: {},
    turning: {},
    front: {},
    storing: {},
    dense: {},
    sparse: {},
    candidates: {},
    choice: {},
    merging: {},
}


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("entry", NODES, ids=lambda entry: entry.__name__)
def test_launches(entry: Callable[[Ops], Callable[..., Any]], soc: str) -> None:
    with fake(soc):
        call = entry(ops())
        captured = ge_graph(lambda x: (call(), x + 1), empty(1), soc=soc)
    found = launches(captured)
    found["Add"] -= 1
    print(entry.__name__, sum(found.values()), {name: n for name, n in found.items() if n})


@pytest.mark.parametrize("entry", [front, storing])
def test_launches_of_the_composition(
    entry: Callable[[Ops], Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prolog, "has", lambda name: name != "npu_mla_prolog_v3" and operators.has(name))
    with fake():
        call = entry(ops())
        captured = ge_graph(lambda x: (call(), x + 1), empty(1))
    print(entry.__name__, "composed", launches(captured))
