"""The fused pair's CPU kernels, each rank on a thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from torch import Tensor

from tests.npu.cases import FusedCase, fused
from tests.npu.kernels import dispatch, groups


def fused_on_threads(case: FusedCase) -> list[dict[str, Tensor]]:
    """What every rank has of both calls."""
    name = f"{case} on threads"
    dispatch.forget_dispatches()
    groups.register_group(name, groups.thread_exchange(case.world))
    try:
        with ThreadPoolExecutor(case.world) as pool:
            return list(pool.map(partial(_rank, case, name), range(case.world)))
    finally:
        groups.unregister_group(name)


def _rank(case: FusedCase, name: str, rank: int) -> dict[str, Tensor]:
    return fused(case, rank, name)
