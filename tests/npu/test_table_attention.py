"""Attention of the NPU's table against the reference's, on CPU kernels of the operators."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longcat_pd.kernels import NpuSettings, load
from longcat_pd.kernels.npu import attention, tables
from longcat_pd.kernels.npu.limits import check_attention
from longcat_pd.kernels.reference import table as reference_table
from longcat_pd.kernels.refusal import Unsupported
from tests.npu import device
from tests.npu.kernels.attention import npu_sparse_flash_attention
from tests.npu.paged import BLOCK, Paged, noise, paged

device.install()
OPS, REFERENCE = load("npu", npu=NpuSettings(dtype=torch.float32)), reference_table()
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2}}
HEADS, SCALE = 4, 0.05
DTYPES = [torch.float32, torch.bfloat16]
PLACES = [(1, 0), (2, 0), (2, 1), (3, 2)]


def case(at: Paged, dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
    """Queries and caches."""
    q = noise(*at.positions.shape, HEADS, 576, seed=1, dtype=dtype)
    latent = noise(at.num_blocks, BLOCK, 512, seed=2, dtype=dtype)
    return q, {"latent": latent, "rope": noise(at.num_blocks, BLOCK, 64, seed=3, dtype=dtype), "block_tables": at.tables}


def wide(q: Tensor, where: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    return q.float(), {name: x.float() if x.is_floating_point() else x for name, x in where.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ranks", "rank"), PLACES)
@pytest.mark.parametrize("rows_each", [1, 3])
def test_dense_attention(dtype: torch.dtype, ranks: int, rank: int, rows_each: int) -> None:
    """Sequences of which a rank holds nothing that some row sees, and padding, give 0 and -inf."""
    at = paged([70, 16, 5, 33], rows_each, ranks=ranks, rank=rank)
    q, where = case(at, dtype)
    out, lse = OPS.paged_attention(q, at.positions, block_starts=at.starts, scale=SCALE, **where)
    q, where = wide(q, where)
    expected = REFERENCE.paged_attention(q, at.positions, block_starts=at.starts, scale=SCALE, **where)
    torch.testing.assert_close((out, lse), expected, **CLOSE[dtype])
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    assert (lse[-1] == -torch.inf).all() and not out[-1].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows_each", [1, 3])
def test_sparse_attention(dtype: torch.dtype, rows_each: int) -> None:
    at = paged([70, 16, 5, 33], rows_each)
    q, where = case(at, dtype)
    out, lse = OPS.sparse_attention(q, picked(at), scale=SCALE, **where)
    q, where = wide(q, where)
    torch.testing.assert_close((out, lse), REFERENCE.sparse_attention(q, picked(at), scale=SCALE, **where), **CLOSE[dtype])
    assert (lse[-1] == -torch.inf).all() and not out[-1].any()


def picked(at: Paged) -> Tensor:
    """A third of what rows see, with -1 in between; nothing for some rows."""
    keys = torch.arange(at.tables.shape[1] * BLOCK).expand(*at.positions.shape, -1)
    drawn = torch.rand(keys.shape, generator=torch.Generator().manual_seed(4)) < 0.4
    starts = at.starts.repeat_interleave(BLOCK, 1).unsqueeze(1) + keys % BLOCK
    keys = keys.masked_fill(~drawn | (starts > at.positions.unsqueeze(-1)), -1)
    keys[2:3] = -1
    return keys[..., torch.randperm(keys.shape[-1], generator=torch.Generator().manual_seed(5))]


@pytest.fixture
def patched() -> Iterator[None]:
    """An operator package with sparse attention whose sum and maximum are right for pages."""
    library = torch.library.Library("custom", "FRAGMENT")
    schema = str(torch.ops.npu.npu_sparse_flash_attention.default._schema)
    library.define(schema.removeprefix("npu::"))
    operator = torch.ops.custom.npu_sparse_flash_attention.default
    library.impl(operator.name(), device.by_keyword(operator._schema, of_pages), "CPU")
    yield
    library._destroy()


def of_pages(key: Tensor, key_rope: Tensor, sparse_indices: Tensor, block_table: Tensor, **options: Any) -> Any:
    """By way of the stock kernel: each request's keys are read from its pages."""
    assert options.pop("layout_kv") == "PA_BSND"
    assert options["actual_seq_lengths_query"].tolist() == list(range(1, len(block_table) + 1))
    assert (options.pop("actual_seq_lengths_kv") == block_table.shape[1] * key.shape[1]).all()
    size, picks = key.shape[1], sparse_indices.squeeze(1).long()
    slots = block_table.long().gather(1, picks.clamp_min(0) // size) * size + picks.clamp_min(0) % size
    options |= {"actual_seq_lengths_query": torch.tensor([len(picks)], dtype=torch.int32), "layout_kv": "TND"}
    options["value"] = flat = key.flatten(0, 1)
    return npu_sparse_flash_attention(
        key=flat,
        key_rope=key_rope.flatten(0, 1),
        sparse_indices=torch.where(picks < 0, -1, slots).int().unsqueeze(1),
        actual_seq_lengths_kv=torch.tensor([len(flat)], dtype=torch.int32),
        block_table=None,
        **options,
    )


def test_a_patched_operator_takes_the_place_of_the_composition(patched: None) -> None:
    at = paged([70, 16, 5, 33], 2)
    q, where = case(at, torch.float32)
    ops = load("npu", npu=NpuSettings(dtype=torch.float32))
    assert ops.sparse_attention is not attention.sparse_attention
    got = ops.sparse_attention(q, picked(at), scale=SCALE, **where)
    torch.testing.assert_close(got, REFERENCE.sparse_attention(q, picked(at), scale=SCALE, **where), rtol=1e-5, atol=1e-5)


def test_calls_are_cut_where_tables_are_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    at = paged([70, 16, 5, 33], 3)
    q, where = case(at, torch.float32)
    whole = OPS.paged_attention(q, at.positions, block_starts=at.starts, scale=SCALE, **where)
    monkeypatch.setattr(tables, "_MOST_ENTRIES", 4 * at.tables.shape[1])
    cut = OPS.paged_attention(q, at.positions, block_starts=at.starts, scale=SCALE, **where)
    torch.testing.assert_close(cut, whole)


def test_more_rows_than_requests_in_a_call() -> None:
    """One prompt; the operator refuses more than 4096 requests."""
    rows = 4099
    positions = torch.arange(rows).unsqueeze(0) % BLOCK
    q, latent = noise(1, rows, 1, 576, seed=1), noise(1, BLOCK, 512, seed=2)
    where = {"latent": latent, "rope": noise(1, BLOCK, 64, seed=3), "block_tables": torch.zeros(1, 1, dtype=torch.int64)}
    where["block_starts"] = torch.zeros_like(where["block_tables"])
    got = OPS.paged_attention(q, positions, scale=SCALE, **where)
    torch.testing.assert_close(got, REFERENCE.paged_attention(q, positions, scale=SCALE, **where), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("updates", [True, False])
@pytest.mark.parametrize("parts", [1, 2, 17])
def test_merging(parts: int, updates: bool) -> None:
    outs, lses = noise(parts, 5, HEADS, 512, seed=1), noise(parts, 5, HEADS, seed=2, scale=30)
    lses[:, 0] = outs[:, 0] = 0
    lses[:, 0] = -torch.inf  # no part has a key
    lses[1:, 1], outs[1:, 1] = -torch.inf, 0  # one has
    lses[-1, 2, 1] = 80
    got = attention.merge_partials_with(updates=updates)(outs, lses)
    torch.testing.assert_close(got, REFERENCE.merge_partials(outs, lses), rtol=1e-5, atol=1e-5)
    assert not got[0].any()


def test_no_rows() -> None:
    at = paged([20], 1)
    q, where = case(at, torch.float32)
    none = {name: x[:0] if name == "block_tables" else x for name, x in where.items()}
    got = OPS.paged_attention(q[:0], at.positions[:0], block_starts=at.starts[:0], scale=SCALE, **none)
    assert [x.shape for x in got] == [(0, 1, HEADS, 512), (0, 1, HEADS)]
    got = OPS.sparse_attention(q[:0], torch.zeros(0, 1, 7, dtype=torch.int64), scale=SCALE, **none)
    assert [x.shape for x in got] == [(0, 1, HEADS, 512), (0, 1, HEADS)]
    assert OPS.merge_partials(torch.zeros(2, 0, HEADS, 512), torch.zeros(2, 0, HEADS)).shape == (0, HEADS, 512)


def test_a_graph_keeps_lengths_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torchair's twin, which takes tensors; here its stand-in notes what it was given."""
    given: list[tuple[Tensor, Tensor]] = []

    @torch.compiler.disable
    def operator(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        given.append((options.pop("actual_seq_qlen"), options.pop("actual_seq_kvlen")))
        lists = dict(zip(("actual_seq_qlen", "actual_seq_kvlen"), (x.tolist() for x in given[-1]), strict=True))
        found: tuple[Tensor, Tensor] = torch.ops.npu.npu_fused_infer_attention_score_v2(
            query, key, value, **lists, **options
        )
        return found

    compiler = SimpleNamespace(ops=SimpleNamespace(npu_fused_infer_attention_score_v2=operator))
    monkeypatch.setitem(sys.modules, "torchair", compiler)
    ops = load("npu", exe_mode="ge_graph", npu=NpuSettings(dtype=torch.float32))
    at = paged([70, 16, 5, 33], 2)
    q, where = case(at, torch.float32)
    eager = ops.paged_attention(q, at.positions, block_starts=at.starts, scale=SCALE, **where)
    assert not given, "outside of a graph the operator takes lists"
    torch._dynamo.reset()
    got = torch.compile(ops.paged_attention, backend="eager")(q, at.positions, block_starts=at.starts, scale=SCALE, **where)
    torch.testing.assert_close(got, eager)
    assert given[0][0].tolist() == list(range(1, 11))
    torch._dynamo.reset()
    captured = torch.compile(OPS.paged_attention, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="captured stream"):
        captured(q, at.positions, block_starts=at.starts, scale=SCALE, **where)
    torch._dynamo.reset()


def test_graphs_of_ge_want_their_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchair", None)
    with pytest.raises(Unsupported, match="torchair"):
        load("npu", exe_mode="ge_graph", npu=NpuSettings(dtype=torch.float32))


@pytest.mark.parametrize(("heads", "block_size"), [(12, 128), (256, 128), (64, 8), (64, 2048), (64, 100)])
def test_limits_are_told_at_start(heads: int, block_size: int) -> None:
    with pytest.raises(Unsupported, match=str(heads) if block_size == 128 else str(block_size)):
        check_attention(heads=heads, block_size=block_size)
    check_attention(heads=64, block_size=128)


def test_limits_are_asserted() -> None:
    at = paged([20], 1)
    q, where = case(at, torch.float32)
    with pytest.raises(AssertionError, match="3 heads"):
        OPS.paged_attention(q[:, :, :3], at.positions, block_starts=at.starts, scale=SCALE, **where)
    with pytest.raises(AssertionError, match=r"blocks of 8"):
        where |= {"latent": where["latent"][:, :8], "rope": where["rope"][:, :8]}
        OPS.sparse_attention(q, picked(at), scale=SCALE, **where)
