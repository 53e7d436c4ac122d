"""Ascend operators on CPU tensors: the schemas of a torch_npu release with the CPU kernels of `tests.npu.kernels` behind
them.

`install` makes `torch.ops.npu.npu_x(...)` a real dispatcher entry, which refuses unknown keywords, missing arguments
and wrong Python types, in a process without torch_npu; where torch_npu is loaded its own schemas stand and only the
kernels are added. Knows nothing of the product.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.npu.kernels import all_kernels
from tests.npu.schema_lines import RELEASES, kept


@dataclass(frozen=True)
class Installed:
    """What a process holds: `refused` are lines that this torch cannot parse, `computed` the operators with a kernel."""

    release: str
    real: bool
    computed: frozenset[str]
    refused: tuple[str, ...]


@dataclass
class _Process:
    installed: Installed | None = None
    libraries: tuple[torch.library.Library, ...] = ()  # a library that is collected takes its registrations along


_process = _Process()


def installed() -> Installed | None:
    """What this process holds, None before ``install``."""
    return _process.installed


def install(release: str = "2.13.0") -> Installed:
    """Define the operators of a release once a process; RuntimeError when another release is in force already."""
    if _process.installed is not None:
        if release != _process.installed.release:
            raise RuntimeError(f"this process has the operators of {_process.installed.release}, not of {release}")
        return _process.installed
    if release not in RELEASES:
        raise ValueError(f"no schema lines of torch_npu {release}; there are {', '.join(RELEASES)}")
    real = "torch_npu" in sys.modules
    definitions = torch.library.Library("npu", "FRAGMENT")
    refused = () if real else tuple(line for line in kept(release) if not _define(definitions, line))
    kernels = torch.library.Library("npu", "IMPL")
    known = {line.partition("(")[0] for name in RELEASES for line in kept(name)}
    computed = set()
    for operator, kernel in all_kernels().items():
        if operator not in known:
            raise ValueError(f"{operator}: a CPU kernel for an operator of no release")
        overload = _overload(operator)
        if overload is not None:
            kernels.impl(operator, by_keyword(overload._schema, kernel), "CPU")
            computed.add(operator)
    _process.libraries = (definitions, kernels)
    _process.installed = Installed(release, real, frozenset(computed), refused)
    return _process.installed


def by_keyword(schema: torch.FunctionSchema, kernel: Callable[..., object]) -> Callable[..., object]:
    """`kernel` called with every argument of the schema by name: the dispatcher leaves out what equals its default.

    TypeError for None in place of a tensor that is not optional, which the dispatcher lets through to a kernel in Python.
    """
    names = tuple(argument.name for argument in schema.arguments)
    defaults = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}

    plain = tuple(argument.name for argument in schema.arguments if str(argument.type) == "Tensor")

    def call(*args: object, **kwargs: object) -> object:
        given = defaults | dict(zip(names, args, strict=False)) | kwargs
        for name in plain:
            if name in given and given[name] is None:
                raise TypeError(f"{schema.name}: {name} has to be a Tensor, not None")
        return kernel(**given)

    return call


def _define(library: torch.library.Library, line: str) -> bool:
    try:
        library.define(line)
    except RuntimeError as error:
        print(f"skipped, torch {torch.__version__} cannot parse it: {line.partition('(')[0]}: {str(error).splitlines()[0]}")
        return False
    return True


def _overload(operator: str) -> torch._ops.OpOverload | None:
    name, _, overload = operator.partition(".")
    if not hasattr(torch.ops.npu, name):
        return None
    packet = getattr(torch.ops.npu, name)
    return getattr(packet, overload or "default") if (overload or "default") in packet.overloads() else None
