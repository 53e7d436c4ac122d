"""CPU kernels of what comes before attention: against loops over rows, and what they refuse."""

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.npu.device import install

install()
npu = torch.ops.npu

HE, RANK, HEADS = 1024, 1536, 2


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale).to(dtype)


def _norm(row: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    row = row.double()
    return row / math.sqrt(float(row @ row) / len(row) + epsilon) * gamma.double()


def _turn(row: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (2i, 2i + 1) as complex numbers; real parts first, imaginary ones behind them."""
    z = torch.complex(row.double()[0::2], row.double()[1::2]) * torch.complex(cos.double()[:32], sin.double()[:32])
    return torch.cat((z.real, z.imag))


def _angles(*lead: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angles = _random(*lead, 32, seed=9)
    return torch.cat((angles, angles), -1).cos().to(dtype), torch.cat((angles, angles), -1).sin().to(dtype)


def _kv(mode: str = "PA", dtype: torch.dtype = torch.float32, **changed: Any) -> dict[str, Any]:
    cos, sin = _angles(2, 1, 3, dtype=dtype)
    shape = (2, 1, 40) if mode == "Norm" else (4, 16, 1)
    index = torch.tensor([[3, 39, 0], [7, 8, 9]]) if mode == "Norm" else torch.tensor([17, 63, 0, 33, 34, 40])
    return {
        "kv": _random(2, 1, 3, 576, dtype=dtype),
        "gamma": _random(512, dtype=dtype),
        "cos": cos,
        "sin": sin,
        "index": index,
        "k_cache": torch.full((*shape, 64), 7.0, dtype=dtype),
        "ckv_cache": torch.full((*shape, 512), 7.0, dtype=dtype),
        "epsilon": 1e-3,
        "cache_mode": mode,
        "is_output_kv": True,
    } | changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["PA", "PA_BNSD", "Norm"])
def test_kv_goes_to_its_slots_normed_and_turned(mode: str, dtype: torch.dtype) -> None:
    given = _kv(mode, dtype)
    k_embed, y = npu.npu_kv_rmsnorm_rope_cache_v2(**given)
    assert k_embed.shape == (2, 1, 3, 64) and y.shape == (2, 1, 3, 512)
    wanted = {"k_cache": torch.full_like(given["k_cache"], 7.0), "ckv_cache": torch.full_like(given["ckv_cache"], 7.0)}
    for b in range(2):
        for s in range(3):
            row = given["kv"][b, 0, s]
            latent = _norm(row[:512], given["gamma"], 1e-3).to(dtype)
            rope = _turn(row[512:], given["cos"][b, 0, s], given["sin"][b, 0, s]).to(dtype)
            torch.testing.assert_close(y[b, 0, s], latent, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(k_embed[b, 0, s], rope, rtol=1e-5, atol=1e-6)
            slot = int(given["index"].flatten()[3 * b + s])
            where = (b, 0, slot) if mode == "Norm" else (slot // 16, slot % 16, 0)
            wanted["ckv_cache"][where], wanted["k_cache"][where] = latent, rope
    for name, want in wanted.items():
        torch.testing.assert_close(given[name], want, rtol=1e-5, atol=1e-6)


def test_both_versions_and_the_functional_twin_agree() -> None:
    first, second, third = _kv(), _kv(), _kv()
    new = npu.npu_kv_rmsnorm_rope_cache_v2(**first)
    old = npu.npu_kv_rmsnorm_rope_cache(**second)
    twin = npu.npu_kv_rmsnorm_rope_cache_v2_functional(**third)
    for got, want in zip(old, (first["k_cache"], first["ckv_cache"], *new), strict=True):
        assert torch.equal(got, want)
    for got, want in zip(twin, (*new, first["k_cache"], first["ckv_cache"]), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(second["ckv_cache"], first["ckv_cache"]) and bool((third["ckv_cache"] == 7).all())


def test_what_was_not_asked_for_is_undefined() -> None:
    for made in npu.npu_kv_rmsnorm_rope_cache_v2(**_kv(is_output_kv=False)):
        assert bool(made.isnan().all())


@functools.cache
def _weights(dtype: torch.dtype) -> dict[str, Tensor]:
    down = {
        "weight_dq": _random(HE, RANK, dtype=dtype, scale=HE**-0.5),
        "weight_uq_qr": _random(RANK, HEADS * 192, dtype=dtype, scale=RANK**-0.5),
        "weight_dkv_kr": _random(HE, 576, dtype=dtype, scale=HE**-0.5),
    }
    return {name: npu.npu_format_cast(weight, 29) for name, weight in down.items()} | {
        "weight_uk": _random(HEADS, 128, 512, dtype=dtype, scale=128**-0.5),
        "rmsnorm_gamma_cq": _random(RANK, dtype=dtype),
        "rmsnorm_gamma_ckv": _random(512, dtype=dtype),
    }


def _mla(lead: tuple[int, ...] = (3,), dtype: torch.dtype = torch.float32, **changed: Any) -> dict[str, Any]:
    cos, sin = _angles(*lead, dtype=dtype)
    return {
        "token_x": _random(*lead, HE, dtype=dtype),
        **_weights(dtype),
        "rope_sin": sin,
        "rope_cos": cos,
        "kv_cache": torch.zeros(3, 32, 1, 512, dtype=dtype),
        "kr_cache": torch.zeros(3, 32, 1, 64, dtype=dtype),
        "cache_index": torch.tensor([95, 0, 40, 41, 42, 43][: math.prod(lead)]).view(lead),
        "rmsnorm_epsilon_cq": 1e-3,
        "rmsnorm_epsilon_ckv": 1e-2,
        "query_norm_flag": True,
        "qc_qr_scale": 1.5,
        "kc_scale": 0.75,
    } | changed


@pytest.mark.parametrize("lead", [(3,), (2, 2)])
def test_prolog(lead: tuple[int, ...]) -> None:
    given = _mla(lead)
    q_nope, q_rope, first, query_norm, second = npu.npu_mla_prolog_v3(**given)
    assert q_nope.shape == (*lead, HEADS, 512) and q_rope.shape == (*lead, HEADS, 64)
    assert query_norm.shape == (*lead, RANK) and first.shape == second.shape == (0,)
    flat = {name: given[name].flatten(0, len(lead) - 1) for name in ("token_x", "rope_cos", "rope_sin", "cache_index")}
    for t, x in enumerate(flat["token_x"]):
        cos, sin = flat["rope_cos"][t], flat["rope_sin"][t]
        c = _norm(x.double() @ given["weight_dq"].double(), given["rmsnorm_gamma_cq"], 1e-3) * 1.5
        torch.testing.assert_close(query_norm.flatten(0, -2)[t], c.float(), rtol=1e-4, atol=1e-5)
        q = c @ given["weight_uq_qr"].double()
        for n in range(HEADS):
            nope, rope = q[n * 192 : n * 192 + 128], q[n * 192 + 128 : (n + 1) * 192]
            want = (nope @ given["weight_uk"][n].double()).float()
            torch.testing.assert_close(q_nope.flatten(0, -3)[t, n], want, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(q_rope.flatten(0, -3)[t, n], _turn(rope, cos, sin).float(), rtol=1e-4, atol=1e-4)
        kv = x.double() @ given["weight_dkv_kr"].double()
        slot = int(flat["cache_index"][t])
        latent = _norm(kv[:512], given["rmsnorm_gamma_ckv"], 1e-2) * 0.75
        torch.testing.assert_close(given["kv_cache"].view(-1, 512)[slot], latent.float(), rtol=1e-4, atol=1e-5)
        rope = _turn(kv[512:], cos, sin).float()
        torch.testing.assert_close(given["kr_cache"].view(-1, 64)[slot], rope, rtol=1e-4, atol=1e-4)
    assert int((given["kv_cache"] != 0).any(-1).sum()) == math.prod(lead)


def test_prolog_in_bf16_without_a_norm_that_nobody_wants_and_its_twin() -> None:
    given, twin = _mla(dtype=torch.bfloat16, query_norm_flag=False), _mla(dtype=torch.bfloat16, query_norm_flag=False)
    results = npu.npu_mla_prolog_v3(**given)
    assert results[0].dtype == results[1].dtype == results[3].dtype == torch.bfloat16 and results[3].numel() == 0
    exact = npu.npu_mla_prolog_v3(**{k: v.float() if _is_bf16(v) else v for k, v in given.items()} | _cast(given))
    torch.testing.assert_close(results[0], exact[0].bfloat16(), rtol=1e-2, atol=1e-5)
    others = npu.npu_mla_prolog_v3_functional(**twin)
    for got, want in zip(others, (*results, given["kv_cache"], given["kr_cache"]), strict=True):
        assert torch.equal(got, want)
    assert not bool(twin["kv_cache"].any())


def _is_bf16(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bfloat16


def _cast(given: dict[str, Any]) -> dict[str, Tensor]:
    return {name: npu.npu_format_cast(given[name].float(), 29) for name in ("weight_dq", "weight_uq_qr", "weight_dkv_kr")}


def _heads(count: int) -> dict[str, Any]:
    up = npu.npu_format_cast(torch.zeros(RANK, count * 192), 29)
    return {"weight_uk": torch.zeros(count, 128, 512), "weight_uq_qr": up}


def _nz(*shape: int) -> Tensor:
    return npu.npu_format_cast(torch.zeros(shape), 29)


KV_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mode": ({"cache_mode": "PA_NZ"}, "cache_mode has to be .*'PA_NZ'"),
    "latent": ({"kv": torch.zeros(2, 1, 3, 320)}, "kv.shape"),
    "two heads": ({"kv": torch.zeros(2, 2, 3, 576)}, "kv.shape"),
    "gamma": ({"gamma": torch.zeros(64)}, "gamma.shape"),
    "gamma's type": ({"gamma": torch.zeros(512, dtype=torch.bfloat16)}, "gamma.dtype"),
    "cos": ({"cos": torch.zeros(2, 1, 1, 64)}, "cos.shape"),
    "sin's type": ({"sin": torch.zeros(2, 1, 3, 64).half()}, "sin.dtype"),
    "int32 index": ({"index": torch.arange(6, dtype=torch.int32)}, "index.dtype has to be torch.int64"),
    "index's shape": ({"index": torch.zeros(2, 3, dtype=torch.int64)}, r"index.shape has to be \[6\]"),
    "slot behind": ({"index": torch.tensor([0, 1, 2, 3, 4, 64])}, r"index has to be in 0 ... 63, not 0 ... 64"),
    "slot -1": ({"index": torch.tensor([-1, 1, 2, 3, 4, 5])}, r"index has to be in 0 ... 63, not -1"),
    "page of 24": ({"k_cache": torch.zeros(4, 24, 1, 64), "ckv_cache": torch.zeros(4, 24, 1, 512)}, "block size .*24"),
    "widths swapped": (
        {"k_cache": torch.zeros(4, 16, 1, 512), "ckv_cache": torch.zeros(4, 16, 1, 64)},
        r"k_cache.shape\[3\]",
    ),
    "3-D cache": ({"k_cache": torch.zeros(4, 16, 64), "ckv_cache": torch.zeros(4, 16, 512)}, "k_cache.shape"),
    "caches differ": ({"ckv_cache": torch.zeros(5, 16, 1, 512)}, "ckv_cache.shape"),
    "strided": ({"k_cache": torch.zeros(4, 16, 1, 128)[..., ::2]}, "k_cache .*contiguous"),
    "cache's type": ({"ckv_cache": torch.zeros(4, 16, 1, 512).half()}, "ckv_cache.dtype"),
    "a scale": ({"c_kv_scale": torch.zeros(1)}, "c_kv_scale"),
    "v": ({"v": torch.zeros(2, 1, 3, 512)}, "v has to be None"),
    "norm: index": (
        {"cache_mode": "Norm", "k_cache": torch.zeros(2, 1, 9, 64), "ckv_cache": torch.zeros(2, 1, 9, 512)},
        "index",
    ),
}
MLA_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "hidden": ({"token_x": torch.zeros(3, 1280)}, r"token_x.shape\[-1\] .*1280"),
    "fp16": ({"token_x": torch.zeros(3, HE).half()}, "token_x.dtype"),
    "rank": ({"weight_dq": _nz(HE, 512)}, r"weight_dq.shape\[1\] .*512"),
    "three heads": (_heads(3), "heads .*power of two up to 128, not 3"),
    "256 heads": ({"weight_uk": torch.zeros(1, 1, 1).expand(256, 128, 512)}, "heads .*256"),
    "up": ({"weight_uq_qr": _nz(RANK, 192)}, "weight_uq_qr.shape"),
    "nope width": ({"weight_uk": torch.zeros(HEADS, 64, 512)}, "weight_uk.shape"),
    "transposed down": ({"weight_dkv_kr": _nz(576, HE)}, "weight_dkv_kr.shape"),
    "down in ND": ({"weight_dq": torch.zeros(HE, RANK)}, "weight_dq's format has to be 29"),
    "up as a view": ({"weight_uq_qr": _nz(HEADS * 192, RANK).t()}, "weight_uq_qr is a slice, view"),
    "uk in NZ": ({"weight_uk": _nz(HEADS, 128, 512)}, "weight_uk's format has to be 2"),
    "uk strided": ({"weight_uk": torch.zeros(HEADS, 512, 128).transpose(1, 2)}, "weight_uk .*contiguous"),
    "gamma": ({"rmsnorm_gamma_cq": torch.zeros(512)}, "rmsnorm_gamma_cq.shape"),
    "gamma's type": ({"rmsnorm_gamma_ckv": torch.zeros(512).bfloat16()}, "rmsnorm_gamma_ckv.dtype"),
    "sin of halves": ({"rope_sin": torch.zeros(3, 32)}, "rope_sin.shape"),
    "no index": ({"cache_index": None}, "cache_index is missing"),
    "int32 index": ({"cache_index": torch.zeros(3, dtype=torch.int32)}, "cache_index.dtype"),
    "slot behind": ({"cache_index": torch.tensor([0, 1, 96])}, "cache_index has to be in 0 ... 95, not 0 ... 96"),
    "slot -1": ({"cache_index": torch.tensor([0, 1, -1])}, "cache_index"),
    "page of 8": ({"kv_cache": torch.zeros(3, 8, 1, 512), "kr_cache": torch.zeros(3, 8, 1, 64)}, "block size .*not 8"),
    "page of 2048": ({"kv_cache": torch.zeros(1, 2048, 1, 512), "kr_cache": torch.zeros(1, 2048, 1, 64)}, "2048"),
    "caches swapped": ({"kv_cache": torch.zeros(3, 32, 1, 64)}, "kv_cache.shape"),
    "3-D cache": ({"kr_cache": torch.zeros(3, 32, 64)}, "kr_cache.shape"),
    "cache mode": ({"cache_mode": "PA_NZ"}, "cache_mode .*'PA_NZ'"),
    "int8": ({"weight_quant_mode": 1}, "weight_quant_mode has to be 0, not 1"),
    "int8 cache": ({"kv_cache_quant_mode": 1}, "kv_cache_quant_mode"),
    "tiles": ({"tile_size": 64}, "tile_size"),
    "a scale": ({"dequant_scale_x": torch.zeros(3, 1)}, "dequant_scale_x"),
}


@pytest.mark.parametrize("case", KV_REFUSED)
def test_refused_by_kv_rmsnorm_rope_cache(case: str) -> None:
    changed, message = KV_REFUSED[case]
    for name in ("npu_kv_rmsnorm_rope_cache", "npu_kv_rmsnorm_rope_cache_v2"):
        with pytest.raises(ValueError, match=f"{name}: .*{message}"):
            getattr(npu, name)(**_kv(**{"mode": "PA", **changed}))


@pytest.mark.parametrize("case", MLA_REFUSED)
def test_refused_by_mla_prolog(case: str) -> None:
    changed, message = MLA_REFUSED[case]
    with pytest.raises(ValueError, match=f"npu_mla_prolog_v3: .*{message}"):
        npu.npu_mla_prolog_v3(**_mla(**changed))
