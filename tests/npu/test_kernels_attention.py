"""CPU kernels of attention, of its merging and of what stands around it: against loops over rows, and what they refuse."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.npu.device import install
from tests.npu.kernels.attention import KERNELS

install()
npu = torch.ops.npu

HEADS, SCALE, PAGE = 2, 0.1, 16
MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
TABLE = torch.tensor([[4, 1, 3], [2, 99, -5]], dtype=torch.int32)  # what lies behind a length is not looked at
Q_LENGTHS, K_LENGTHS = (3, 2), (37, 5)


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def _pages(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Slots that belong to no visible key are NaN."""
    latent, rope = _random(5, PAGE, 1, 512, dtype=dtype), _random(5, PAGE, 1, 64, dtype=dtype)
    for cache in (latent, rope):
        cache[0] = torch.nan
        cache[3, 5:] = torch.nan
        cache[2, 5:] = torch.nan
    return latent, rope


def _keys_of(latent: Tensor, rope: Tensor, request: int) -> list[Tensor]:
    """Keys of a request one by one, [576]."""
    found = []
    for k in range(K_LENGTHS[request]):
        where = (int(TABLE[request, k // PAGE]), k % PAGE, 0)
        found.append(torch.cat((latent[where], rope[where])).double())
    return found


def _slow(q: Tensor, keys: list[Tensor], scale: float = SCALE) -> tuple[Tensor, float]:
    """One head of one row."""
    scores = [float(q.double() @ key) * scale for key in keys]
    highest = max(scores)
    weights = [math.exp(score - highest) for score in scores]
    total = math.fsum(weights)
    out = sum(weight / total * key[:512] for weight, key in zip(weights, keys, strict=True))
    assert isinstance(out, Tensor)
    return out, highest + math.log(total)


def _rows() -> list[tuple[int, int, int]]:
    """(row, request, how many rows of the request come after it)."""
    flat = [(request, length - 1 - i) for request, length in enumerate(Q_LENGTHS) for i in range(length)]
    return [(row, *each) for row, each in enumerate(flat)]


def _fused(layout: str = "TND", dtype: torch.dtype = torch.float32, mode: int = 3, **changed: Any) -> dict[str, Any]:
    latent, rope = _pages(dtype)
    lead = (5,) if layout.startswith("TND") else (2, 3)
    given = {
        "query": _random(*lead, HEADS, 512, dtype=dtype),
        "key": latent,
        "value": latent,
        "query_rope": _random(*lead, HEADS, 64, dtype=dtype),
        "key_rope": rope,
        "atten_mask": MASK if mode == 3 else None,
        "actual_seq_qlen": [3, 5] if layout.startswith("TND") else [3, 2],
        "actual_seq_kvlen": list(K_LENGTHS),
        "block_table": TABLE,
        "num_query_heads": HEADS,
        "num_key_value_heads": 1,
        "softmax_scale": SCALE,
        "input_layout": layout,
        "sparse_mode": mode,
        "block_size": PAGE,
        "return_softmax_lse": True,
    } | changed
    return given if given["value"].shape == given["key"].shape and "value" in changed else given | {"value": given["key"]}


def _tnd(x: Tensor, layout: str) -> Tensor:
    """Outputs [T, N, D] of any layout of outputs."""
    if layout == "TND_NTD":
        return x.transpose(0, 1)
    if layout == "BSND_NBSD":
        x = x.permute(1, 2, 0, 3)
    return x if layout == "TND" else torch.cat([x[b, :length] for b, length in enumerate(Q_LENGTHS)])


def _check(out: Tensor, lse: Tensor | None, given: dict[str, Any], keys_of: Any) -> None:
    lead = given["query"].dim() - 2
    q = torch.cat((given["query"], given["query_rope"]), -1)
    q = q if lead == 1 else torch.cat([q[b, :length] for b, length in enumerate(Q_LENGTHS)])
    for row, request, later in _rows():
        for head in range(HEADS):
            want, want_lse = _slow(q[row, head], keys_of(row, request, later))
            torch.testing.assert_close(out[row, head], want.to(out.dtype), rtol=1e-5, atol=1e-6)
            if lse is not None:
                assert lse[row, head].item() == pytest.approx(want_lse, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize("layout", ["TND", "TND_NTD", "BSND", "BSND_NBSD"])
def test_fused_attention_over_pages(layout: str, mode: int, dtype: torch.dtype) -> None:
    given = _fused(layout, dtype, mode)
    out, lse = npu.npu_fused_infer_attention_score_v2(**given)
    is_tnd = layout.startswith("TND")
    shapes = {"TND": (5, 2, 512), "TND_NTD": (2, 5, 512), "BSND": (2, 3, 2, 512), "BSND_NBSD": (2, 2, 3, 512)}
    assert out.shape == shapes[layout] and out.dtype == dtype
    assert lse.shape == ((5, 2, 1) if is_tnd else (2, 2, 3, 1)) and lse.dtype == torch.float32
    if not is_tnd:  # rows of no request
        rest = out.permute(1, 2, 0, 3) if layout == "BSND_NBSD" else out
        assert bool(rest[1, 2].isnan().all()) and bool((lse[1, :, 2] == torch.inf).all())
    flat = lse.squeeze(-1) if is_tnd else _tnd(lse.squeeze(-1).transpose(1, 2), "BSND")

    def keys_of(row: int, request: int, later: int) -> list[Tensor]:
        keys = _keys_of(given["key"], given["key_rope"], request)
        return keys[: len(keys) - later] if mode == 3 else keys

    _check(_tnd(out, layout), flat, given, keys_of)


@pytest.mark.parametrize("form", ["3-D", "BNBD"])
def test_other_forms_of_pages_are_the_same_memory(form: str) -> None:
    given = _fused()
    want = npu.npu_fused_infer_attention_score_v2(**given)
    for name in ("key", "value", "key_rope"):
        given[name] = given[name].squeeze(2) if form == "3-D" else given[name].transpose(1, 2)
    for got, each in zip(npu.npu_fused_infer_attention_score_v2(**given), want, strict=True):
        assert torch.equal(got, each)


def test_fused_attention_unpaged_and_with_older_names() -> None:
    given = _fused()
    want = npu.npu_fused_infer_attention_score_v2(**given)
    keys = [torch.stack(_keys_of(given["key"], given["key_rope"], request)) for request in range(2)]
    joined = torch.cat(keys).float().unsqueeze(1)
    latent = joined[..., :512].contiguous()
    rest = {"key": latent, "value": latent, "key_rope": joined[..., 512:], "block_table": None, "block_size": 0}
    got = npu.npu_fused_infer_attention_score_v2(**given | rest | {"actual_seq_kvlen": [37, 42]})
    torch.testing.assert_close(got, want)
    padded = torch.stack([torch.nn.functional.pad(key, (0, 0, 0, 40 - len(key)), value=torch.nan) for key in keys])
    padded = padded.float().unsqueeze(2)
    latent = padded[..., :512].contiguous()
    rest |= {"key": latent, "value": latent, "key_rope": padded[..., 512:]}
    got = npu.npu_fused_infer_attention_score_v2(**_fused("BSND") | rest)
    want = npu.npu_fused_infer_attention_score_v2(**_fused("BSND"))
    torch.testing.assert_close(got, want, equal_nan=True)
    old = {
        "num_query_heads": "num_heads",
        "softmax_scale": "scale",
        "actual_seq_qlen": "actual_seq_lengths",
        "actual_seq_kvlen": "actual_seq_lengths_kv",
        "return_softmax_lse": "softmax_lse_flag",
    }
    got = npu.npu_fused_infer_attention_score(**{old.get(name, name): value for name, value in given.items()})
    for each, other in zip(got, npu.npu_fused_infer_attention_score_v2(**given), strict=True):
        assert torch.equal(each, other)
    with pytest.raises(ValueError, match="npu_fused_infer_attention_score: num_heads has to be 2, not 4"):
        given = {old.get(name, name): value for name, value in given.items()}
        npu.npu_fused_infer_attention_score(**given | {"num_heads": 4})


def test_rows_without_keys_are_not_mistaken_for_results() -> None:
    out, lse = npu.npu_fused_infer_attention_score_v2(**_fused(mode=0, actual_seq_kvlen=[37, 0]))
    assert bool(out[:3].isfinite().all()) and bool(out[3:].isnan().all()) and bool((lse[3:] == torch.inf).all())
    out, lse = npu.npu_fused_infer_attention_score_v2(**_fused(mode=3, actual_seq_kvlen=[2, 5]))
    assert bool(out[0].isnan().all()) and bool((lse[0] == torch.inf).all()) and bool(out[1:].isfinite().all())
    assert npu.npu_fused_infer_attention_score_v2(**_fused(return_softmax_lse=False))[1].shape == (0,)


PICKS = [[5, 30, 0, 36, -1], [36, 1, 2, -1, -1], [7, -1, -1, -1, -1], [4, 3, 0, -1, -1], [0, 1, 2, 3, 4]]


def _sparse(layout_kv: str = "PA_BSND", layout: str = "TND", mode: int = 3, **changed: Any) -> dict[str, Any]:
    fused = _fused(layout)
    picks = torch.tensor(PICKS, dtype=torch.int32).unsqueeze(1)
    if layout == "BSND":
        picks = torch.cat((picks, picks.new_full((1, 1, 5), -1))).view(2, 3, 1, 5)
    given = {
        "query": fused["query"],
        "key": fused["key"],
        "sparse_indices": picks,
        "scale_value": SCALE,
        "block_table": TABLE,
        "actual_seq_lengths_query": torch.tensor(fused["actual_seq_qlen"], dtype=torch.int32),
        "actual_seq_lengths_kv": torch.tensor(K_LENGTHS, dtype=torch.int32),
        "query_rope": fused["query_rope"],
        "key_rope": fused["key_rope"],
        "layout_query": layout,
        "layout_kv": layout_kv,
        "sparse_mode": mode,
        "attention_mode": 2,
    }
    if layout_kv == "TND":
        joined = torch.cat([torch.stack(_keys_of(fused["key"], fused["key_rope"], request)) for request in range(2)])
        given |= {"key": joined[:, None, :512].float(), "key_rope": joined[:, None, 512:].float(), "block_table": None}
        given["actual_seq_lengths_kv"] = torch.tensor([37, 42], dtype=torch.int32)
    given |= changed
    return given if "value" in changed else given | {"value": given["key"]}


def _picked(fused: dict[str, Any], mode: int, block: int = 1) -> Any:
    def keys_of(row: int, request: int, later: int) -> list[Tensor]:
        keys = _keys_of(fused["key"], fused["key_rope"], request)
        last = len(keys) - later if mode == 3 else len(keys)
        at = [pick * block + i for pick in PICKS[row] if pick >= 0 for i in range(block)]
        return [keys[k] for k in at if k < last]

    return keys_of


@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize(("layout_kv", "layout"), [("PA_BSND", "TND"), ("PA_BSND", "BSND"), ("TND", "TND")])
def test_sparse_attention(layout_kv: str, layout: str, mode: int) -> None:
    given = _sparse(layout_kv, layout, mode)
    out, highest, total = npu.npu_sparse_flash_attention(**given, return_softmax_lse=layout_kv == "TND")
    assert out.shape == given["query"].shape
    if layout_kv == "TND":
        assert highest.shape == total.shape == (1, 5, 2) and highest.dtype == total.dtype == torch.float32
        lse = (highest + total.log()).squeeze(0)
    else:
        assert highest.shape == total.shape == (0,)
        lse = None
    if layout == "BSND":
        assert bool(out[1, 2].isnan().all())
    _check(_tnd(out, layout), lse, given, _picked(_fused(), mode))


def test_sparse_attention_picks_blocks() -> None:
    """Blocks of four: the last one of 37 keys has one."""
    shrunk = [[pick // 4 if pick >= 0 else -1 for pick in row] for row in PICKS]
    shrunk = [list(dict.fromkeys(row)) for row in shrunk]
    rows = [[p for p in row if p >= 0] + [-1] * (5 - len([p for p in row if p >= 0])) for row in shrunk]
    given = _sparse(mode=0, sparse_indices=torch.tensor(rows, dtype=torch.int32).unsqueeze(1), sparse_block_size=4)
    out = npu.npu_sparse_flash_attention(**given)[0]

    def keys_of(row: int, request: int, later: int) -> list[Tensor]:
        keys = _keys_of(_fused()["key"], _fused()["key_rope"], request)
        return [keys[k] for pick in rows[row] if pick >= 0 for k in range(pick * 4, min(pick * 4 + 4, len(keys)))]

    _check(out, None, given, keys_of)


def test_sparse_rows_without_keys_are_not_mistaken_for_results() -> None:
    none = torch.tensor(PICKS, dtype=torch.int32).unsqueeze(1)
    none[0] = -1
    none[3, 0] = torch.tensor([4, -1, -1, -1, -1], dtype=torch.int32)  # the last key, which row 3 does not see
    given = _sparse("TND", return_softmax_lse=True, sparse_indices=none)
    out, highest, total = npu.npu_sparse_flash_attention(**given)
    is_blind = torch.tensor([True, False, False, True, False])
    assert torch.equal(out.isnan().all(-1).all(-1), is_blind) and torch.equal(out.isnan().any(-1).any(-1), is_blind)
    lse = (highest + total.log())[0]
    assert torch.equal((lse == torch.inf).all(-1), is_blind) and bool(lse[~is_blind].isfinite().all())
    lengths = torch.tensor([37, 0], dtype=torch.int32)
    none[3:] = -1
    out = npu.npu_sparse_flash_attention(**_sparse(sparse_indices=none, actual_seq_lengths_kv=lengths))[0]
    assert bool(out[3:].isnan().all())


def test_garbage_in_a_key_reaches_the_rows_that_picked_it_and_no_others() -> None:
    given = _sparse()
    given["key"][int(TABLE[0, 0]), 0] = torch.nan  # key 0 of the first request, in whose place -1 could be looked up
    out = npu.npu_sparse_flash_attention(**given)[0]
    assert out.isnan().any(-1).any(-1).tolist() == [True, False, False, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_update_merges_what_was_split(dtype: torch.dtype) -> None:
    parts, rows, width = 3, 4, 16
    lses = [_random(rows, seed=part) for part in range(parts)]
    lses[1][2] = -torch.inf
    outs = [_random(rows, width, seed=10 + part, dtype=dtype) for part in range(parts)]
    got, merged = npu.npu_attention_update(lses, outs, 1)
    assert got.dtype == dtype and merged.shape == (rows,)
    for row in range(rows):
        weights = [math.exp(float(lse[row])) for lse in lses]
        want = sum(w / sum(weights) * out[row].double() for w, out in zip(weights, outs, strict=True))
        torch.testing.assert_close(got[row], want.to(dtype), rtol=1e-5, atol=1e-6)
        assert merged[row].item() == pytest.approx(math.log(sum(weights)), rel=1e-5, abs=1e-6)
    assert bool(npu.npu_attention_update(lses, outs, 0)[1].isnan().all())


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_scatter_nd_update_writes_rows_and_elements(index: torch.dtype) -> None:
    cache, kept = torch.zeros(3, 4, 5), torch.zeros(3, 4, 5)
    slots, rows = torch.tensor([[7], [0]], dtype=index), _random(2, 5)
    flat = cache.view(12, 5)
    got = npu.npu_scatter_nd_update_(flat, slots, rows)
    assert got.data_ptr() == cache.data_ptr()
    kept[1, 3], kept[0, 0] = rows[0], rows[1]
    assert torch.equal(cache, kept)
    pairs = torch.tensor([[[2, 1]], [[0, 3]]], dtype=index)
    made = npu.npu_scatter_nd_update(cache, pairs, rows.unsqueeze(1))
    assert torch.equal(cache, kept)
    kept[2, 1], kept[0, 3] = rows[0], rows[1]
    assert torch.equal(made, kept)


@pytest.mark.parametrize("perm", [[0, 1, 2], [1, 0, 2]])
def test_transpose_batchmatmul(perm: list[int]) -> None:
    x, weight = _random(3, 5, 32), _random(3, 32, 16)
    given = x if perm[0] == 0 else x.transpose(0, 1).contiguous()
    got = npu.npu_transpose_batchmatmul(given, weight, perm_x1=perm, perm_x2=[0, 1, 2], perm_y=[1, 0, 2])
    assert got.shape == (5, 3, 16) and got.is_contiguous()
    for t in range(5):
        for n in range(3):
            torch.testing.assert_close(got[t, n], (x[n, t].double() @ weight[n].double()).float(), rtol=1e-5, atol=1e-5)


Z = torch.zeros
FUSED_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "layout": ({"input_layout": "NTD"}, "input_layout has to be .*'NTD'"),
    "default layout": ({"input_layout": "BSH"}, "input_layout has to be .*'BSH'"),
    "heads": ({"query": Z(5, 3, 512), "query_rope": Z(5, 3, 64), "num_query_heads": 3}, "a power of two up to 128, not 3"),
    "heads said": ({"num_query_heads": 1}, "num_query_heads has to be 2, not 1"),
    "kv heads left out": ({"num_key_value_heads": 0}, "num_key_value_heads has to be 1, not 0"),
    "width": ({"query": Z(5, 2, 256)}, "query.shape"),
    "rope's width": ({"query_rope": Z(5, 2, 32)}, "query_rope.shape"),
    "no rope": ({"query_rope": None}, "query_rope .* is missing"),
    "no rope of keys": ({"key_rope": None}, "key_rope is missing"),
    "no running sums": ({"actual_seq_qlen": [3, 2]}, r"actual_seq_qlen has to be running sums that end at the 5 rows"),
    "sums too short": ({"actual_seq_qlen": [2, 4]}, "running sums that end at the 5 rows"),
    "no query lengths": ({"actual_seq_qlen": None}, "actual_seq_qlen is missing"),
    "no key lengths": ({"actual_seq_kvlen": None}, "actual_seq_kvlen is missing"),
    "running sums of keys": ({"actual_seq_kvlen": [37, 49]}, r"no running sums\) in 0 ... 48, not \[37, 49\]"),
    "one length": ({"actual_seq_kvlen": [37]}, "one length for each of 2 requests"),
    "another mask": ({"atten_mask": MASK.t()}, "atten_mask has to be the upper triangle"),
    "no mask": ({"atten_mask": None}, "atten_mask .* is missing"),
    "a small mask": ({"atten_mask": MASK[:64, :64]}, "atten_mask.shape"),
    "a float mask": ({"atten_mask": MASK.float()}, "atten_mask.dtype"),
    "a mask in mode 0": ({"sparse_mode": 0}, "atten_mask has to be None"),
    "mode": ({"sparse_mode": 4}, "sparse_mode"),
    "table's type": ({"block_table": TABLE.long()}, "block_table.dtype"),
    "table's rows": ({"block_table": TABLE[:1]}, "block_table.shape"),
    "block out of range": ({"actual_seq_kvlen": [37, 17]}, "block_table has to be in 0 ... 4, not 2 ... 99"),
    "block size": ({"block_size": 32}, "block_size has to be 16, not 32"),
    "no block size": ({"block_size": 0}, "block_size has to be 16, not 0"),
    "page of 24": ({"key": Z(5, 24, 1, 512), "key_rope": Z(5, 24, 1, 64), "block_size": 24}, "block size .*24"),
    "page of 2048": ({"key": Z(5, 2048, 1, 512), "key_rope": Z(5, 2048, 1, 64), "block_size": 2048}, "block size .*2048"),
    "other values": ({"value": Z(5, 16, 1, 512)}, "value has to be the tensor that key is"),
    "types": ({"key": Z(5, 16, 1, 512).half(), "key_rope": Z(5, 16, 1, 64).half()}, "key.dtype has to be torch.float32"),
    "strided pages": ({"key": Z(5, 16, 1, 576)[..., :512]}, "key has to be contiguous"),
    "band": ({"pre_tokens": 64}, "pre_tokens"),
    "scale": ({"dequant_scale_key": Z(1)}, "dequant_scale_key has to be None"),
    "quantised": ({"key_quant_mode": 1}, "key_quant_mode"),
    "sink": ({"learnable_sink": Z(2)}, "learnable_sink has to be None"),
}
INT32 = torch.int32
SPARSE_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "attention mode": ({"attention_mode": 0}, "attention_mode has to be 2, not 0"),
    "layout": ({"layout_query": "NTD"}, "layout_query"),
    "layout of keys": ({"layout_kv": "PA_BNSD"}, "layout_kv"),
    "lse of pages": ({"return_softmax_lse": True}, "return_softmax_lse with layout_kv 'PA_BSND' is broken"),
    "value left out": ({"value": None}, "value .* is missing"),
    "other values": ({"value": Z(5, 16, 1, 512)}, "value has to be the tensor that key is"),
    "heads": ({"query": Z(5, 3, 512), "query_rope": Z(5, 3, 64)}, "a power of two up to 128, not 3"),
    "width": ({"query": Z(5, 2, 576)}, "query.shape"),
    "no rope": ({"query_rope": None}, "query_rope .* is missing"),
    "types": ({"query": Z(5, 2, 512).half(), "query_rope": Z(5, 2, 64).half()}, "key.dtype has to be torch.float16"),
    "int64 picks": ({"sparse_indices": Z(5, 1, 5).long()}, "sparse_indices.dtype"),
    "picks' shape": ({"sparse_indices": Z(5, 5).int()}, "sparse_indices.shape"),
    "picks mixed": ({"sparse_indices": torch.tensor([[[0, -1, 1]]], dtype=INT32).expand(5, 1, 3)}, "-1 after them"),
    "picks of garbage": ({"sparse_indices": torch.full((5, 1, 3), -7, dtype=INT32)}, "-1 or more, not -7"),
    "picks behind": ({"sparse_indices": torch.full((5, 1, 3), 36, dtype=INT32)}, "below the 5 blocks of 5 keys, not 36"),
    "block of 3": ({"sparse_block_size": 3}, "sparse_block_size"),
    "block over page": ({"sparse_block_size": 32}, "sparse_block_size .* divides 16, not 32"),
    "int64 lengths": ({"actual_seq_lengths_kv": torch.tensor(K_LENGTHS)}, "actual_seq_lengths_kv.dtype"),
    "no lengths": ({"actual_seq_lengths_kv": None}, "actual_seq_lengths_kv is missing"),
    "no query lengths": ({"actual_seq_lengths_query": None}, "actual_seq_lengths_query is missing"),
    "no sums": ({"actual_seq_lengths_query": torch.tensor([3, 2], dtype=INT32)}, "running sums that end at the 5 rows"),
    "length over table": ({"actual_seq_lengths_kv": torch.tensor([37, 49], dtype=INT32)}, "in 0 ... 48"),
    "no table": ({"block_table": None}, "block_table is missing"),
    "page of 24": ({"key": Z(5, 24, 1, 512), "key_rope": Z(5, 24, 1, 64)}, "block size .*24"),
    "mode": ({"sparse_mode": 4}, "sparse_mode"),
    "sinks": ({"sinks": Z(2)}, "sinks"),
}
LSE, OUT = Z(4), Z(4, 16)
X, W = Z(3, 5, 32), Z(3, 32, 16)
OTHERS: dict[str, tuple[Any, str]] = {
    "update: none": (
        lambda: KERNELS["npu_attention_update"]([], [], 0),
        r"npu_attention_update: len\(lse\) has to be 1 ... 16, not 0",
    ),
    "update: 17": (lambda: npu.npu_attention_update([LSE] * 17, [OUT] * 17, 0), r"len\(lse\) .*17"),
    "update: uneven": (lambda: npu.npu_attention_update([LSE] * 2, [OUT], 0), r"len\(local_out\)"),
    "update: type": (lambda: npu.npu_attention_update([LSE], [OUT], 2), "update_type"),
    "update: lse's type": (lambda: npu.npu_attention_update([LSE.half()], [OUT], 0), r"lse\[0\].dtype"),
    "update: lse's shape": (lambda: npu.npu_attention_update([LSE[:, None]], [OUT], 0), r"lse\[0\].shape"),
    "update: rows": (lambda: npu.npu_attention_update([LSE], [OUT[:3]], 0), r"local_out\[0\].shape"),
    "update: types": (lambda: npu.npu_attention_update([LSE] * 2, [OUT, OUT.half()], 0), r"local_out\[1\].dtype"),
    "update: width": (lambda: npu.npu_attention_update([LSE], [Z(4, 520)], 0), "multiple of 8 up to 512, not 520"),
    "update: odd width": (lambda: npu.npu_attention_update([LSE], [Z(4, 12)], 0), "not 12"),
    "scatter: index": (
        lambda: npu.npu_scatter_nd_update_(Z(4, 2), Z(1, 1), Z(1, 2)),
        "npu_scatter_nd_update_: indices.dtype",
    ),
    "scatter: shape": (lambda: npu.npu_scatter_nd_update_(Z(4, 2), Z(1, 1).int(), Z(2)), "updates.shape"),
    "scatter: type": (lambda: npu.npu_scatter_nd_update_(Z(4, 2), Z(1, 1).int(), Z(1, 2).half()), "updates.dtype"),
    "scatter: behind": (lambda: npu.npu_scatter_nd_update_(Z(4, 2), Z(1, 1).int() + 4, Z(1, 2)), "in 0 ... 3, not 4"),
    "scatter: -1": (lambda: npu.npu_scatter_nd_update(Z(4, 2), Z(1, 1).int() - 1, Z(1, 2)), "in 0 ... 3, not -1"),
    "matmul: K": (lambda: npu.npu_transpose_batchmatmul(X[..., :24], W[:, :24]), "npu_transpose_batchmatmul: K .*24"),
    "matmul: N": (lambda: npu.npu_transpose_batchmatmul(X, W[..., :8]), "N has to be a multiple of 16, not 8"),
    "matmul: perm_x1": (lambda: npu.npu_transpose_batchmatmul(X, W, perm_x1=[2, 1, 0]), "perm_x1"),
    "matmul: perm_x2": (lambda: npu.npu_transpose_batchmatmul(X, W, perm_x2=[0, 2, 1]), "perm_x2"),
    "matmul: perm_y": (lambda: npu.npu_transpose_batchmatmul(X, W, perm_y=[0, 1, 2]), "perm_y"),
    "matmul: heads": (lambda: npu.npu_transpose_batchmatmul(X, W, perm_x1=[1, 0, 2]), "weight.shape"),
    "matmul: bias": (lambda: npu.npu_transpose_batchmatmul(X, W, bias=Z(16)), "bias"),
    "matmul: split": (lambda: npu.npu_transpose_batchmatmul(X, W, batch_split_factor=2), "batch_split_factor"),
    "matmul: types": (lambda: npu.npu_transpose_batchmatmul(X, W.half()), "weight.dtype"),
}


@pytest.mark.parametrize("case", FUSED_REFUSED)
def test_refused_by_fused_attention(case: str) -> None:
    changed, message = FUSED_REFUSED[case]
    with pytest.raises(ValueError, match=f"npu_fused_infer_attention_score_v2: .*{message}"):
        npu.npu_fused_infer_attention_score_v2(**_fused(**changed))


def test_pages_of_heads_first_are_for_tnd_only() -> None:
    given = _fused("BSND")
    given |= {name: given[name].transpose(1, 2) for name in ("key", "value", "key_rope")}
    with pytest.raises(ValueError, match=r"key\.shape"):
        npu.npu_fused_infer_attention_score_v2(**given)


@pytest.mark.parametrize("case", SPARSE_REFUSED)
def test_refused_by_sparse_attention(case: str) -> None:
    changed, message = SPARSE_REFUSED[case]
    with pytest.raises(ValueError, match=f"npu_sparse_flash_attention: .*{message}"):
        npu.npu_sparse_flash_attention(**_sparse(**changed))


def test_sparse_attention_refuses_lengths_of_unpaged_keys_that_are_no_running_sums() -> None:
    with pytest.raises(ValueError, match="actual_seq_lengths_kv has to be running sums that end at the 42 rows"):
        npu.npu_sparse_flash_attention(**_sparse("TND", actual_seq_lengths_kv=torch.tensor(K_LENGTHS, dtype=INT32)))
    with pytest.raises(ValueError, match="block_table has to be None"):
        npu.npu_sparse_flash_attention(**_sparse("TND", block_table=TABLE))


@pytest.mark.parametrize("case", OTHERS)
def test_refused(case: str) -> None:
    call, message = OTHERS[case]
    with pytest.raises(ValueError, match=message):
        call()
