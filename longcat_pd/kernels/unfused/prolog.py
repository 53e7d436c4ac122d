"""The front of an attention, piece by piece: every matrix and every part of one multiplies by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from longcat_pd.kernels.ops import MlaProlog, Ops, PrologScales, PrologWeights


def prolog_of(ops: Ops) -> MlaProlog:
    """See ``ops.MlaProlog``; of the other operators of a table."""

    def mla_prolog(
        x: Tensor,
        rotation: Tensor,
        *,
        weights: tuple[Tensor, ...],
        slots: Tensor,
        cache: tuple[Tensor, Tensor],
        scales: PrologScales,
    ) -> tuple[Tensor, Tensor]:
        by = PrologWeights(*weights)
        (heads, nope_width, kv_rank), q_rank = by.key_up.shape, by.q_norm.shape[0]
        rope_width = by.down.shape[1] - q_rank - kv_rank
        q_down, latent_down, rope_down = torch.split(by.down, [q_rank, kv_rank, rope_width], 1)
        latent = ops.rms_norm(ops.linear(x, latent_down), by.kv_norm, scales.eps)
        latent = latent * scales.kv
        ops.store(cache[0], slots, latent)
        rope_key = ops.rope(ops.linear(x, rope_down), rotation, is_interleaved=True)
        ops.store(cache[1], slots, rope_key)
        q_lora = ops.rms_norm(ops.linear(x, q_down), by.q_norm, scales.eps)
        q = ops.linear(q_lora, by.q_up).view(len(x), heads, nope_width + rope_width)
        absorbed = ops.head_linear(q[..., :nope_width], by.key_up)
        turned = ops.rope(q[..., nope_width:], rotation, is_interleaved=True)
        return torch.cat((absorbed, turned), -1), q_lora

    return mla_prolog
