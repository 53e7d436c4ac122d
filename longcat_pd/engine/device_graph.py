"""Graphs that a device's own compiler makes of a part of the step and keeps in a folder: what all such exe_modes share.

These compilers take a method and find its graph again by the method's name and class: neither what the method does, nor
shapes, nor versions count. So every part and size has a method of its own, and the folder's name has a digest of all facts.
What lies in a folder is executed, so it is this user's alone. Knows no compiler.
"""

from __future__ import annotations

import platform
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from longcat_pd.engine.compile_cache import CacheEntry
from longcat_pd.engine.step_parts import StepPart

Form = Callable[..., tuple[Tensor, ...]]
CacheCompile = Callable[[MethodType, Path], Form]  # a method and its folder -> the function that compiles or loads it


_GRAPH_FILE = "compiled_module"


def compiled_by(
    cache_compile: CacheCompile, part: StepPart, num_seqs: int, *, entry: CacheEntry, facts: Mapping[str, str]
) -> tuple[Form, bool]:
    """A part of the step for ``num_seqs`` slots as one graph, and whether it had to be compiled.

    It is run once, on rows of padding, as it will be: what is compiled or loaded at the first call is there before serving.

    Args:
        facts: what the graph depends on beside what ``entry`` has.

    Raises:
        ConfigError: the folder cannot be written, or is not this user's alone.
    """
    tensors = [*part.parameters(), *part.buffers()]
    facts = {**entry.facts, **facts, "tensors": _described(tensors), "python": platform.python_version()}
    folder = replace(entry, facts={**facts, "torch": str(torch.__version__)}).own_folder()
    _settle(tensors)
    before = dict(_graphs(folder))
    form = cache_compile(_named(part, f"decode_{num_seqs}_{part.name}"), folder)

    def run(*arguments: Tensor) -> tuple[Tensor, ...]:
        return tuple(form(*arguments))

    with torch.inference_mode():  # as the engine runs it: another mode is another graph
        run(*part.examples(num_seqs))
    return run, dict(_graphs(folder)) != before or not before


def cann_version(torch_npu: Any) -> str:
    """Of what compiles and runs graphs below torch_npu."""
    found: str = torch_npu.npu.utils.get_cann_version()
    return found


def _named(part: StepPart, name: str) -> MethodType:
    """The part's function as a method of this name, whose code is its own: a tracer keeps what it knows by code."""
    assert re.fullmatch(r"[a-z0-9_]+", name)
    plain = type(part).forward
    assert isinstance(plain, FunctionType)
    own = FunctionType(plain.__code__.replace(co_name=name), plain.__globals__, name, closure=plain.__closure__)
    own.__qualname__, own.__annotations__ = f"{type(part).__qualname__}.{name}", plain.__annotations__
    return MethodType(own, part)


def _settle(tensors: list[Tensor]) -> None:
    """Their shapes never change, and nothing is traced anew while serving: that would be minutes, so it is an error."""
    with warnings.catch_warnings():  # of a release that has no choice any more
        warnings.simplefilter("ignore", FutureWarning)
        torch._dynamo.config.inline_inbuilt_nn_modules = False
    torch._dynamo.config.error_on_recompile = True
    for tensor in tensors:
        torch._dynamo.mark_static(tensor)


def _graphs(folder: Path) -> Iterator[tuple[Path, int]]:
    """The files that compiled methods are kept in, and when they were written."""
    yield from ((path, path.stat().st_mtime_ns) for path in folder.rglob(_GRAPH_FILE))


def _described(tensors: list[Tensor]) -> str:
    return " ".join(f"{str(t.dtype).removeprefix('torch.')}{tuple(t.shape)}{t.stride()}" for t in tensors)
