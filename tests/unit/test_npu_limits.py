"""What the configuration refuses for NPU is what the operators refuse: their limits stand in two places, because reading a
configuration needs no torch.
"""

from __future__ import annotations

from longcat_pd.config import npu_checks
from longcat_pd.kernels.npu import fused_limits, limits


def test_limits_of_attention_are_the_same() -> None:
    assert (npu_checks._BLOCK_STEP, npu_checks._MAX_BLOCK) == (limits.BLOCK_STEP, limits.MOST_BLOCK)
    assert npu_checks._MAX_HEADS == limits.MOST_HEADS


def test_ways_of_the_fused_pair_are_the_same() -> None:
    for soc, algorithms in npu_checks.COMM_ALGS.items():
        assert {"", *algorithms} == {*fused_limits._VARIANTS[soc == "A3"]}
