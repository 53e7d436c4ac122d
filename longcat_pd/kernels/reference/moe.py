"""Routing and grouped experts, and the place where a device may overlap them with the dense path."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from longcat_pd.kernels.reference.norm import swiglu
from longcat_pd.kernels.reference.rows import ROW_TILE

A = TypeVar("A")
B = TypeVar("B")


def route_topk(logits: Tensor, bias: Tensor, *, topk: int, factor: float, is_normalized: bool) -> tuple[Tensor, Tensor]:
    """See ``ops.RouteTopk``."""
    probabilities = torch.softmax(logits, -1)
    expert_ids = torch.topk(probabilities + bias, topk, dim=-1, sorted=False).indices
    weights = probabilities.gather(-1, expert_ids)
    if is_normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return expert_ids, weights * factor


def grouped_experts(x: Tensor, expert_ids: Tensor, *, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """See ``ops.GroupedExperts``. Choices are sorted by expert, so that each chosen expert multiplies one run of rows.

    Every run is padded to whole row tiles (see ``rows.py``). A row's products are added in the order of experts.
    """
    num_experts, topk = gate_up.shape[0], expert_ids.shape[1]
    sorted_ids, order = expert_ids.flatten().sort(stable=True)
    counts = torch.bincount(sorted_ids, minlength=num_experts)[:num_experts]
    lengths = (counts + ROW_TILE - 1) // ROW_TILE * ROW_TILE
    ends = lengths.cumsum(0)
    num_routed, chosen, bounds = int(counts.sum()), counts.nonzero().flatten().tolist(), [0, *ends.tolist()]
    sorted_ids, order = sorted_ids[:num_routed], order[:num_routed]
    shift = (ends - lengths) - (counts.cumsum(0) - counts)  # of each expert's run, by the padding before it
    places = torch.arange(num_routed, device=x.device) + shift[sorted_ids]
    rows = order // topk
    padded = x.new_zeros((bounds[-1], x.shape[1])).index_copy_(0, places, x[rows])
    inner = swiglu(_by_expert(padded, gate_up, chosen=chosen, bounds=bounds))
    products = _by_expert(inner, down, chosen=chosen, bounds=bounds)[places].float()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return out.index_add_(0, rows, products * weights.flatten()[order].unsqueeze(-1))


def _by_expert(x: Tensor, weight: Tensor, *, chosen: list[int], bounds: list[int]) -> Tensor:
    """Rows ``bounds[e]`` to ``bounds[e + 1]`` of ``x`` times the transposed ``weight[e]``, for each chosen e.

    A loop over experts, because torch's grouped product wants widths that are multiples of 16 bytes.
    """
    out = x.new_empty((x.shape[0], weight.shape[1]))
    for e in chosen:
        torch.mm(x[bounds[e] : bounds[e + 1]], weight[e].t(), out=out[bounds[e] : bounds[e + 1]])
    return out


def overlap(side: Callable[[], A], main: Callable[[], B]) -> tuple[A, B]:
    """See ``ops.Overlap``: one after the other."""
    return side(), main()
