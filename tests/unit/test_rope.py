from __future__ import annotations

import dataclasses
import math

import torch

from longcat_pd.models.rope import RotaryPositions
from tests.unit.stage import make_context


def test_rotations_far_beyond_the_trained_length_are_exact() -> None:
    context = make_context("2.0")
    positions = torch.tensor([0, 1, 4095, 1_000_003])
    rotation = RotaryPositions(context)(positions)
    assert rotation.shape == (2, 4, 4, 2) and rotation.dtype == torch.float32
    for t, p in enumerate(positions.tolist()):
        for i, frequency in enumerate(context.config.rope_frequencies):
            wanted = [math.cos(p * frequency)] * 2 + [-math.sin(p * frequency), math.sin(p * frequency)]
            got = rotation[0, t, i].tolist() + rotation[1, t, i].tolist()
            assert all(abs(a - b) < 1e-7 for a, b in zip(got, wanted, strict=True)), (p, i)


def test_yarn_magnitude_scales_the_rotation() -> None:
    context = make_context("2.0", "rope_scaling.mscale=null")
    assert context.config.rope_magnitude > 1
    rotation = RotaryPositions(context)(torch.tensor([0, 7]))
    lengths = (rotation[0, ..., 0].square() + rotation[1, ..., 1].square()).sqrt()
    torch.testing.assert_close(lengths, torch.full_like(lengths, context.config.rope_magnitude))
    plain = dataclasses.replace(context, config=dataclasses.replace(context.config, rope_scaling=None))
    assert torch.equal(RotaryPositions(plain)(torch.tensor([0]))[0], torch.ones(1, 4, 2))
