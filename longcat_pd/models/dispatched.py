"""What lies between a dispatch and its combine: rows that have come to experts, and what the way back needs to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longcat_pd.kernels.expert_ops import Sent


class Routing(NamedTuple):
    """Expert ids and fp32 weights, [rows, topk] each."""

    expert_ids: Tensor
    weights: Tensor


Route = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Parcels:
    """What went out: row and weight of every choice, in the order of experts; and how many to and from each rank."""

    rows: Tensor
    weights: Tensor
    num_rows: int
    dtype: torch.dtype
    out: list[int]
    into: list[int]


@dataclass(frozen=True)
class FusedParcels:
    """What a fused pair sent, and the rows [n, hidden] that were handed in, of which some [n] are real (None: all)."""

    sent: Sent
    x: Tensor
    is_real: Tensor | None


@dataclass(frozen=True)
class Dispatched:
    """Rows that this rank's experts are applied to.

    Attributes:
        x: [N, hidden]; of a fused pair by expert, see ``ops.ExpertRows``.
        routing: [N, k]: numbers among this rank's experts; any number from their count on is not its business. Of a fused
            pair that of the rows handed in.
        own: the routing of the rows that this rank handed in, by numbers of the model.
        handle: what ``combine`` of the same pair needs to know.
        has_copies: ``combine`` adds the experts without weights too.
    """

    x: Tensor
    routing: Routing
    own: Routing
    handle: Parcels | FusedParcels | None = None
    has_copies: bool = False
