"""Tensors of device "npu" that have a shape and no memory: what runs on them runs on the release's own shape functions.

Knows nothing of the product.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.npu.offline.real import processor


@contextlib.contextmanager
def fake(soc: str = "Ascend910B3") -> Iterator[FakeTensorMode]:
    """Inside, new tensors have no memory; those of `empty` claim to be on an NPU of `soc`."""
    with processor(soc), FakeTensorMode() as mode:
        yield mode


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor on the NPU of the context."""
    return torch.empty(*shape, dtype=dtype, device="npu")
