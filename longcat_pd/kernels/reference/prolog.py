"""The front of a latent attention as one operator: one product for all that goes down, one turn for keys and queries."""

from __future__ import annotations

import torch
from torch import Tensor

from longcat_pd.kernels.ops import MlaProlog, PrologWeights, RmsNorm, Rope
from longcat_pd.kernels.reference.attention import store
from longcat_pd.kernels.reference.rows import head_linear, linear


def prolog_with(rms_norm: RmsNorm, rope: Rope) -> MlaProlog:
    """See ``ops.MlaProlog``."""

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
        """The key's rope part is turned as one more head."""
        (heads, nope_width, kv_rank), q_rank = weights.key_up.shape, weights.q_norm.shape[0]
        down = linear(x, weights.down)
        rope_width = down.shape[1] - q_rank - kv_rank
        q_lora, latent, rope_key = torch.split(down, [q_rank, kv_rank, rope_width], 1)
        q_lora = rms_norm(q_lora, weights.q_norm, eps)
        q = linear(q_lora, weights.q_up).view(len(x), heads, nope_width + rope_width)
        nope, rope_part = torch.split(q, [nope_width, rope_width], -1)
        turned = rope(torch.cat((rope_part, rope_key.unsqueeze(1)), 1), rotation, is_interleaved=True)
        store(cache[0], slots, rms_norm(latent, weights.kv_norm, eps) * kv_scale)
        store(cache[1], slots, turned[:, heads])
        return torch.cat((head_linear(nope, weights.key_up), turned[:, :heads]), -1), q_lora

    return mla_prolog
