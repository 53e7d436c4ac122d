"""The front of a latent attention on an NPU: fused into one operator where its limits allow, else composed of several.

Which of the two is settled when the weights are prepared, and seen from how many tensors they are. Both leave the rope
parts of queries and keys de-interleaved: even elements, then odd ones, turned by halves. Knows no keys of other rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longcat_pd.kernels.npu.limits import MOST_HEADS, check_block_size, is_power_of_two
from longcat_pd.kernels.npu.operators import has
from longcat_pd.kernels.npu.rotation import factors
from longcat_pd.kernels.npu.weights import cast
from longcat_pd.kernels.ops import PrepareProlog, PrologScales, PrologWeights
from longcat_pd.kernels.refusal import Unsupported

OPERATORS = (
    "npu_format_cast",
    "npu_kv_rmsnorm_rope_cache_v2",
    "npu_interleave_rope",
    "npu_transpose_batchmatmul",
    "npu_rms_norm",
)
LATENT, ROPE, NOPE = 512, 64, 128
_HIDDEN_SIZES = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192)
_QUERY_RANKS = (1536, 2048)


class _Fused(NamedTuple):
    """Weights of ``npu_mla_prolog_v3``; all but ``uk`` and the norms in FRACTAL_NZ."""

    dq: Tensor  # [hidden, q_rank]
    uq_qr: Tensor  # [q_rank, H (128 + 64)]
    uk: Tensor  # [H, 128, 512]
    dkv_kr: Tensor  # [hidden, 576]
    q_norm: Tensor
    kv_norm: Tensor


class _Composed(NamedTuple):
    """The queries' matrix in two, so that both parts come out contiguous; matrices in FRACTAL_NZ."""

    dq: Tensor  # [hidden, q_rank]
    uq: Tensor  # [q_rank, H * 128]
    qr: Tensor  # [q_rank, H * 64]
    uk: Tensor  # [H, 128, 512]
    dkv_kr: Tensor  # [hidden, 576]
    q_norm: Tensor
    kv_norm: Tensor  # times the latents' factor


def preparing_prolog(*, is_fused: bool) -> PrepareProlog:
    """See ``ops.PrepareProlog``; ``is_fused``: the fused operator may be called."""

    def prepare_prolog(weights: PrologWeights, scales: PrologScales) -> tuple[Tensor, ...]:
        """Raises Unsupported for sizes that no operator of this device has."""
        return _prepared(weights, scales, is_fused=is_fused)

    return prepare_prolog


def _prepared(weights: PrologWeights, scales: PrologScales, *, is_fused: bool) -> tuple[Tensor, ...]:
    num_heads, q_rank = _checked(weights)
    hidden = weights.down.shape[0]
    dq, dkv_kr = (part.contiguous() for part in weights.down.tensor_split([q_rank], 1))
    fits = hidden in _HIDDEN_SIZES and q_rank in _QUERY_RANKS and is_power_of_two(num_heads) and num_heads <= MOST_HEADS
    if is_fused and fits and has("npu_mla_prolog_v3"):
        up = cast(weights.q_up)
        return _Fused(cast(dq), up, weights.key_up.contiguous(), cast(dkv_kr), weights.q_norm, weights.kv_norm)
    by_head = weights.q_up.view(q_rank, num_heads, NOPE + ROPE)
    uq, qr = (part.reshape(q_rank, -1).contiguous() for part in by_head.tensor_split([NOPE], 2))
    kv_norm = (weights.kv_norm.float() * scales.kv).to(weights.kv_norm.dtype)
    return _Composed(cast(dq), cast(uq), cast(qr), weights.key_up.contiguous(), cast(dkv_kr), weights.q_norm, kv_norm)


def mla_prolog(
    x: Tensor,
    rotation: Tensor,
    *,
    weights: tuple[Tensor, ...],
    slots: Tensor,
    cache: tuple[Tensor, Tensor],
    scales: PrologScales,
) -> tuple[Tensor, Tensor]:
    """See ``ops.MlaProlog``. Two operators, or nine."""
    is_fused = len(weights) == len(_Fused._fields)
    uk, q_norm = (_Fused(*weights).uk, _Fused(*weights).q_norm) if is_fused else (_Composed(*weights).uk, weights[5])
    if not x.shape[0]:
        return x.new_empty((0, uk.shape[0], LATENT + ROPE)), x.new_empty((0, q_norm.shape[0]))
    if is_fused:
        return _fused(x, rotation, _Fused(*weights), slots=slots, cache=cache, scales=scales)
    by, turn = _Composed(*weights), factors(rotation)
    q_lora, _ = torch.ops.npu.npu_rms_norm(x @ by.dq, by.q_norm, epsilon=scales.eps)
    nope, turned = (q_lora @ by.uq).view(len(x), -1, NOPE), (q_lora @ by.qr).view(len(x), -1, 1, ROPE)
    absorbed = torch.ops.npu.npu_transpose_batchmatmul(
        nope, by.uk, bias=None, scale=None, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
    )
    turned = torch.ops.npu.npu_interleave_rope(
        turned, turn.cos_of_halves.view(-1, 1, 1, ROPE), turn.sin_of_halves.view(-1, 1, 1, ROPE)
    )
    _write(x, rotation, (by.dkv_kr, by.kv_norm), slots=slots, cache=cache, eps=scales.eps)
    return torch.cat((absorbed, turned.squeeze(2)), -1), q_lora


