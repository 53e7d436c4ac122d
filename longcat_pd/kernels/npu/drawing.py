"""Draws in a graph: forms of one shape of work, made of what graph compilers know. Drawn eagerly, data is looked at."""

from __future__ import annotations

from dataclasses import replace

from longcat_pd.kernels.ops import Ops
from longcat_pd.kernels.reference import sampling


def with_static_draws(ops: Ops) -> Ops:
    """``ops`` with draws that a graph can hold."""
    return replace(
        ops,
        keyed_uniform=sampling.keyed_uniform_static,
        draw=sampling.draw_static,
        draw_edited=sampling.draw_edited_static,
    )
