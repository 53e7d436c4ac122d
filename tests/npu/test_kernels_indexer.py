"""CPU kernels of the indexers: against loops over rows and keys, and what they refuse."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.npu.device import install
from tests.npu.kernels.indexer import NOWHERE

install()
npu = torch.ops.npu

HEADS, PAGE, COUNT = 3, 16, 6
TABLE = torch.tensor([[4, 1, 3], [2, 99, -5]], dtype=torch.int32)
Q_LENGTHS, K_LENGTHS = (3, 2), (37, 5)
Z = torch.zeros
INT32 = torch.int32


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def _key(request: int, k: int) -> tuple[int, int, int]:
    return int(TABLE[request, k // PAGE]), k % PAGE, 0


def _given(
    layout: str = "TND", layout_key: str = "PA_BSND", dtype: torch.dtype = torch.float32, **changed: Any
) -> dict[str, Any]:
    lead = (5,) if layout == "TND" else (2, 3)
    pages = _random(5, PAGE, 1, 128, dtype=dtype)
    pages[3, 5:] = pages[2, 5:] = pages[0] = torch.nan
    flat = [torch.stack([pages[_key(r, k)] for k in range(K_LENGTHS[r])]) for r in range(2)]
    q_lengths, k_lengths = ([3, 5] if layout == "TND" else [3, 2]), list(K_LENGTHS)
    key = pages
    if layout_key == "TND":
        key, k_lengths = torch.cat(flat).unsqueeze(1), [37, 42]
    elif layout_key == "BSND":
        key = torch.stack([torch.cat((each, each.new_full((40 - len(each), 128), torch.nan))) for each in flat]).unsqueeze(
            2
        )
    return {
        "query": _random(*lead, HEADS, 128, dtype=dtype),
        "key": key,
        "weights": _random(*lead, HEADS),
        "actual_seq_lengths_query": torch.tensor(q_lengths, dtype=INT32),
        "actual_seq_lengths_key": torch.tensor(k_lengths, dtype=INT32),
        "block_table": TABLE if layout_key == "PA_BSND" else None,
        "layout_query": layout,
        "layout_key": layout_key,
        "sparse_count": COUNT,
    } | changed


def _slow(q: Tensor, w: Tensor, keys: list[Tensor]) -> list[float]:
    return [sum(float(w[h]) * max(0.0, float(q[h].double() @ key.double())) for h in range(len(w))) for key in keys]


def _flat(x: Tensor, layout: str) -> Tensor:
    return x if layout == "TND" else torch.cat([x[b, :length] for b, length in enumerate(Q_LENGTHS)])


def _seen(mode: int) -> list[tuple[int, int]]:
    """(request, number of keys that the row sees) of each row."""
    return [
        (request, K_LENGTHS[request] - (length - 1 - i if mode == 3 else 0))
        for request, length in enumerate(Q_LENGTHS)
        for i in range(length)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize(
    ("layout", "layout_key"), [("TND", "PA_BSND"), ("BSND", "PA_BSND"), ("TND", "TND"), ("BSND", "BSND")]
)
def test_the_best_keys_in_some_order(layout: str, layout_key: str, mode: int, dtype: torch.dtype) -> None:
    given, paged = _given(layout, layout_key, dtype), _given(layout, "PA_BSND", dtype)
    has_values = layout_key != "PA_BSND"
    found, values = npu.npu_lightning_indexer(**given, sparse_mode=mode, return_value=has_values)
    assert found.dtype == INT32 and values.dtype == dtype
    assert found.shape == (*given["query"].shape[:-2], 1, COUNT) and values.shape == (found.shape if has_values else (0,))
    if layout == "BSND":
        assert bool((found[1, 2] == NOWHERE).all())
    q, w, found = _flat(given["query"], layout), _flat(given["weights"], layout), _flat(found, layout).squeeze(1)
    for row, (request, visible) in enumerate(_seen(mode)):
        scores = _slow(q[row], w[row], [paged["key"][_key(request, k)] for k in range(visible)])
        best = sorted(range(visible), key=lambda k: (-scores[k], k))[:COUNT]
        got = found[row].tolist()
        assert got[len(best) :] == [-1] * (COUNT - len(best))
        assert sorted(got[: len(best)]) == sorted(best)
        if has_values:
            row_values = _flat(values, layout)[row, 0].tolist()
            want = torch.tensor([scores[k] for k in got if k >= 0], dtype=torch.float64).to(dtype)
            torch.testing.assert_close(torch.tensor(row_values[: len(best)], dtype=dtype), want)
            assert all(value != value for value in row_values[len(best) :])


def test_the_order_is_shuffled_and_the_same_again() -> None:
    given = _given(sparse_count=40, sparse_mode=0)
    first, again = npu.npu_lightning_indexer(**given)[0], npu.npu_lightning_indexer(**given)[0]
    assert torch.equal(first, again)
    scores = [_slow(given["query"][0], given["weights"][0], [given["key"][_key(0, k)] for k in range(37)])]
    order = first[0, 0, :37].tolist()
    assert order != sorted(order) and order != sorted(range(37), key=lambda k: -scores[0][k])
    assert first[1, 0].tolist() != order and sorted(order) == list(range(37))


def test_equal_scores_go_to_the_lower_position() -> None:
    found = npu.npu_lightning_indexer(**_given(weights=Z(5, HEADS)))[0]
    assert sorted(found[0, 0].tolist()) == list(range(COUNT))


def test_rows_that_see_no_key_have_none() -> None:
    lengths = torch.tensor([1, 0], dtype=INT32)
    found = npu.npu_lightning_indexer(**_given(actual_seq_lengths_key=lengths))[0].squeeze(1)
    assert found[2].tolist() == [0, -1, -1, -1, -1, -1] and bool((found[[0, 1, 3, 4]] == -1).all())


def _quantised(**changed: Any) -> dict[str, Any]:
    given = _given()
    pages = torch.randint(-127, 128, (5, PAGE, 1, 128), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    scales = (_random(5, PAGE, 1).abs() / 100).half()
    query = torch.randint(-127, 128, (5, HEADS, 128), generator=torch.Generator().manual_seed(2)).to(torch.int8)
    return given | {
        "query": query,
        "key": pages,
        "query_dequant_scale": (_random(5, HEADS).abs() / 100).half(),
        "key_dequant_scale": scales,
        "query_quant_mode": 0,
        "key_quant_mode": 0,
    } | changed  # fmt: skip


def test_quantised_keys_count_with_their_scales() -> None:
    given = _quantised()
    found = npu.npu_quant_lightning_indexer(**given)
    assert found.shape == (5, 1, COUNT) and found.dtype == INT32
    for row, (request, visible) in enumerate(_seen(3)):
        q = given["query"][row].double() * given["query_dequant_scale"][row].double()[:, None]
        where = [_key(request, k) for k in range(visible)]
        keys = [given["key"][at].double() * float(given["key_dequant_scale"][at]) for at in where]
        scores = _slow(q, given["weights"][row], keys)
        best = sorted(range(visible), key=lambda k: (-scores[k], k))[:COUNT]
        assert sorted(k for k in found[row, 0].tolist() if k >= 0) == sorted(best)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "layout": ({"layout_query": "NTD"}, "layout_query"),
    "layout of keys": ({"layout_key": "PA_BNSD"}, "layout_key has to be 'PA_BSND' or 'TND', not 'PA_BNSD'"),
    "layouts differ": ({"layout_key": "BSND"}, "layout_key"),
    "values of pages": ({"return_value": True}, "return_value has to be False"),
    "width": ({"query": Z(5, HEADS, 64)}, "query.shape"),
    "heads": ({"query": Z(5, 65, 128), "weights": Z(5, 65)}, "heads of query has to be in 1 ... 64, not 65"),
    "weights": ({"weights": Z(5, 2)}, "weights.shape"),
    "weights' type": ({"weights": Z(5, HEADS).double()}, "weights.dtype"),
    "types": ({"query": Z(5, HEADS, 128).half()}, "key.dtype has to be torch.float16"),
    "count 0": ({"sparse_count": 0}, "sparse_count"),
    "count": ({"sparse_count": 2500}, "sparse_count has to be .*, not 2500"),
    "count too many": ({"sparse_count": 9216}, "sparse_count .*9216"),
    "mode": ({"sparse_mode": 4}, "sparse_mode"),
    "band": ({"pre_tokens": 10}, "pre_tokens"),
    "no sums": ({"actual_seq_lengths_query": torch.tensor([3, 2], dtype=INT32)}, "running sums that end at the 5 rows"),
    "no query lengths": ({"actual_seq_lengths_query": None}, "actual_seq_lengths_query is missing"),
    "no key lengths": ({"actual_seq_lengths_key": None}, "actual_seq_lengths_key is missing"),
    "int64 lengths": ({"actual_seq_lengths_key": torch.tensor(K_LENGTHS)}, "actual_seq_lengths_key.dtype"),
    "length over table": ({"actual_seq_lengths_key": torch.tensor([37, 49], dtype=INT32)}, "no running sums. in 0 ... 48"),
    "no table": ({"block_table": None}, "block_table is missing"),
    "int64 table": ({"block_table": TABLE.long()}, "block_table.dtype"),
    "block behind": ({"actual_seq_lengths_key": torch.tensor([37, 17], dtype=INT32)}, "block_table .*99"),
    "page of 24": ({"key": Z(5, 24, 1, 128)}, "block size .*24"),
    "two heads of keys": ({"key": Z(5, 16, 2, 128)}, "key.shape"),
    "strided pages": ({"key": Z(5, 16, 1, 256)[..., ::2]}, "key has to be contiguous"),
}
QUANT_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mode": ({"query_quant_mode": 1}, "query_quant_mode"),
    "floats": ({"key": Z(5, 16, 1, 128)}, "key.dtype"),
    "scale's shape": ({"key_dequant_scale": Z(5, 16).half()}, "key_dequant_scale.shape"),
    "scale's type": ({"query_dequant_scale": Z(5, HEADS).bfloat16()}, "query_dequant_scale.dtype"),
    "count": ({"sparse_count": 2500}, "sparse_count"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    changed, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"npu_lightning_indexer: .*{message}"):
        npu.npu_lightning_indexer(**_given(**changed))


@pytest.mark.parametrize("case", QUANT_REFUSED)
def test_refused_by_the_quantised_one(case: str) -> None:
    changed, message = QUANT_REFUSED[case]
    with pytest.raises(ValueError, match=f"npu_quant_lightning_indexer: .*{message}"):
        npu.npu_quant_lightning_indexer(**_quantised(**changed))


@pytest.mark.parametrize("count", [1, 2048, 3072, 8192])
def test_counts_that_are_allowed(count: int) -> None:
    assert npu.npu_lightning_indexer(**_given(sparse_count=count))[0].shape == (5, 1, count)
