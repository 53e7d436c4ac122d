"""Routing and grouped experts, and the place where a device may overlap them with the dense path."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from longcat_pd.kernels.reference.norm import swiglu
from longcat_pd.kernels.reference.rows import never_alone, product

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

    A run of one row is computed twice (see ``rows.py``). A row's products are added in the order of experts. A loop over
    experts, because torch's grouped product wants widths that are multiples of 16 bytes.
    """
    num_experts, topk = gate_up.shape[0], expert_ids.shape[1]
    sorted_ids, order = expert_ids.flatten().sort(stable=True)
    counts = torch.bincount(sorted_ids, minlength=num_experts)[:num_experts].tolist()
    order = order[: sum(counts)]
    rows = order // topk
    products = _by_expert(swiglu(_by_expert(x[rows], gate_up, counts)), down, counts).float()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return out.index_add_(0, rows, products * weights.flatten()[order].unsqueeze(-1))


def _by_expert(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """The first ``counts[0]`` rows of ``x`` times ``weight[0]``, the next ``counts[1]`` times ``weight[1]``, ..."""
    parts = [x.new_empty((0, weight.shape[2]))]
    start = 0
    for expert, count in enumerate(counts):
        if count:
            parts.append(product(never_alone(x[start : start + count]), weight[expert])[:count])
            start += count
    return torch.cat(parts)


def overlap(side: Callable[[], A], main: Callable[[], B]) -> tuple[A, B]:
    """See ``ops.Overlap``: one after the other."""
    return side(), main()
