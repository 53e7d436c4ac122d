"""Rotary positions: the angles of a batch. How pairs are turned is an operator; which frequencies, the configuration."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longcat_pd.models.context import ModelContext


class RotaryPositions(nn.Module):
    """Turns positions into rotations, once a step for all layers.

    Computed where they are needed and not read from a table: a table for a million positions takes a quarter of a GiB on
    every rank and ends somewhere. Angles are fp64, because a large position times a frequency loses the fraction in fp32.
    """

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        config = context.config
        frequencies = torch.tensor(config.rope_frequencies, dtype=torch.float64, device=context.device)
        self._frequencies = nn.Buffer(frequencies, persistent=False)
        self._magnitude = config.rope_magnitude

    def forward(self, positions: Tensor) -> Tensor:
        """[T] -> [2, T, R / 2, 2] (see ``ops.Rope``), times YaRN's magnitude; fp32."""
        angles = positions.double().unsqueeze(-1) * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return (torch.stack((cos, cos, -sin, sin)) * self._magnitude).float().view(2, 2, *angles.shape).movedim(1, -1)
