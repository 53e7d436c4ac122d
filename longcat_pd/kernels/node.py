"""Functions that are one node of a graph: a compiler does not look into them. The one place that registers operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARY = torch.library.Library("longcat_pd", "FRAGMENT")  # type: ignore[no-untyped-call]


def node(shapes: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator. The function writes to none of its arguments and returns none of them.

    ``shapes`` takes the same arguments and returns empty tensors of the result's shapes and types. (Not
    ``torch.library.custom_op``: its first call imports the whole compiler, seconds in the middle of a request.)
    """

    def define(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__.removeprefix("_")
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"longcat_pd::{name}", shapes, lib=_LIBRARY)
        registered: Callable[P, R] = getattr(torch.ops.longcat_pd, name).default
        return registered

    return define
