"""Rows of the n-gram tables: integer arithmetic that every graph compiler takes, or one operator where there is one.

The operator of a deployment's package reads a table of all tokens of all sequences, and comes with another one that keeps
it. Neither is needed: windows of the last tokens are part of a rank's state on the device, and a window is such a table
with one row for each token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

OPERATOR = "compute_n_gram_ids"


def ngram_ids(windows: Tensor, *, powers: Tensor, moduli: Tensor, eos: Tensor, ignored: Tensor) -> Tensor:
    """See ``ops.NgramIds``, in int64 throughout."""
    is_seen = _stops(windows, eos, ignored).cumsum(-1) == 0
    seen = torch.where(is_seen, windows, 0)
    return (seen.unsqueeze(1) * powers).sum(-1) % moduli


def ngram_ids_in_one(windows: Tensor, *, powers: Tensor, moduli: Tensor, eos: Tensor, ignored: Tensor) -> Tensor:
    """The same by the package's operator, which looks back from the last column to the first negative one.

    Powers and moduli are below 2^31, as ids are. Its tables lie by order and then by split, as ours do; the start that it
    would add to a table's rows is 0 here.
    """
    (count, width), tables, device = windows.shape, len(moduli), windows.device
    history = torch.where(_stops(windows, eos, ignored), -1, windows).int().flip(-1)
    ids: Tensor = torch.ops.npu.compute_n_gram_ids(
        powers.int().view(width - 1, -1, width),
        moduli.int().view(width - 1, -1),
        torch.zeros(tables + 1, dtype=torch.int32, device=device),
        history[:, -1].contiguous(),
        torch.arange(1, count + 1, dtype=torch.int32, device=device),
        history,
        torch.arange(count, dtype=torch.int64, device=device),
        torch.full((count,), width - 1, dtype=torch.int32, device=device),
        batch_size=count,
        oe_n=width,
        oe_k=tables // (width - 1),
        max_context_len=width,
    )
    return ids.long()


def _stops(windows: Tensor, eos: Tensor, ignored: Tensor) -> Tensor:
    """Where look-backs end: at the start of a text, at ignored ids, and at an EOS that is not the newest token."""
    is_eos = (windows.unsqueeze(-1) == eos).any(-1)
    is_stop = (windows < 0) | functional.pad(is_eos[:, 1:], (1, 0))
    if ignored.numel():
        tokens = windows.unsqueeze(-1)
        is_stop = is_stop | ((tokens >= ignored[:, 0]) & (tokens < ignored[:, 1])).any(-1)
    return is_stop
