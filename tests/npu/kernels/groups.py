"""The communicators that fused operators find by name, and two ways for their members to exchange tensors.

A test registers a name; the product passes it as ``group_ep``. Over torch.distributed every rank is a process with its own
registry; ranks that are threads of one process share one entry, whose exchange knows them apart by their number.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tests.parity.ranks import ThreadGroup

Item = tuple[Tensor, ...]
Exchange = Callable[[int, Item], Sequence[Item]]
MAX_DIMS = 4
DTYPES = (torch.int8, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.uint8)
_groups: dict[str, Exchange] = {}


def register_group(name: str, exchange: Exchange) -> None:
    """``exchange(rank, item)`` gives the items of all ranks; every member calls it alike. A name is taken once."""
    if not name or name in _groups:
        raise ValueError(f"group {name!r} is {'registered already' if name else 'without a name'}")
    _groups[name] = exchange


def unregister_group(name: str) -> None:
    """Nothing happens if there is none."""
    _groups.pop(name, None)


def group(name: str) -> Exchange | None:
    """What was registered."""
    return _groups.get(name)


def thread_exchange(size: int, timeout: float = 30.0) -> Exchange:
    """Among threads of this process. A member that fails breaks the barrier for all of them after ``timeout``."""
    members = ThreadGroup(size)
    members.barrier = threading.Barrier(size, timeout=timeout)
    return members.exchange


def gloo_exchange(process_group: dist.ProcessGroup) -> Exchange:
    """Among processes, over a gloo group (``dist.group.WORLD``): the shapes of all tensors first, then their bytes."""

    def gathered(tensor: Tensor) -> list[Tensor]:
        out = [torch.empty_like(tensor) for _ in range(process_group.size())]
        process_group.allgather([out], [tensor]).wait()
        return out

    def exchange(rank: int, item: Item) -> list[Item]:
        if process_group.rank() != rank:
            raise ValueError(f"rank {rank} of the operator is rank {process_group.rank()} of its group")
        shapes = torch.tensor([_header(tensor) for tensor in item], dtype=torch.int64)
        headers = [shape.tolist() for shape in gathered(shapes)]
        lengths = [sum(_num_bytes(header) for header in each) for each in headers]
        flat = torch.zeros(max(max(lengths), 1), dtype=torch.uint8)
        flat[: lengths[rank]] = torch.cat([_bytes(tensor) for tensor in item])
        return [_unpacked(data, each) for data, each in zip(gathered(flat), headers, strict=True)]

    return exchange


def _header(tensor: Tensor) -> list[int]:
    if tensor.dim() > MAX_DIMS:
        raise ValueError(f"a tensor of {tensor.dim()} dimensions does not travel")
    return [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *([0] * (MAX_DIMS - tensor.dim()))]


def _num_bytes(header: Sequence[int]) -> int:
    return math.prod(header[2 : 2 + header[1]]) * DTYPES[header[0]].itemsize


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _unpacked(data: Tensor, headers: Sequence[Sequence[int]]) -> Item:
    tensors, start = [], 0
    for header in headers:
        end = start + _num_bytes(header)
        tensors.append(data[start:end].clone().view(DTYPES[header[0]]).view(header[2 : 2 + header[1]]))
        start = end
    return tuple(tensors)
