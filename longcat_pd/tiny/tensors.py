"""Random tensors for a small checkpoint, scaled so that every part of the model has a say in the next token.

With plain unit-variance weights a random model's attention is nearly uniform, its n-gram tables drown and its experts
vanish next to the residual stream; then a defect in any of them would change no token. The gains below keep attention
scores at a spread of about 2.5, all branches of the residual stream within one order, and logits at magnitude 4.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping

import torch

NUM_QUIET_IDS = 32  # ids of special tokens: a random model should rarely say them

# Standard deviation times sqrt(columns), by the end of the name; the first match counts, 1.0 otherwise.
_GAINS = (
    ("lm_head.weight", 3.0),
    ("q_b_proj.weight", 0.6),
    ("o_proj.weight", 0.6),
    ("router.classifier.weight", 1.5),
)


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]], seed: int, *, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) in the order of ``shapes``.

    A tensor depends on seed, name and shape only, so overriding one size leaves the others' values alone. Router tensors
    and the indexer's ``weights_proj`` are fp32 as in the releases, all others ``dtype``.
    """
    has_ngrams = any("embed_tokens0." in name or "embedders.0." in name for name in shapes)
    for name, shape in shapes.items():
        key = hashlib.sha256(f"{seed} {name}".encode()).digest()
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(key[:7], "little")))
        tensor = _scaled(name, noise, has_ngrams=has_ngrams)
        is_fp32 = ".router." in name or name.endswith("weights_proj.weight")
        yield name, tensor if is_fp32 else tensor.to(dtype)


def _scaled(name: str, noise: torch.Tensor, *, has_ngrams: bool) -> torch.Tensor:
    if name.endswith("e_score_correction_bias"):
        return noise * 0.03
    if noise.dim() == 1:  # norms
        return 1 + 0.1 * noise
    if name == "model.embed_tokens.weight":
        return noise * (8.0 if has_ngrams else 1.0)  # the sum over all tables is divided by their number + 1
    if "embed_tokens" in name or ".embedders." in name:
        return noise
    if "oe_embed_proj" in name or ".post_projs." in name:
        return noise * 3.5 / math.sqrt(noise.shape[1])
    gain = next((value for end, value in _GAINS if name.endswith(end)), 1.0)
    scaled = noise * gain / math.sqrt(noise.shape[1])
    if name == "lm_head.weight":
        scaled[:NUM_QUIET_IDS] *= 0.3
    return scaled
