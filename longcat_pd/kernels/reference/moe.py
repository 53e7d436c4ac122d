"""Routing and grouped experts, and the place where a device may overlap them with the dense path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from longcat_pd.kernels.expert_ops import ExpertRows, GroupedExperts
from longcat_pd.kernels.ops import Swiglu
from longcat_pd.kernels.reference.int8 import quantise, scaled_product
from longcat_pd.kernels.reference.rows import never_few, product

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


def experts_with(activate: Swiglu, sums: torch.dtype = torch.float32) -> GroupedExperts:
    """See ``ops.GroupedExperts``; ``activate`` stands between the two products of an expert, whose results are added in
    ``sums``.
    """

    def grouped_experts(
        x: Tensor,
        expert_ids: Tensor,
        *,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_scale: Tensor | None = None,
        down_scale: Tensor | None = None,
    ) -> Tensor:
        """Choices are sorted by expert, so that each chosen expert multiplies one run of rows.

        A row's products are added in the order of experts.
        """
        num_experts, topk = gate_up.shape[0], expert_ids.shape[1]
        sorted_ids, order = expert_ids.flatten().sort(stable=True)
        counts = torch.bincount(sorted_ids, minlength=num_experts)[:num_experts].tolist()
        order = order[: sum(counts)]
        rows = order // topk
        inner = activate(_by_expert(x, gate_up, gate_up_scale, counts=counts, rows=rows))
        products = _by_expert(inner, down, down_scale, counts=counts).to(sums)
        out = torch.zeros(x.shape, dtype=sums, device=x.device)
        return out.index_add_(0, rows, products * weights.flatten()[order].unsqueeze(-1))

    return grouped_experts


def rows_with(activate: Swiglu) -> ExpertRows:
    """See ``ops.ExpertRows``; ``activate`` stands between the two products of an expert."""

    def expert_rows(
        x: Tensor,
        counts: Tensor,
        *,
        row_scale: Tensor | None,
        gate_up: Tensor,
        down: Tensor,
        gate_up_scale: Tensor | None = None,
        down_scale: Tensor | None = None,
    ) -> Tensor:
        assert row_scale is None, "rows are quantised before they travel by fused pairs only, which this table lacks"
        num = counts.tolist()
        inner = activate(_by_expert(x, gate_up, gate_up_scale, counts=num, rows=slice(0, sum(num))))
        return torch.nn.functional.pad(_by_expert(inner, down, down_scale, counts=num), (0, 0, 0, len(x) - sum(num)))

    return expert_rows


def _by_expert(
    x: Tensor, weight: Tensor, scale: Tensor | None, *, counts: list[int], rows: Tensor | slice = slice(None)
) -> Tensor:
    """Of ``x[rows]`` the first ``counts[0]`` rows times the matrix of expert 0, the next by that of expert 1, and so on.

    Short runs of floats are made longer (see ``rows.py``). A loop over experts: the grouped product of
    torch wants widths of multiples of 16 bytes.
    """
    chosen = [expert for expert, count in enumerate(counts) if count]
    lengths = [counts[expert] for expert in chosen]
    if not chosen:
        return x.new_empty((0, weight.shape[2] if scale is None else weight.shape[1]))
    if scale is None:
        runs = zip(chosen, torch.split(x[rows], lengths), strict=True)
        return torch.cat([product(never_few(run), weight[e])[: len(run)] for e, run in runs])
    quantised, row_scales = (torch.split(part[rows], lengths) for part in quantise(x))
    scaled = zip(chosen, quantised, row_scales, strict=True)
    return torch.cat([scaled_product(run, s, weight=weight[e], scale=scale[e]) for e, run, s in scaled]).to(x.dtype)


def overlap(side: Callable[[], A], main: Callable[[], B]) -> tuple[A, B]:
    """See ``ops.Overlap``: one after the other."""
    return side(), main()


def prefetch(weights: Sequence[Tensor], after: Tensor) -> None:
    """See ``ops.Prefetch``: a processor does that by itself."""
