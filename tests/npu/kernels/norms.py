"""Norms, rotations, and what moves weights: npu_rms_norm, npu_add_rms_norm, npu_interleave_rope, npu_rotary_mul,
npu_format_cast, npu_prefetch.
"""

import torch
from torch import Tensor

from tests.npu.kernels.formats import format_of, remember
from tests.npu.kernels.refusals import FLOATS, FRACTAL_NZ, ND, Limits, halves_rotated, interleave_rotated, rms_normed


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    limits = Limits("npu_rms_norm")
    limits.dtype("input", input, FLOATS)
    limits.dtype("gamma", gamma, (input.dtype, torch.float32))
    limits.need("input.dim()", input.dim() >= 1, "at least 1", input.dim())
    limits.shape("gamma", gamma, input.shape[-1])
    return _normed(input, gamma, epsilon)


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """The norm is that of the sum as it is returned, in the type of `x1`."""
    limits = Limits("npu_add_rms_norm")
    limits.dtype("x1", x1, FLOATS)
    limits.dtype("x2", x2, (x1.dtype,))
    limits.dtype("gamma", gamma, (x1.dtype,))
    limits.shape("x2", x2, *x1.shape)
    limits.shape("gamma", gamma, x1.shape[-1])
    x = (x1.double() + x2.double()).to(x1.dtype)
    return *_normed(x, gamma, epsilon), x


def _normed(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + epsilon)
    return rms_normed(x, gamma, epsilon).to(x.dtype), rstd.float()


def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    limits = Limits("npu_interleave_rope")
    limits.dtype("x", x, FLOATS)
    limits.shape("x", x, None, None, None, 64)
    limits.contiguous(x=x, cos=cos, sin=sin)
    batch, _, rows, _ = x.shape
    for argument, turn in (("cos", cos), ("sin", sin)):
        limits.dtype(argument, turn, (x.dtype,))
        limits.shape(argument, turn, batch, 1, None, 64)
        limits.one_of(f"{argument}.shape[2]", turn.shape[2], (1, rows))
    limits.shape("sin", sin, *cos.shape)
    return interleave_rotated(x, cos, sin).to(x.dtype)


_LAYOUTS = {"BNSD": (0, 1), "BSND": (0, 2), "SBND": (1, 2)}  # where B and N are; the factors have 1 at N, and 1 or B at B


def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """The layout is not an argument: any that fits the factors and the limits will do."""
    limits = Limits("npu_rotary_mul")
    limits.absent(rotate=rotate)
    limits.one_of("rotary_mode", rotary_mode, ("half", "interleave"))
    limits.dtype("input", input, FLOATS)
    limits.shape("input", input, None, None, None, None)
    width = input.shape[-1]
    limits.need("head dimension", width < 896 and width % 2 == 0, "even and below 896", width)
    limits.dtype("r1", r1, (input.dtype,))
    limits.dtype("r2", r2, (input.dtype,))
    limits.shape("r1", r1, None, None, None, width)
    limits.shape("r2", r2, *r1.shape)
    is_legal = any(_fits(input, r1, *axes) for axes in _LAYOUTS.values())
    wanted = f"the factors of a layout of input {tuple(input.shape)} (BNSD, BSND or SBND with B and N below 1000)"
    limits.need("r1.shape", is_legal, wanted, tuple(r1.shape))
    x = input.double()
    interleaved = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    swapped = halves_rotated(x) if rotary_mode == "half" else interleaved
    return (x * r1.double() + swapped * r2.double()).to(input.dtype)


def _fits(x: Tensor, turn: Tensor, batch_axis: int, head_axis: int) -> bool:
    batch, heads, rows_axis = x.shape[batch_axis], x.shape[head_axis], 3 - batch_axis - head_axis
    is_shaped = turn.shape[rows_axis] == x.shape[rows_axis] and turn.shape[head_axis] == 1
    return is_shaped and turn.shape[batch_axis] in (1, batch) and batch < 1000 and heads < 1000


def npu_format_cast(
    input: Tensor, acl_format: int, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    """A copy, so that what is in a private format shares no memory with what is not; `formats.format_of` tells which."""
    limits = Limits("npu_format_cast")
    limits.absent(customize_dtype=customize_dtype, input_dtype=input_dtype)
    limits.one_of("acl_format", acl_format, (ND, FRACTAL_NZ))
    format_of(limits.operator, "input", input)
    limits.contiguous(input=input)
    limits.need("input.dim()", acl_format == ND or input.dim() >= 2, "at least 2 for format 29", input.dim())
    result = input.clone()
    remember(result, acl_format)
    return result


def npu_prefetch(input: Tensor, dependency: Tensor | None, max_size: int, offset: int = 0) -> None:
    limits = Limits("npu_prefetch")
    limits.need("max_size", max_size > 0, "above 0", max_size)
    size = input.numel() * input.element_size()
    limits.need("offset", 0 <= offset < size, f"in 0 ... {size - 1} (bytes of input)", offset)


KERNELS = {
    kernel.__name__: kernel
    for kernel in (npu_rms_norm, npu_add_rms_norm, npu_interleave_rope, npu_rotary_mul, npu_format_cast, npu_prefetch)
}
