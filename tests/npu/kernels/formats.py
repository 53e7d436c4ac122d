"""Which tensors are in a private format: what `npu_format_cast` made, found again by where it lies in memory.

A view of such a tensor with another shape, start or stride has no meaning on the device, and is refused here.
"""

import weakref
from dataclasses import dataclass

from torch import Tensor

from tests.npu.kernels.refusals import FRACTAL_NZ, ND, Limits


@dataclass(frozen=True)
class _Cast:
    acl_format: int
    geometry: tuple[object, ...]


_casts: dict[int, _Cast] = {}


def remember(tensor: Tensor, acl_format: int) -> None:
    """`tensor` has its storage for itself; it is forgotten together with it."""
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    _casts[address] = _Cast(acl_format, _geometry(tensor))
    weakref.finalize(storage, _casts.pop, address, None).atexit = False


def format_of(operator: str, argument: str, tensor: Tensor) -> int:
    """2 or 29; ValueError for a slice, view or transposition of what was cast to 29."""
    cast = _casts.get(tensor.untyped_storage().data_ptr())
    if cast is None or cast.acl_format == ND:
        return ND
    if cast.geometry != _geometry(tensor):
        raise Limits(operator).refuse(
            f"{argument} is a slice, view or transposition of a tensor in format 29: {_geometry(tensor)} of {cast.geometry}"
        )
    return FRACTAL_NZ


def _geometry(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
