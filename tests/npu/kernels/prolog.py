"""What comes before attention: npu_kv_rmsnorm_rope_cache, its v2, and npu_mla_prolog_v3, each with the functional twin.

Rope parts are de-interleaved (even elements, then odd ones) and then turned by halves, so queries and keys of all of them
match. Of two writes to one slot in a call any may win. Negative slots are refused: nothing says that they are left out.
"""

import torch
from torch import Tensor

from tests.npu.kernels.formats import format_of
from tests.npu.kernels.refusals import BF16, FLOATS, FRACTAL_NZ, ND, Limits, interleave_rotated, rms_normed

LATENT, ROPE, NOPE = 512, 64, 128
HIDDEN_SIZES = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192)


def npu_kv_rmsnorm_rope_cache_v2(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    k_cache_dtype: int | None = None,
    ckv_cache_dtype: int | None = None,
    **options: object,
) -> tuple[Tensor, Tensor]:
    limits = Limits("npu_kv_rmsnorm_rope_cache_v2")
    limits.absent(k_cache_dtype=k_cache_dtype, ckv_cache_dtype=ckv_cache_dtype)
    return _store_kv(limits, kv, gamma, turn=(cos, sin), index=index, caches=(k_cache, ckv_cache), **options)


def npu_kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    **options: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Writes its caches too, whatever the schema says of them."""
    limits = Limits("npu_kv_rmsnorm_rope_cache")
    caches = (k_cache, ckv_cache)
    return *caches, *_store_kv(limits, kv, gamma, turn=(cos, sin), index=index, caches=caches, **options)


def npu_kv_rmsnorm_rope_cache_v2_functional(
    *, k_cache: Tensor, ckv_cache: Tensor, **arguments: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    caches = {"k_cache": k_cache.clone(), "ckv_cache": ckv_cache.clone()}
    return *npu_kv_rmsnorm_rope_cache_v2(**caches, **arguments), *caches.values()


def _store_kv(
    limits: Limits,
    kv: Tensor,
    gamma: Tensor,
    *,
    turn: tuple[Tensor, Tensor],
    index: Tensor,
    caches: tuple[Tensor, Tensor],
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    **unmodelled: object,
) -> tuple[Tensor, Tensor]:
    limits.absent(**unmodelled)
    limits.one_of("cache_mode", cache_mode, ("Norm", "PA", "PA_BNSD"))
    limits.dtype("kv", kv, FLOATS)
    limits.shape("kv", kv, None, 1, None, LATENT + ROPE)
    batch, _, rows, _ = kv.shape
    limits.dtype("gamma", gamma, (kv.dtype,))
    limits.shape("gamma", gamma, LATENT)
    for argument, each in zip(("cos", "sin"), turn, strict=True):
        limits.dtype(argument, each, (kv.dtype,))
        limits.shape(argument, each, batch, 1, rows, ROPE)
    slots = _slots(limits, index, (batch, rows), caches=caches, is_paged=cache_mode != "Norm")
    for argument, cache, width in zip(("k_cache", "ckv_cache"), caches, (ROPE, LATENT), strict=True):
        limits.dtype(argument, cache, (kv.dtype,))
        limits.need(f"{argument}.shape[3]", cache.shape[3] == width, width, cache.shape[3])
    y = rms_normed(kv[..., :LATENT], gamma, epsilon).to(kv.dtype)
    k_embed = interleave_rotated(kv[..., LATENT:], *turn).to(kv.dtype)
    _write(caches[0], slots, k_embed)
    _write(caches[1], slots, y)
    if not is_output_kv:
        return torch.full_like(k_embed, torch.nan), torch.full_like(y, torch.nan)
    return k_embed, y


def _slots(
    limits: Limits, index: Tensor, size: tuple[int, int], *, caches: tuple[Tensor, Tensor], is_paged: bool
) -> Tensor:
    """Slots of the flattened caches, [B * S]. 'Norm': caches [B, 1, length, width] and index [B, S] inside a request."""
    limits.dtype("index", index, (torch.int64,))
    limits.contiguous(k_cache=caches[0], ckv_cache=caches[1])
    if is_paged:
        limits.shape("k_cache", caches[0], None, None, 1, None)
        first = caches[0].shape[:2]
        limits.shape("ckv_cache", caches[1], *first, 1, None)
        limits.page("k_cache", first[1])
        limits.shape("index", index, size[0] * size[1])
        limits.indices("index", index, first.numel())
        return index
    limits.shape("k_cache", caches[0], size[0], 1, None, None)
    length = caches[0].shape[2]
    limits.shape("ckv_cache", caches[1], size[0], 1, length, None)
    limits.shape("index", index, *size)
    limits.indices("index", index, length)
    return (index + torch.arange(size[0])[:, None] * length).flatten()


def _write(cache: Tensor, slots: Tensor, values: Tensor) -> None:
    width = values.shape[-1]
    cache.view(-1, width)[slots] = values.reshape(-1, width)


def npu_mla_prolog_v3(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    *,
    cache_index: Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-5,
    rmsnorm_epsilon_ckv: float = 1e-5,
    query_norm_flag: bool = False,
    qc_qr_scale: float = 1.0,
    kc_scale: float = 1.0,
    **modes: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Without quantisation; `token_x` [T, He] or [B, S, He], and so the outputs. The returned query norm has its factor."""
    limits = Limits("npu_mla_prolog_v3")
    _check_modes(limits, modes)
    down, up, uk, kv_down = weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr
    lead = token_x.shape[:-1]
    limits.need("token_x.dim()", token_x.dim() in (2, 3), "2 or 3", token_x.dim())
    limits.dtype("token_x", token_x, BF16)
    limits.one_of("token_x.shape[-1]", token_x.shape[-1], HIDDEN_SIZES)
    limits.shape("weight_dq", down, token_x.shape[-1], None)
    limits.one_of("weight_dq.shape[1]", down.shape[1], (1536, 2048))
    limits.shape("weight_uk", uk, None, NOPE, LATENT)
    heads, q_rank = uk.shape[0], down.shape[1]
    limits.heads("heads (weight_uk.shape[0])", heads)
    limits.shape("weight_uq_qr", up, q_rank, heads * (NOPE + ROPE))
    limits.shape("weight_dkv_kr", kv_down, token_x.shape[-1], LATENT + ROPE)
    limits.shape("rmsnorm_gamma_cq", rmsnorm_gamma_cq, q_rank)
    limits.shape("rmsnorm_gamma_ckv", rmsnorm_gamma_ckv, LATENT)
    limits.shape("rope_sin", rope_sin, *lead, ROPE)
    limits.shape("rope_cos", rope_cos, *lead, ROPE)
    named = {
        "weight_dq": down,
        "weight_uq_qr": up,
        "weight_uk": uk,
        "weight_dkv_kr": kv_down,
        "rmsnorm_gamma_cq": rmsnorm_gamma_cq,
        "rmsnorm_gamma_ckv": rmsnorm_gamma_ckv,
        "rope_sin": rope_sin,
        "rope_cos": rope_cos,
        "kv_cache": kv_cache,
        "kr_cache": kr_cache,
    }
    for argument, tensor in named.items():
        limits.dtype(argument, tensor, (token_x.dtype,))
    _check_formats(limits, named)
    slots = _prolog_slots(limits, cache_index, lead, caches=(kv_cache, kr_cache))

    x = token_x.float()
    c = rms_normed(x @ down.float(), rmsnorm_gamma_cq, rmsnorm_epsilon_cq) * qc_qr_scale
    q = (c.float() @ up.float()).unflatten(-1, (heads, NOPE + ROPE))
    nope, rope = q[..., :NOPE], q[..., NOPE:]
    q_nope = torch.einsum("...nd,ndc->...nc", nope, uk.float())
    q_rope = interleave_rotated(rope, rope_cos.unsqueeze(-2), rope_sin.unsqueeze(-2))
    kv = x @ kv_down.float()
    latent = rms_normed(kv[..., :LATENT], rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv) * kc_scale
    _write(kv_cache, slots, latent.to(kv_cache.dtype))
    _write(kr_cache, slots, interleave_rotated(kv[..., LATENT:], rope_cos, rope_sin).to(kr_cache.dtype))
    nothing = torch.empty(0)
    query_norm = c.to(token_x.dtype) if query_norm_flag else nothing.to(token_x.dtype)
    return q_nope.to(token_x.dtype), q_rope.to(token_x.dtype), nothing, query_norm, nothing.clone()