def mla_store(
    x: Tensor,
    rotation: Tensor,
    *,
    weights: tuple[Tensor, ...],
    slots: Tensor,
    cache: tuple[Tensor, Tensor],
    scales: PrologScales,
) -> None:
    """See ``ops.MlaStore``. The fused operator makes queries too, so this is always the composition's half.

    Of fused weights the latents' factor goes to gamma here, one small operator more.
    """
    if not x.shape[0]:
        return
    if len(weights) == len(_Fused._fields):
        dkv_kr, kv_norm = _Fused(*weights).dkv_kr, _Fused(*weights).kv_norm * scales.kv
    else:
        dkv_kr, kv_norm = _Composed(*weights).dkv_kr, _Composed(*weights).kv_norm
    _write(x, rotation, (dkv_kr, kv_norm), slots=slots, cache=cache, eps=scales.eps)


def _fused(
    x: Tensor,
    rotation: Tensor,
    by: _Fused,
    *,
    slots: Tensor,
    cache: tuple[Tensor, Tensor],
    scales: PrologScales,
) -> tuple[Tensor, Tensor]:
    """The queries' factor stays 1: it is part of the softmax scale, and the indexer does not want it."""
    turn = factors(rotation)
    nope, turned, _, q_lora, _ = torch.ops.npu.npu_mla_prolog_v3(
        x,
        by.dq,
        by.uq_qr,
        by.uk,
        by.dkv_kr,
        by.q_norm,
        by.kv_norm,
        turn.sin_of_halves,
        turn.cos_of_halves,
        *_paged(cache),
        cache_index=slots,
        rmsnorm_epsilon_cq=scales.eps,
        rmsnorm_epsilon_ckv=scales.eps,
        cache_mode="PA_BSND",
        query_norm_flag=True,
        weight_quant_mode=0,
        kv_cache_quant_mode=0,
        query_quant_mode=0,
        ckvkr_repo_mode=0,
        quant_scale_repo_mode=0,
        qc_qr_scale=1.0,
        kc_scale=scales.kv,
    )
    return torch.cat((nope, turned), -1), q_lora


def _write(
    x: Tensor, rotation: Tensor, kv: tuple[Tensor, Tensor], *, slots: Tensor, cache: tuple[Tensor, Tensor], eps: float
) -> None:
    """``kv``: the matrix and the norm of latents, which has their factor."""
    turn, (latents, turned) = factors(rotation), _paged(cache)
    torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2(
        (x @ kv[0]).view(-1, 1, 1, LATENT + ROPE),
        kv[1],
        turn.cos_of_halves.view(-1, 1, 1, ROPE),
        turn.sin_of_halves.view(-1, 1, 1, ROPE),
        slots,
        turned,
        latents,
        epsilon=eps,
        cache_mode="PA",
        is_output_kv=False,
    )


def _paged(cache: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """As they are: in a graph a view of them would cost a copy of the whole cache at every call."""
    latents, turned = cache
    check_block_size("caches of latents", latents.shape[1])
    assert latents.dim() == turned.dim() == 4, f"caches of {latents.dim()} dimensions, blocks and one head want 4"
    return latents, turned


def _checked(weights: PrologWeights) -> tuple[int, int]:
    """Number of heads and the rank of queries; Unsupported for sizes that all compositions refuse."""
    (num_heads, nope, latent), q_rank = weights.key_up.shape, weights.q_norm.shape[0]
    rope = weights.down.shape[1] - q_rank - latent
    if (nope, latent, rope) != (NOPE, LATENT, ROPE):
        found = f"nope {nope}, kv_lora_rank {latent} and rope {rope}"
        text = f"device=npu: attention of {found}; its operators have {NOPE}, {LATENT} and {ROPE}"
        raise Unsupported(text, param="model.path")
    return num_heads, q_rank
