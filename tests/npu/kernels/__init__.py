"""CPU kernels of Ascend operators, written from their documented meaning. `tests.npu.device` registers them.

Every module here exposes `KERNELS`, from the operator's name in the `npu` namespace (`npu_rms_norm`; `npu_x.overload`
for an overload that is not the default) to a function whose parameters have the schema's names: it is called by
keyword alone, with every default of the schema filled in. What a schema marks `(a!)` is written in place. A module
that is not written yet is passed over, so that the kernels can arrive one file at a time.
"""

import importlib
import importlib.util
from collections.abc import Callable

MODULES = ("attention", "prolog", "indexer", "norms", "quant", "experts", "routing", "dispatch")


def all_kernels() -> dict[str, Callable[..., object]]:
    """The kernels of every module; ValueError when two modules claim one operator."""
    merged: dict[str, Callable[..., object]] = {}
    for name in MODULES:
        if importlib.util.find_spec(f"{__name__}.{name}") is None:
            continue
        for operator, kernel in importlib.import_module(f"{__name__}.{name}").KERNELS.items():
            if operator in merged:
                raise ValueError(f"{operator}: two CPU kernels, the second one in {name}")
            merged[operator] = kernel
    return merged
