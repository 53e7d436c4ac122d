"""In 16 bits nothing can be compared number by number; but the NPU's table is as near to fp32 as the reference's is."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longcat_pd import kernels
from longcat_pd.quantize import quantize
from tests.npu import device
from tests.npu.ranks import SETTINGS, TABLE
from tests.npu.widths import BLOCK, WIDTHS
from tests.parity.conftest import MakeCheckpoint
from tests.parity.single import SingleProcess

NUM_ROWS = 96
MARGIN = 1.15  # measured 0.98 to 1.02


def logits(path: Path, dtype: str) -> Tensor:
    prompt = [random.Random(5).randrange(32, 1000) for _ in range(NUM_ROWS)]
    single = SingleProcess(path, dtype=dtype, block_size=BLOCK, num_blocks=20)
    with torch.inference_mode():
        return single.step((single.admit(prompt), NUM_ROWS))[0]


@pytest.mark.parametrize("is_int8", [False, True], ids=["float", "int8"])
@pytest.mark.parametrize("variant", ["2.0", "chat"])
def test_the_table_is_as_near_to_fp32_as_the_reference(
    tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, is_int8: bool
) -> None:
    path = tiny(variant, *WIDTHS[variant])
    if is_int8:
        quantize(path, tmp_path / "int8")
        path = tmp_path / "int8"
    exact, reference = logits(path, "float32"), logits(path, "bfloat16")
    device.install()
    settings = replace(SETTINGS, dtype=torch.bfloat16)
    monkeypatch.setattr(kernels, "load", lambda kind, **_: TABLE("npu", npu=settings))
    errors = [float((found.float() - exact).abs().mean()) for found in (logits(path, "bfloat16"), reference)]
    print(f"{variant}: mean distance of logits to fp32 {errors[0]:.4f}, of the reference {errors[1]:.4f}")
    assert errors[0] <= MARGIN * errors[1]
