"""Weights that no file holds: what a region of a tensor is filled with follows from the name and the places in it.

For runs that ask how long something takes, not what the text says. Ranks that hold different parts of one tensor hold parts
of the same numbers, whatever the layout. Knows WeightSpecs; no modules and no ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch

from longcat_pd.models.weight_spec import WeightSpec
from longcat_pd.progress.steps import Tell, untold

_CHUNK = 1 << 20  # numbers made at once: their keys are eight bytes each
_INCREMENT, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # of splitmix64


def fill_random(specs: Iterable[WeightSpec], tell: Tell = untold) -> int:
    """Hand every spec its region, in float32; return the bytes. Floats only: scales and int8 have no random form."""
    wanted, num_bytes = list(specs), 0
    total = sum(spec.num_wanted for spec in wanted) * torch.float32.itemsize
    tell("weights", 0, total)
    for spec in wanted:
        assert spec.kind == "float", f"{spec.name} is {spec.kind}"
        region = _region(spec)
        num_bytes += region.numel() * region.element_size()
        spec.store(region)
        tell("weights", num_bytes, total)
    return num_bytes


def _region(spec: WeightSpec) -> torch.Tensor:
    """Row by row of the first dimension, so that beside the region little memory is needed."""
    wanted = spec.region or tuple(slice(None) for _ in spec.shape)
    places = [torch.arange(size)[part] for size, part in zip(spec.shape, wanted, strict=True)]
    key = int.from_bytes(hashlib.sha256(spec.name.encode()).digest()[:8], "little", signed=True)
    row = torch.zeros((), dtype=torch.int64)
    for size, place in zip(spec.shape[1:], places[1:], strict=True):
        row = row.unsqueeze(-1) * size + place
    row_size = math.prod(spec.shape[1:])
    made = torch.empty([len(place) for place in places])
    step = max(_CHUNK // max(row.numel(), 1), 1)
    for start in range(0, len(places[0]), step):
        first = places[0][start : start + step]
        index = first.view(-1, *[1] * row.dim()) * row_size + row
        made[start : start + len(first)] = _scaled(spec, _uniform(index, key))
    return made


def _uniform(index: torch.Tensor, key: int) -> torch.Tensor:
    """In [-1, 1), by splitmix64 of the place and the key; integers wrap."""
    x = index * _INCREMENT + key
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    x = x ^ _shifted(x, 31)
    return _shifted(x, 40).to(torch.float32) * 2.0**-23 - 1.0


def _shifted(x: torch.Tensor, count: int) -> torch.Tensor:
    """``x >> count`` of the bits: the mask takes away the copies of the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _scaled(spec: WeightSpec, noise: torch.Tensor) -> torch.Tensor:
    """So that activations neither vanish nor overflow: norms about 1, biases small, products of unit variance."""
    if len(spec.shape) == 1:
        return noise * 0.05 if spec.name.endswith("bias") else 1.0 + 0.1 * noise
    is_table = "embed" in spec.name and "proj" not in spec.name
    return noise * math.sqrt(3.0 if is_table else 3.0 / spec.shape[-1])