def npu_mla_prolog_v3_functional(*, kv_cache: Tensor, kr_cache: Tensor, **arguments: object) -> tuple[Tensor, ...]:
    caches = {"kv_cache": kv_cache.clone(), "kr_cache": kr_cache.clone()}
    return *npu_mla_prolog_v3(**caches, **arguments), *caches.values()


_ONLY = {
    "cache_mode": "PA_BSND",
    "weight_quant_mode": 0,
    "kv_cache_quant_mode": 0,
    "query_quant_mode": 0,
    "ckvkr_repo_mode": 0,
    "quant_scale_repo_mode": 0,
    "tile_size": 128,
}


def _check_modes(limits: Limits, modes: dict[str, object]) -> None:
    for argument, only in _ONLY.items():
        limits.one_of(argument, modes.get(argument, only), (only,))
    limits.absent(**{argument: got for argument, got in modes.items() if argument not in _ONLY})


def _check_formats(limits: Limits, named: dict[str, Tensor]) -> None:
    for argument in ("weight_dq", "weight_uq_qr", "weight_dkv_kr"):
        got = format_of(limits.operator, argument, named[argument])
        limits.need(f"{argument}'s format", got == FRACTAL_NZ, "29 (npu_format_cast after loading)", got)
    got = format_of(limits.operator, "weight_uk", named["weight_uk"])
    limits.need("weight_uk's format", got == ND, ND, got)
    limits.contiguous(weight_uk=named["weight_uk"])


def _prolog_slots(limits: Limits, cache_index: Tensor | None, lead: torch.Size, *, caches: tuple[Tensor, Tensor]) -> Tensor:
    cache_index = limits.given("cache_index", cache_index)
    limits.dtype("cache_index", cache_index, (torch.int64,))
    limits.shape("cache_index", cache_index, *lead)
    limits.shape("kv_cache", caches[0], None, None, 1, LATENT)
    limits.shape("kr_cache", caches[1], *caches[0].shape[:2], 1, ROPE)
    limits.contiguous(kv_cache=caches[0], kr_cache=caches[1])
    limits.page("kv_cache", caches[0].shape[1])
    limits.indices("cache_index", cache_index, caches[0].shape[:2].numel())
    return cache_index.flatten()


KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        npu_kv_rmsnorm_rope_cache,
        npu_kv_rmsnorm_rope_cache_v2,
        npu_kv_rmsnorm_rope_cache_v2_functional,
        npu_mla_prolog_v3,
        npu_mla_prolog_v3_functional,
    )
}
