"""What a device can do. ``load`` gives the table of operators of a device; the table itself is ``ops.Ops``."""

from __future__ import annotations

from longcat_pd.kernels.ops import Ops
from longcat_pd.kernels.reference import table


def load(device: str) -> Ops:
    """The operators of a device kind, one that the resolver lets pass: plain torch wherever nothing better is known."""
    tables = {"cpu": table}
    return tables[device]()
