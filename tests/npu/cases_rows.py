"""Calls of norms, rotations, prolog and cache writes, quantisation and int8 products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.npu.case import BF16, Case, Draw
from tests.npu.compare import Close, Exact, Int8, Opaque, Rule
from tests.npu.kernels.refusals import FRACTAL_NZ

ROWS, WIDTH = 6, 512
LATENT, ROPE, HEADS = 512, 64, 4
BLOCK, BLOCKS = 128, 3
SCALE = Close(rtol=1e-4, floor=0)
PRODUCT = Close(rtol=2**-6, outliers=0.01)  # of two products, whose first result is rounded on the way


def rms_norm(draw: Draw) -> dict[str, Any]:
    return {"input": draw.normal(ROWS, WIDTH), "gamma": draw.uniform(WIDTH, dtype=BF16), "epsilon": 1e-6}


def add_rms_norm(draw: Draw) -> dict[str, Any]:
    x1, x2 = draw.normal(ROWS, WIDTH), draw.normal(ROWS, WIDTH)
    return {"x1": x1, "x2": x2, "gamma": draw.uniform(WIDTH, dtype=BF16), "epsilon": 1e-5}


def interleave_rope(draw: Draw) -> dict[str, Any]:
    cos, sin = draw.angles(2, 1, 3, ROPE)
    return {"x": draw.normal(2, HEADS, 3, ROPE), "cos": cos, "sin": sin}


def rotary_mul(mode: str) -> Any:
    def make(draw: Draw) -> dict[str, Any]:
        cos, sin = draw.angles(1, 1, ROWS, 128)
        return {"input": draw.normal(1, HEADS, ROWS, 128), "r1": cos, "r2": sin, "rotary_mode": mode}

    return make


def format_cast(draw: Draw) -> dict[str, Any]:
    return {"input": draw.normal(64, 128), "acl_format": FRACTAL_NZ}


def prefetch(draw: Draw) -> dict[str, Any]:
    return {"input": draw.normal(64, 128), "dependency": draw.normal(8), "max_size": 64 * 128 * 2, "offset": 0}


def slots(draw: Draw) -> Tensor:
    """Of all rows, no two alike."""
    return draw.order(BLOCKS * BLOCK)[:ROWS]


def caches(draw: Draw) -> tuple[Tensor, Tensor]:
    return draw.normal(BLOCKS, BLOCK, 1, LATENT), draw.normal(BLOCKS, BLOCK, 1, ROPE)


def kv_rmsnorm_rope_cache(draw: Draw) -> dict[str, Any]:
    (cos, sin), (latent, rope) = draw.angles(ROWS, 1, 1, ROPE), caches(draw)
    return {
        "kv": draw.normal(ROWS, 1, 1, LATENT + ROPE),
        "gamma": draw.uniform(LATENT, dtype=BF16),
        "cos": cos,
        "sin": sin,
        "index": slots(draw),
        "k_cache": rope,
        "ckv_cache": latent,
        "epsilon": 1e-5,
        "cache_mode": "PA",
        "is_output_kv": True,
    }


def kv_rmsnorm_rope_cache_of_requests(draw: Draw) -> dict[str, Any]:
    """Two requests of three rows, each with a cache of its own."""
    cos, sin = draw.angles(2, 1, 3, ROPE)
    return kv_rmsnorm_rope_cache(draw) | {
        "kv": draw.normal(2, 1, 3, LATENT + ROPE),
        "cos": cos,
        "sin": sin,
        "index": torch.stack([draw.order(32)[:3] for _ in range(2)]),
        "k_cache": draw.normal(2, 1, 32, ROPE),
        "ckv_cache": draw.normal(2, 1, 32, LATENT),
        "cache_mode": "Norm",
    }


def mla_prolog(hidden: int, q_rank: int) -> Any:
    def make(draw: Draw) -> dict[str, Any]:
        (cos, sin), (latent, rope) = draw.angles(ROWS, ROPE), caches(draw)
        return {
            "token_x": draw.normal(ROWS, hidden),
            "weight_dq": draw.normal(hidden, q_rank, size=hidden**-0.5),
            "weight_uq_qr": draw.normal(q_rank, HEADS * 192, size=q_rank**-0.5),
            "weight_uk": draw.normal(HEADS, 128, LATENT, size=128**-0.5),
            "weight_dkv_kr": draw.normal(hidden, LATENT + ROPE, size=hidden**-0.5),
            "rmsnorm_gamma_cq": draw.uniform(q_rank, dtype=BF16),
            "rmsnorm_gamma_ckv": draw.uniform(LATENT, dtype=BF16),
            "rope_sin": sin,
            "rope_cos": cos,
            "kv_cache": latent,
            "kr_cache": rope,
            "cache_index": slots(draw),
            "rmsnorm_epsilon_cq": 1e-5,
            "rmsnorm_epsilon_ckv": 1e-5,
            "cache_mode": "PA_BSND",
            "query_norm_flag": True,
            "qc_qr_scale": (hidden / q_rank) ** 0.5,
            "kc_scale": (hidden / LATENT) ** 0.5,
        }

    return make


def swiglu(draw: Draw) -> dict[str, Any]:
    return {"input": draw.normal(ROWS, 2 * WIDTH), "dim": -1}


def dynamic_quant(draw: Draw) -> dict[str, Any]:
    return {"input": draw.normal(ROWS, WIDTH), "dst_type": torch.int8}


def dynamic_quant_smooth(draw: Draw) -> dict[str, Any]:
    return dynamic_quant(draw) | {"smooth_scales": draw.uniform(WIDTH, dtype=BF16)}


GROUPED = 5  # rows that belong to a group


def dynamic_quant_groups(draw: Draw) -> dict[str, Any]:
    sums = torch.tensor([2, 2, GROUPED], dtype=torch.int32)
    return dynamic_quant(draw) | {"smooth_scales": draw.uniform(3, WIDTH, dtype=BF16), "group_index": sums}


def quant_matmul(draw: Draw) -> dict[str, Any]:
    return {
        "x1": draw.int8(ROWS, WIDTH),
        "x2": draw.int8(WIDTH, 256),
        "scale": draw.uniform(256, low=5e-4, high=2e-3),
        "pertoken_scale": draw.uniform(ROWS, low=5e-3, high=2e-2),
        "output_dtype": BF16,
    }


def quant_matmul_sums(draw: Draw) -> dict[str, Any]:
    return {name: value for name, value in quant_matmul(draw).items() if name != "pertoken_scale"} | {
        "scale": torch.ones(256),
        "output_dtype": torch.int32,
    }


COUNTS = [2, 0, 3]


def dequant_swiglu_quant(draw: Draw) -> dict[str, Any]:
    return {
        "x": draw.ints(-40000, 40000, ROWS, 2 * 256, dtype=torch.int32),
        "weight_scale": draw.uniform(3, 2 * 256, low=5e-3, high=2e-2),
        "activation_scale": draw.uniform(ROWS, 1, low=5e-3, high=2e-2),
        "group_index": torch.tensor(COUNTS),
        "activate_left": True,
        "quant_mode": 1,
    }


def dequant_swiglu_quant_whole(draw: Draw) -> dict[str, Any]:
    """Without groups, as a dense path has it."""
    given = dequant_swiglu_quant(draw)
    del given["group_index"]
    return given | {"weight_scale": draw.uniform(1, 2 * 256, low=5e-3, high=2e-2)}


_CACHED: tuple[Rule, ...] = (Close(), Close(), Close(), Close())
_WRITTEN: dict[str, Rule] = {"k_cache": Close(), "ckv_cache": Close()}
_PROLOG: tuple[Rule, ...] = (PRODUCT, PRODUCT, Opaque(), Close(rtol=2**-6, outliers=0.01), Opaque())
_PROLOG_WRITTEN: dict[str, Rule] = {"kv_cache": PRODUCT, "kr_cache": PRODUCT}
_PRIVATE = ("weight_dq", "weight_uq_qr", "weight_dkv_kr")
_NO_RESULT = "has no result: the card shows that the call is taken, and no more"

CASES = (
    Case("npu_rms_norm", "bf16", rms_norm, (Close(), SCALE)),
    Case(
        "npu_rms_norm",
        "gamma in fp32",
        lambda draw: rms_norm(draw) | {"gamma": draw.uniform(WIDTH)},
        (Close(), SCALE),
    ),
    Case("npu_add_rms_norm", "bf16", add_rms_norm, (Close(), Close(floor=0), Close())),
    Case("npu_interleave_rope", "bf16", interleave_rope, (Close(),)),
    Case("npu_rotary_mul", "half", rotary_mul("half"), (Close(),)),
    Case("npu_rotary_mul", "interleave", rotary_mul("interleave"), (Close(),)),
    Case("npu_format_cast", "to the matrix unit's", format_cast, (Exact(),)),
    Case("npu_prefetch", "whole", prefetch, (), {"input": Exact()}, idle={"dependency": _NO_RESULT}),
    Case("npu_kv_rmsnorm_rope_cache", "pages", kv_rmsnorm_rope_cache, _CACHED, _WRITTEN),
    Case("npu_kv_rmsnorm_rope_cache", "requests", kv_rmsnorm_rope_cache_of_requests, _CACHED, _WRITTEN),
    Case("npu_kv_rmsnorm_rope_cache_v2", "pages", kv_rmsnorm_rope_cache, (Close(), Close()), _WRITTEN),
    Case("npu_kv_rmsnorm_rope_cache_v2_functional", "pages", kv_rmsnorm_rope_cache, _CACHED),
    Case("npu_mla_prolog_v3", "hidden 1024", mla_prolog(1024, 1536), _PROLOG, _PROLOG_WRITTEN, _PRIVATE),
    Case("npu_mla_prolog_v3_functional", "hidden 2048", mla_prolog(2048, 1536), (*_PROLOG, PRODUCT, PRODUCT), {}, _PRIVATE),
    Case("npu_swiglu", "bf16", swiglu, (Close(),)),
    Case("npu_dynamic_quant", "plain", dynamic_quant, (Int8(), SCALE)),
    Case("npu_dynamic_quant", "smooth", dynamic_quant_smooth, (Int8(), SCALE)),
    Case(
        "npu_dynamic_quant",
        "groups",
        dynamic_quant_groups,
        (Int8(GROUPED), Close(rtol=1e-4, floor=0, rows=GROUPED)),
    ),
    Case("npu_quant_matmul", "bf16", quant_matmul, (Close(floor=0),)),
    Case("npu_quant_matmul", "weight in the matrix unit's format", quant_matmul, (Close(floor=0),), {}, ("x2",)),
    Case(
        "npu_quant_matmul",
        "raw sums",
        quant_matmul_sums,
        (Exact(),),
        idle={"scale": "raw sums have none; the schema wants a tensor"},
    ),
    Case(
        "npu_dequant_swiglu_quant",
        "groups",
        dequant_swiglu_quant,
        (Int8(sum(COUNTS)), Close(rtol=1e-4, floor=0, rows=sum(COUNTS))),
    ),
    Case("npu_dequant_swiglu_quant", "whole", dequant_swiglu_quant_whole, (Int8(), SCALE)),
)
