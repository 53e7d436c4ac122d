"""How CPU kernels say no: a ValueError with the operator, the argument and the numbers; and what several of them need.

fp32 is taken wherever the documentation has 16-bit floats, so that tokens can be compared exactly.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
BF16 = (torch.bfloat16, torch.float32)
ND, FRACTAL_NZ = 2, 29


class Limits:
    """The limits of one operator; `names` gives what it calls an argument that has another name here."""

    def __init__(self, operator: str, names: dict[str, str] | None = None) -> None:
        self.operator = operator
        self._names = names or {}

    def refuse(self, message: str) -> ValueError:
        return ValueError(f"{self.operator}: {message}")

    def need(self, argument: str, is_kept: bool, wanted: object, got: object) -> None:
        if not is_kept:
            raise self.refuse(f"{self._names.get(argument, argument)} has to be {wanted}, not {got}")

    def given(self, argument: str, got: T | None) -> T:
        if got is None:
            raise self.refuse(f"{self._names.get(argument, argument)} is missing")
        return got

    def one_of(self, argument: str, got: object, allowed: Sequence[object]) -> None:
        self.need(argument, got in allowed, " or ".join(repr(each) for each in allowed), repr(got))

    def dtype(self, argument: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
        self.need(f"{argument}.dtype", tensor.dtype in allowed, " or ".join(map(str, allowed)), tensor.dtype)

    def shape(self, argument: str, tensor: Tensor, *sizes: int | None) -> None:
        """None stands for any size."""
        got = tuple(tensor.shape)
        is_kept = len(got) == len(sizes) and all(want in (None, have) for want, have in zip(sizes, got, strict=True))
        self.need(f"{argument}.shape", is_kept, "[" + ", ".join("*" if n is None else str(n) for n in sizes) + "]", got)

    def contiguous(self, **tensors: Tensor) -> None:
        for argument, tensor in tensors.items():
            self.need(argument, tensor.is_contiguous(), "contiguous", f"strides {tensor.stride()} of {tuple(tensor.shape)}")

    def absent(self, **arguments: object) -> None:
        """Arguments that have a meaning on the device but none here."""
        for argument, got in arguments.items():
            self.need(argument, got is None, "None (nothing else is modelled)", "given")

    def page(self, argument: str, size: int, most: int = 1024) -> None:
        self.need(f"{argument} block size", 16 <= size <= most and size % 16 == 0, f"a multiple of 16 up to {most}", size)

    def heads(self, argument: str, count: int) -> None:
        self.need(argument, 1 <= count <= 128 and count & (count - 1) == 0, "a power of two up to 128", count)

    def indices(self, argument: str, indices: Tensor, high: int) -> None:
        if indices.numel():
            low, top = int(indices.min()), int(indices.max())
            self.need(argument, low >= 0 and top < high, f"in 0 ... {high - 1}", f"{low} ... {top}")

    def running_sums(self, argument: str, sums: Sequence[int], total: int) -> list[range]:
        """Rows of each request in a TND tensor of `total` rows, from running sums that have to end there."""
        starts = [0, *sums]
        is_kept = len(sums) > 0 and all(a <= b for a, b in zip(starts, sums, strict=False)) and starts[-1] == total
        self.need(argument, is_kept, f"running sums that end at the {total} rows", list(sums))
        return [range(a, b) for a, b in zip(starts, sums, strict=False)]

    def lengths(self, argument: str, lengths: Sequence[int], requests: int, most: int) -> None:
        """Lengths per request, not running sums."""
        self.need(argument, len(lengths) == requests, f"one length for each of {requests} requests", list(lengths))
        is_kept = all(0 <= length <= most for length in lengths)
        self.need(argument, is_kept, f"lengths per request (no running sums) in 0 ... {most}", list(lengths))

    def rows_of(self, argument: str, lengths: Sequence[int] | None, x: Tensor, *, is_tnd: bool) -> list[range]:
        """Rows of each request in the flattened `x` [T, N, D] or [B, S, N, D].

        In TND they come from running sums, in BSND from lengths of requests, S where none are given.
        """
        if is_tnd:
            return self.running_sums(argument, self.given(argument, lengths), x.shape[0])
        batch, size = x.shape[:2]
        lengths = [size] * batch if lengths is None else lengths
        self.lengths(argument, lengths, batch, size)
        return [range(b * size, b * size + length) for b, length in enumerate(lengths)]

    def pages_of(self, block_table: Tensor, lengths: Sequence[int], block_size: int, num_blocks: int) -> list[Tensor]:
        """Slots (block * block size + offset) of the keys of each request; columns beyond its length are not looked at."""
        offsets = torch.arange(block_size)
        slots = []
        for row, length in zip(block_table.long(), lengths, strict=True):
            blocks = row[: -(-length // block_size)]
            self.indices("block_table", blocks, num_blocks)
            slots.append((blocks[:, None] * block_size + offsets).flatten()[:length])
        return slots

    def int32_list(self, argument: str, lengths: Tensor | None) -> list[int]:
        """Lengths that the schema takes as a tensor."""
        lengths = self.given(argument, lengths)
        self.dtype(argument, lengths, (torch.int32,))
        self.shape(argument, lengths, None)
        return lengths.tolist()


def halves_rotated(x: Tensor) -> Tensor:
    """(-second half, first half) of the last dimension."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def interleave_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Even elements, then odd ones, turned by halves: the result is not interleaved. In fp64, not rounded."""
    x = torch.cat((x[..., ::2], x[..., 1::2]), -1).double()
    return x * cos.double() + halves_rotated(x) * sin.double()


def rms_normed(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """In fp64, not rounded."""
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * gamma.double()
