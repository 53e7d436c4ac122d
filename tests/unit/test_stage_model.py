"""engine/stage_model.py: what the configuration says of NPU is what their operators are told."""

from __future__ import annotations

from typing import Any

import pytest

from longcat_pd.config.schema import NpuConfig
from longcat_pd.engine.stage_model import npu_settings
from longcat_pd.kernels import NpuSettings

USUAL = npu_settings(NpuConfig())


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"is_moe_overlapped": True}, {"is_overlapped": True}),
        ({"moe_cube_cores": 1}, {"cube_cores": 1}),
        ({"moe_vector_cores": 2}, {"vector_cores": 2}),
        ({"main_cube_cores": 3}, {"main_cube_cores": 3}),
        ({"main_vector_cores": 4}, {"main_vector_cores": 4}),
        ({"is_prefetched": True}, {"is_prefetched": True}),
        ({"comm_alg": "hierarchy"}, {"dispatch_algorithm": "hierarchy"}),
        ({"soc": "A3"}, {"is_series_a3": True}),
    ],
)
def test_every_setting_reaches_the_operators(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    told = npu_settings(NpuConfig(**ours))
    changed = {name: getattr(told, name) for name in NpuSettings.__slots__ if getattr(told, name) != getattr(USUAL, name)}
    assert changed == theirs
