"""Rotary positions of a batch. How pairs are turned, and what that wants to know, are operators; which frequencies, the
configuration.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longcat_pd.models.context import ModelContext


class RotaryPositions(nn.Module):
    """Turns positions into rotations, once a step for all layers."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        config = context.config
        self._ops = context.ops
        frequencies = torch.tensor(config.rope_frequencies, dtype=torch.float64)
        prepared = self._ops.prepare_rotation(frequencies, magnitude=config.rope_magnitude, dtype=context.dtype)
        self._prepared = nn.Buffer(prepared.to(context.device), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        """[T] -> what ``ops.Rope`` takes, times YaRN's magnitude."""
        return self._ops.rotation(positions, self._prepared)
