"""Routing and grouped experts, and the place where a device may overlap them with the dense path."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from longcat_pd.kernels.reference.norm import swiglu

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
    """See ``ops.GroupedExperts``. Choices are sorted by expert, so that each expert multiplies one run of rows."""
    num_experts, topk = gate_up.shape[0], expert_ids.shape[1]
    flat = expert_ids.flatten()
    ends = torch.bincount(flat, minlength=num_experts)[:num_experts].cumsum(0)
    num_routed = int(ends[-1])
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if num_routed == 0:
        return out
    order = torch.argsort(flat, stable=True)[:num_routed]
    rows = order // topk
    offsets = ends.int()
    inner = swiglu(functional.grouped_mm(x[rows], gate_up.transpose(1, 2), offs=offsets))
    products = functional.grouped_mm(inner, down.transpose(1, 2), offs=offsets)
    return out.index_add_(0, rows, products.float() * weights.flatten()[order].unsqueeze(-1))


def overlap(side: Callable[[], A], main: Callable[[], B]) -> tuple[A, B]:
    """See ``ops.Overlap``: one after the other."""
    return side(), main()
