"""How a module says which checkpoint tensors it wants: the one contract between modules and the loader (``weights.py``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One checkpoint tensor that this rank reads.

    Args:
        name: full name in the checkpoint.
        shape: shape of the whole tensor in the checkpoint; any other shape is an error that names both.
        store: takes the region that was read (any float data type, CPU) and copies it into the parameter.
        region: one slice per dimension that this rank needs; empty: the whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    store: Callable[[torch.Tensor], None]
    region: tuple[slice, ...] = ()
