"""What a device can do. ``load`` gives the table of operators of a device; the table itself is ``ops.Ops``."""

from __future__ import annotations

from longcat_pd.kernels.opaque import sealed
from longcat_pd.kernels.ops import Ops
from longcat_pd.kernels.reference import steady_table, table

__all__ = ["Ops", "load"]


def load(device: str, *, exe_mode: str = "eager", is_steady: bool = False) -> Ops:
    """The operators of a device kind, one that the resolver lets pass: plain torch wherever nothing better is known.

    ``exe_mode``: whether a compiler looks at what is computed with them.
    ``is_steady``: sums over keys that are spread over ranks, and norms, activations, rotations and routing, are made in
    fp64 and rounded once, so that layouts and executions (torch, a compiled graph) agree to the bit. Worth its price where
    the last bit decides about a whole step: in front of a product that quantises.
    """
    tables = {"cpu": steady_table if is_steady else table}
    plain = tables[device]()
    return plain if exe_mode == "eager" else sealed(plain, is_steady=is_steady)
