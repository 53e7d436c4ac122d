"""The front of an attention, piece by piece: every matrix and every part of one multiplies by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from longcat_pd.kernels.ops import MlaProlog, Ops, PrologWeights


def prolog_of(ops: Ops) -> MlaProlog:
    """See ``ops.MlaProlog``; of the other operators of a table."""

    def mla_prolog(
        x: Tensor,
        rotation: Tensor,
        *,
        weights: PrologWeights,
        slots: Tensor,
        cache: tuple[Tensor, Tensor],
        eps: float,
        kv_scale: float,
    ) -> tuple[Tensor, Tensor]:
        (heads, nope_width, kv_rank), q_rank = weights.key_up.shape, weights.q_norm.shape[0]
        rope_width = weights.down.shape[1] - q_rank - kv_rank
        q_down, latent_down, rope_down = torch.split(weights.down, [q_rank, kv_rank, rope_width], 1)
        latent = ops.rms_norm(ops.linear(x, latent_down), weights.kv_norm, eps)
        latent = latent * kv_scale
        ops.store(cache[0], slots, latent)
        rope_key = ops.rope(ops.linear(x, rope_down), rotation, is_interleaved=True)
        ops.store(cache[1], slots, rope_key)
        q_lora = ops.rms_norm(ops.linear(x, q_down), weights.q_norm, eps)
        q = ops.linear(q_lora, weights.q_up).view(len(x), heads, nope_width + rope_width)
        absorbed = ops.head_linear(q[..., :nope_width], weights.key_up)
        turned = ops.rope(q[..., nope_width:], rotation, is_interleaved=True)
        return torch.cat((absorbed, turned), -1), q_lora

    return mla_prolog
