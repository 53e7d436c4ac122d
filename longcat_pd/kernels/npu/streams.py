"""Work beside other work: the experts on a stream of their own, and weights that are fetched before they are needed.

In a graph streams are labels of nodes, set by torchair's scopes; executed as it stands, they are streams. Knows no layer.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from longcat_pd.kernels.npu.settings import NpuSettings
from longcat_pd.kernels.ops import Ops, Overlap

A = TypeVar("A")
B = TypeVar("B")
Cores = tuple[int, int]  # cube, vector; zeros: no limit

SIDE_STREAM = "experts"


def with_streams(ops: Ops, settings: NpuSettings, *, exe_mode: str) -> Ops:
    """``ops`` with what the settings want of it. ``npugraph_ex`` captures one stream, so nothing runs beside it there."""
    side, main = (
        (settings.cube_cores, settings.vector_cores),
        (settings.main_cube_cores, settings.main_vector_cores),
    )
    forms: dict[str, Callable[[Cores, Cores], Overlap]] = {"eager": _on_streams, "ge_graph": _in_graph}
    if settings.is_overlapped and exe_mode in forms:
        ops = replace(ops, overlap=forms[exe_mode](side, main))
    return replace(ops, prefetch=prefetch) if settings.is_prefetched else ops


def prefetch(weights: Sequence[Tensor], after: Tensor) -> None:
    """See ``ops.Prefetch``."""
    for weight in weights:
        if weight.numel():
            torch.ops.npu.npu_prefetch(weight, after, max_size=weight.numel() * weight.element_size())


def _in_graph(side_cores: Cores, main_cores: Cores) -> Overlap:
    """Labels of nodes. The scopes are torchair's own, for not every release's tracer follows one that is made of others."""
    scope: Any = importlib.import_module("torchair").scope

    def limited(cores: Cores, work: Callable[[], A]) -> A:
        if not any(cores):
            return work()
        with scope.limit_core_num(*cores):
            return work()

    def overlap(side: Callable[[], A], main: Callable[[], B]) -> tuple[A, B]:
        """See ``ops.Overlap``."""
        with scope.npu_stream_switch(SIDE_STREAM, 0):
            first = limited(side_cores, side)
        return first, limited(main_cores, main)

    return overlap


def _on_streams(side_cores: Cores, main_cores: Cores) -> Overlap:
    """Streams that wait for each other, and no host that waits."""
    npu: Any = importlib.import_module("torch_npu").npu
    stream = npu.Stream()
    if any(side_cores):
        npu.set_stream_limit(stream, *side_cores)

    @contextlib.contextmanager
    def limited(here: Any) -> Iterator[None]:
        if not any(main_cores):
            yield
            return
        npu.set_stream_limit(here, *main_cores)
        try:
            yield
        finally:
            npu.reset_stream_limit(here)

    def overlap(side: Callable[[], A], main: Callable[[], B]) -> tuple[A, B]:
        """See ``ops.Overlap``. What ``side`` reads is held by the caller until both are done."""
        here = npu.current_stream()
        stream.wait_stream(here)
        with npu.stream(stream):
            first = side()
        with limited(here):
            second = main()
        here.wait_stream(stream)
        if isinstance(first, Tensor):
            first.record_stream(here)  # made beside, read and given back here
        return first, second

    return overlap
