"""How a CPU kernel refuses what the documentation does not allow: ValueError with operator, argument and numbers.

A device would compute garbage or die without a word, so a kernel never tolerates more than is documented, with one
exception: fp32 is accepted wherever 16-bit floats are, because only so can tokens be compared exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
NUMBERS = {
    0: torch.uint8,
    1: torch.int8,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    15: torch.bfloat16,
}
GARBAGE = 1515870810  # 0x5a5a5a5a: what undefined int32 and int64 elements hold
GARBAGE_INT8 = -91


def undefined(*shape: int, dtype: torch.dtype) -> Tensor:
    """What memory that nobody writes looks like: NaN, or a large number that indexes nothing."""
    if dtype.is_floating_point:
        return torch.full(shape, torch.nan, dtype=dtype)
    return torch.full(shape, GARBAGE_INT8 if dtype == torch.int8 else GARBAGE, dtype=dtype)


class Limits:
    """The complaints of one operator."""

    def __init__(self, operator: str) -> None:
        self.operator = operator

    def require(self, holds: bool, complaint: str) -> None:
        if not holds:
            raise ValueError(f"{self.operator}: {complaint}")

    def dtype(self, argument: str, tensor: Tensor, *allowed: torch.dtype) -> None:
        self.require(tensor.dtype in allowed, f"{argument} is {tensor.dtype}, allowed are {_names(allowed)}")

    def shape(self, argument: str, tensor: Tensor, *sizes: int | None) -> None:
        """The sizes of every dimension; None is any."""
        fits = tensor.dim() == len(sizes) and all(s in (None, t) for s, t in zip(sizes, tensor.shape, strict=True))
        wanted = ["any" if size is None else size for size in sizes]
        self.require(fits, f"{argument} has shape {list(tensor.shape)}, it should be {wanted}")

    def contiguous(self, argument: str, tensor: Tensor) -> None:
        """int8 weights lie as they are read, [.., K, N]: only so can they be brought into the device's own format."""
        strides = list(tensor.stride())
        self.require(tensor.is_contiguous(), f"{argument} of shape {list(tensor.shape)} is a view with strides {strides}")

    def one_of(self, argument: str, value: Any, *allowed: Any) -> None:
        fits = any(type(value) is type(choice) and value == choice for choice in allowed)
        self.require(fits, f"{argument} is {value!r}, allowed are {list(allowed)}")

    def within(self, argument: str, value: int, low: int, high: int) -> None:
        self.require(low <= value <= high, f"{argument} is {value}, allowed are {low} to {high}")

    def absent(self, **arguments: Any) -> None:
        """Arguments that must not be given here, or that have no CPU kernel."""
        for argument, value in arguments.items():
            self.require(value is None, f"{argument} is given, which is not supported here")

    def single(self, argument: str, tensors: Any) -> Tensor:
        """The one tensor of a list."""
        is_list = isinstance(tensors, list | tuple)
        self.require(is_list, f"{argument} is a {type(tensors).__name__}, it should be a list of tensors")
        self.require(len(tensors) == 1, f"{argument} lists {len(tensors)} tensors, the form for experts has one")
        assert isinstance(tensors[0], Tensor)
        return tensors[0]

    def output(self, argument: str, value: Any, *allowed: torch.dtype) -> torch.dtype:
        """The dtype behind its number, or behind itself as in older schemas; None is refused."""
        self.require(value is not None, f"{argument} is not given, and its default is not what anybody wants")
        dtype = value if isinstance(value, torch.dtype) else NUMBERS.get(value)
        self.require(dtype in allowed, f"{argument} is {value} ({dtype}), allowed are {_names(allowed)}")
        assert dtype is not None
        return dtype

    def groups(self, argument: str, numbers: Tensor, *, is_sums: bool, rows: int) -> list[int]:
        """Rows of each group, from counts or running sums; their total may not exceed ``rows``."""
        values = numbers.tolist()
        counts = [after - before for before, after in zip([0, *values], values, strict=False)] if is_sums else values
        kind = "running sums" if is_sums else "counts"
        self.require(all(count >= 0 for count in counts), f"{argument} are no {kind}: {values}")
        self.require(sum(counts) <= rows, f"{argument} covers {sum(counts)} rows of {rows}")
        return counts


def runs(counts: Sequence[int]) -> list[tuple[int, slice]]:
    """Group number and rows of every group that has some."""
    found, start = [], 0
    for group, count in enumerate(counts):
        if count:
            found.append((group, slice(start, start + count)))
        start += count
    return found


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)
