"""What entries of the table depend on how a step is executed: draws, and what runs beside what. Knows no entry else."""

from __future__ import annotations

from dataclasses import replace

from longcat_pd.kernels.npu.settings import NpuSettings
from longcat_pd.kernels.npu.streams import with_streams
from longcat_pd.kernels.ops import Ops
from longcat_pd.kernels.reference import sampling


def executed(ops: Ops, settings: NpuSettings, *, exe_mode: str) -> Ops:
    """``ops`` with draws that a graph can hold, where there is one, and with the streams that the settings want."""
    return with_streams(ops if exe_mode == "eager" else with_static_draws(ops), settings, exe_mode=exe_mode)


def with_static_draws(ops: Ops) -> Ops:
    """Forms of one shape of work, made of what graph compilers know. Drawn eagerly, data is looked at."""
    return replace(
        ops,
        keyed_uniform=sampling.keyed_uniform_static,
        draw=sampling.draw_static,
        draw_edited=sampling.draw_edited_static,
    )
