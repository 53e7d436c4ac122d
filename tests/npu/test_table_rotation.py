"""Rotations of the NPU's table: angles without fp64, and the turning of pairs in both orders."""

import pytest
import torch

from longcat_pd.kernels import NpuSettings, load
from longcat_pd.kernels.npu.rotation import MAX_POSITIONS, factors
from longcat_pd.kernels.reference import table as reference_table
from tests.npu import device
from tests.npu.paged import noise

device.install()
OPS, REFERENCE = load("npu", npu=NpuSettings(dtype=torch.float32)), reference_table()
WIDTH, MAGNITUDE = 64, 1.4
FREQUENCIES = 1e4 ** -(torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)


def some_positions() -> torch.Tensor:
    drawn = torch.randint(0, MAX_POSITIONS, (500,), generator=torch.Generator().manual_seed(0))
    return torch.cat((torch.tensor([0, 1, 1023, 1024, 999_999, 1 << 20, MAX_POSITIONS - 1]), drawn))


def test_factors_are_as_near_as_they_say_to_a_million_positions_and_beyond() -> None:
    prepared = OPS.prepare_rotation(FREQUENCIES, magnitude=MAGNITUDE, dtype=torch.float32)
    got, angles = factors(OPS.rotation(some_positions(), prepared)), some_positions().double().unsqueeze(1) * FREQUENCIES
    cos, sin = angles.cos() * MAGNITUDE, angles.sin() * MAGNITUDE
    for found, expected in ((got.cos_of_halves, cos), (got.sin_of_halves, sin)):
        assert (found.double() - torch.cat((expected, expected), -1)).abs().max() < MAGNITUDE * 2**-22
    for found, expected in ((got.cos_of_neighbours, cos), (got.sin_of_neighbours, sin)):
        assert (found.double() - expected.repeat_interleave(2, -1)).abs().max() < MAGNITUDE * 2**-22


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("heads", [(), (1,), (32,)])
def test_pairs_are_turned_and_stay_where_they_are(dtype: torch.dtype, is_interleaved: bool, heads: tuple[int, ...]) -> None:
    positions = some_positions()[:11]
    x = noise(len(positions), *heads, WIDTH + 64, seed=1, dtype=dtype)[..., :WIDTH]
    rotations = [
        ops.rotation(positions, ops.prepare_rotation(FREQUENCIES, magnitude=MAGNITUDE, dtype=dtype))
        for ops in (OPS, REFERENCE)
    ]
    got, expected = OPS.rope(x, rotations[0], is_interleaved=is_interleaved), None
    expected = REFERENCE.rope(x, rotations[1], is_interleaved=is_interleaved)
    close = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got, expected, rtol=close, atol=close)
    assert got.dtype == dtype


def test_no_rows() -> None:
    prepared = OPS.prepare_rotation(FREQUENCIES, magnitude=1.0, dtype=torch.bfloat16)
    nothing = OPS.rotation(torch.zeros(0, dtype=torch.int64), prepared)
    assert nothing.dtype == torch.bfloat16
    assert OPS.rope(torch.zeros(0, 4, WIDTH), nothing, is_interleaved=True).shape == (0, 4, WIDTH)
