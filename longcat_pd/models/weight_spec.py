"""How a module says which checkpoint tensors it wants: the one contract between modules and the loader (``weights.py``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["float", "int8", "scale", "offset"]


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One checkpoint tensor that this rank reads.

    Args:
        name: full name in the checkpoint.
        shape: shape of the whole tensor in the checkpoint; any other shape is an error that names both. A scale or
            offset [n] may also be stored as [n, 1].
        store: takes the region that was read (of its kind's data type, CPU) and copies it into the parameter.
        region: one slice per dimension that this rank needs; empty: the whole tensor.
        kind: any float type; int8; a scale, floats that are all finite and above 0; an offset, numbers that are all 0.
    """

    name: str
    shape: tuple[int, ...]
    store: Callable[[torch.Tensor], None]
    region: tuple[slice, ...] = ()
    kind: Kind = "float"

    @property
    def num_wanted(self) -> int:
        """Elements of the region."""
        sizes = [len(range(*part.indices(size))) for part, size in zip(self.region, self.shape, strict=False)]
        return math.prod([*sizes, *self.shape[len(sizes) :]])
