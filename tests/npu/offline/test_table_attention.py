"""Rotations, fronts, indexer and attention of the NPU table on the real release: shapes without a device, and GE graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.npu.offline.capture import Captured, ge_graph
from tests.npu.offline.real import SOCS, torchair
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
Call = tuple[Callable[..., Any], list[Tensor]]
Entry = Callable[[Ops], Call]
PLUMBING = {
    "Unsqueeze",
    "Reshape",
    "Data",
    "RefData",
    "Const",
    "ConstPlaceHolder",
    "NetOutput",
    "Identity",
    "NoOp",
    "Squeeze",
}


def ops() -> Ops:
    return kernels.load("npu", exe_mode="ge_graph", npu=NpuSettings())


def launches(captured: Captured) -> dict[str, int]:
    """What runs on the device: neither names for the same memory nor what comes from constants alone."""
    known = {node.name for node in captured.of("Const", "ConstPlaceHolder")}
    for node in captured.nodes:  # in the order of the graph
        sources = {name.rpartition(":")[0] for name in node.inputs if name and not name.endswith(":-1")}
        if sources and sources <= known:
            known.add(node.name)
    return dict(Counter(node.type for node in captured.nodes if node.type not in PLUMBING and node.name not in known))


def graph(entry: Entry, soc: str = "Ascend910B3") -> Captured:
    with fake(soc):
        call, inputs = entry(ops())
        config = torchair.CompilerConfig()
        config.experimental_config.keep_inference_input_mutations = True
        return ge_graph(call, *inputs, soc=soc, config=config)


def rotation() -> Tensor:
    return empty(4, ROWS, 64)


def caches() -> tuple[Tensor, Tensor]:
    return empty(BLOCKS, BLOCK, 1, 512), empty(BLOCKS, BLOCK, 1, 64)


def tables() -> tuple[Tensor, Tensor]:
    """Blocks and their starts."""
    return empty(BATCH, COLUMNS, dtype=INT64), empty(BATCH, COLUMNS, dtype=INT64)


def rotations(of: Ops) -> Call:
    return of.rotation, [empty(ROWS, dtype=INT64), empty(4, 3072, 128)]  # fp32 seen as bf16


def turning(of: Ops) -> Call:
    return lambda x, by: of.rope(x[..., :64], by, is_interleaved=True), [empty(ROWS, INDEX_HEADS, 128), rotation()]


def front(of: Ops) -> Call:
    loaded = PrologWeights(
        empty(HIDDEN, RANK + 576), empty(RANK), empty(RANK, HEADS * 192), empty(HEADS, 128, 512), empty(512)
    )

    def run(x: Tensor, by: Tensor, slots: Tensor, latent: Tensor, rope: Tensor, *weights: Tensor) -> Any:
        return of.mla_prolog(x, by, weights=weights, slots=slots, cache=(latent, rope), scales=SCALES)

    given = [empty(ROWS, HIDDEN), rotation(), empty(ROWS, dtype=INT64), *caches()]
    return run, [*given, *of.prepare_prolog(loaded, SCALES)]


def storing(of: Ops) -> Call:
    def run(x: Tensor, by: Tensor, slots: Tensor, latent: Tensor, rope: Tensor, *weights: Tensor) -> Tensor:
        of.mla_store(x, by, weights=weights, slots=slots, cache=(latent, rope), scales=SCALES)
        return slots[1:]  # a result, so that there is a graph

    return run, front(of)[1]


def dense(of: Ops) -> Call:
    def run(q: Tensor, positions: Tensor, latent: Tensor, rope: Tensor, blocks: Tensor, starts: Tensor) -> Any:
        where = {"latent": latent.squeeze(2), "rope": rope.squeeze(2), "block_tables": blocks, "block_starts": starts}
        return of.paged_attention(q, positions, scale=0.1, **where)

    return run, [empty(BATCH, WINDOW, HEADS, 576), empty(BATCH, WINDOW, dtype=INT64), *caches(), *tables()]


def layer(of: Ops) -> Call:
    """A front and sparse attention to what it wrote."""
    front_of, given = front(of)
    sparse_of, (_, keys, _, _, blocks) = sparse(of)

    def run(keys: Tensor, blocks: Tensor, *inputs: Tensor) -> Any:
        q, _ = front_of(*inputs)
        return sparse_of(q.view(BATCH, WINDOW, HEADS, 576), keys, inputs[3], inputs[4], blocks)

    return run, [keys, blocks, *given]


def sparse(of: Ops) -> Call:
    def run(q: Tensor, keys: Tensor, latent: Tensor, rope: Tensor, blocks: Tensor) -> Any:
        where = {"latent": latent.squeeze(2), "rope": rope.squeeze(2), "block_tables": blocks}
        return of.sparse_attention(q, keys, scale=0.1, **where)

    q, keys = empty(BATCH, WINDOW, HEADS, 576), empty(BATCH, WINDOW, PICKED, dtype=INT64)
    return run, [q, keys, *caches(), tables()[0]]


def candidates(of: Ops) -> Call:
    def run(q: Tensor, weights: Tensor, cache: Tensor, blocks: Tensor, starts: Tensor, high: Tensor) -> Any:
        where = {"cache": cache, "block_tables": blocks, "block_starts": starts}
        return of.index_candidates(q, weights, high=high, limits=(LOW, BUDGET), **where)

    q, weights = empty(BATCH, WINDOW, INDEX_HEADS, 128), empty(BATCH, WINDOW, INDEX_HEADS, dtype=FLOAT)
    return run, [q, weights, empty(BLOCKS, BLOCK, 128), *tables(), empty(BATCH, WINDOW, dtype=INT64)]


def choice(of: Ops) -> Call:
    def run(scores: Tensor, positions: Tensor, high: Tensor) -> Any:
        return of.select_positions(scores, positions, low=0, high=high, budget=BUDGET)

    shape = (ROWS, 4 * BUDGET)
    return run, [empty(*shape, dtype=FLOAT), empty(*shape, dtype=INT64), empty(ROWS, dtype=INT64)]


def merging(of: Ops) -> Call:
    return of.merge_partials, [empty(4, ROWS, 16, 512, dtype=FLOAT), empty(4, ROWS, 16, dtype=FLOAT)]


SHAPES: dict[Entry, list[tuple[tuple[int, ...], torch.dtype]]] = {
    rotations: [((4, ROWS, 64), torch.bfloat16)],
    turning: [((ROWS, INDEX_HEADS, 64), torch.bfloat16)],
    front: [((ROWS, HEADS, 576), torch.bfloat16), ((ROWS, RANK), torch.bfloat16)],
    storing: [((ROWS - 1,), INT64)],
    sparse: [((BATCH, WINDOW, HEADS, 512), FLOAT), ((BATCH, WINDOW, HEADS), FLOAT)],
    candidates: [((BATCH, WINDOW, BUDGET), FLOAT), ((BATCH, WINDOW, BUDGET), INT64)],
    choice: [((ROWS, BUDGET), FLOAT), ((ROWS, BUDGET), INT64)],
    merging: [((ROWS, 16, 512), FLOAT)],
}


@pytest.mark.parametrize("entry", SHAPES, ids=lambda entry: entry.__name__)
def test_shapes(entry: Entry) -> None:
    """Dense attention is left out: outside of a graph it looks at lengths."""
    with fake():
        call, inputs = entry(ops())
        found = call(*inputs)
    found = (found,) if isinstance(found, Tensor) else found
    assert [(tuple(x.shape), x.dtype) for x in found] == SHAPES[entry]
    assert all(x.device.type == "npu" for x in found)


# What is called by name, and how many launches there are in all.
NODES: dict[Entry, tuple[dict[str, int], int]] = {
    rotations: ({}, 27),
    turning: ({"RotaryMul": 1}, 3),
    front: ({"MlaPrologV3": 1}, 3),
    storing: ({"KvRmsNormRopeCache": 1, "MatMul": 1}, 6),
    layer: ({"MlaPrologV3": 1, "SparseFlashAttention": 1}, 30),
    dense: ({"FusedInferAttentionScore": 1}, 15),
    sparse: ({"SparseFlashAttention": 1, "Sort": 1}, 27),
    candidates: ({"LightningIndexer": 1, "BatchMatMul": 2, "TopKV2": 2}, 52),
    choice: ({"TopKV2": 2}, 19),
    merging: ({"AttentionUpdate": 1}, 4),
}
COMPOSED: dict[Entry, tuple[dict[str, int], int]] = {
    front: (
        {"MatMul": 4, "RmsNorm": 1, "TransposeBatchMatMul": 1, "InterleaveRope": 1, "KvRmsNormRopeCache": 1},
        11,
    ),
    storing: ({"KvRmsNormRopeCache": 1, "MatMul": 1}, 4),
}


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("entry", NODES, ids=lambda entry: entry.__name__)
def test_launches(entry: Entry, soc: str) -> None:
    """The caches, which are inputs and written to, are not copied."""
    found, (named, total) = launches(graph(entry, soc)), NODES[entry]
    assert {name: found.get(name) for name in named} == named
    assert sum(found.values()) <= total
    assert not {"TensorMove", "Assign"} & {*found}


@pytest.mark.parametrize("entry", COMPOSED, ids=lambda entry: entry.__name__)
def test_launches_of_the_composition(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prolog, "has", lambda name: name != "npu_mla_prolog_v3" and operators.has(name))
    found, (named, total) = launches(graph(entry)), COMPOSED[entry]
    assert {name: found.get(name) for name in named} == named
    assert sum(found.values()) <= total
    assert not {"TensorMove", "Assign"} & {*found}


def test_a_view_between_a_cache_and_its_writer_would_copy_the_cache() -> None:
    """Why caches are kept in pages of one head."""
    with fake():
        call, inputs = front(ops())
        config = torchair.CompilerConfig()
        config.experimental_config.keep_inference_input_mutations = True

        def run(x: Tensor, by: Tensor, slots: Tensor, latent: Tensor, rope: Tensor, *weights: Tensor) -> Any:
            return call(x, by, slots, latent.unsqueeze(2), rope.unsqueeze(2), *weights)

        inputs[3:5] = [cache.squeeze(2) for cache in inputs[3:5]]
        assert len(ge_graph(run, *inputs, config=config).of("TensorMove")) == 2


def test_two_writes_to_a_cache_in_one_graph_copy_it() -> None:
    """As far as torchair can take it: of several passes over one layer each wants a graph of its own."""

    def twice(of: Ops) -> Call:
        once, given = front(of)

        def run(x: Tensor, *rest: Tensor) -> Any:
            return once(x + once(x, *rest)[0].flatten(1)[:, :HIDDEN], *rest)

        return run, given

    assert launches(graph(twice))["TensorMove"] == 4
