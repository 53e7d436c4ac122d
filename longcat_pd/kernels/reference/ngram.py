"""Hashing of the last tokens to rows of the n-gram tables."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def ngram_ids(windows: Tensor, *, powers: Tensor, moduli: Tensor, eos: Tensor, ignored: Tensor) -> Tensor:
    """See ``ops.NgramIds``. Products stay below V * rows and their sum far below 2^63."""
    is_stop = windows < 0
    is_eos = (windows.unsqueeze(-1) == eos).any(-1)
    is_stop |= functional.pad(is_eos[:, 1:], (1, 0))  # an EOS belongs to the document that it closes
    if ignored.numel():
        tokens = windows.unsqueeze(-1)
        is_stop |= ((tokens >= ignored[:, 0]) & (tokens < ignored[:, 1])).any(-1)
    is_seen = is_stop.cumsum(-1) == 0
    seen = torch.where(is_seen, windows, 0)
    return (seen.unsqueeze(1) * powers).sum(-1) % moduli
