"""exe_mode ``npugraph_ex``: parts of the decode step, each captured once from a stream of the device and replayed.

Operators are those of eager mode, so nothing has to be converted; experts have no stream of their own there. Imported when
the mode is chosen, torch_npu when the first part is compiled.
"""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MethodType
from typing import Any

from longcat_pd.engine.compile_cache import CacheEntry
from longcat_pd.engine.device_graph import Form, cann_version, compiled_by
from longcat_pd.engine.step_parts import StepPart
from longcat_pd.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """What is ours to choose of the compiler.

    Attributes:
        frozen_parameter: weights keep their addresses.
        static_kernel_compile: kernels are compiled for the very shapes.
        super_kernel_optimize: neighbours become one kernel; has no effect before Atlas A3.
    """

    frozen_parameter: bool = True
    static_kernel_compile: bool = False
    super_kernel_optimize: bool = False


def compiled(part: StepPart, num_seqs: int, entry: CacheEntry, options: CaptureOptions | None = None) -> tuple[Form, bool]:
    """A part of the step for ``num_seqs`` slots as one graph, and whether it had to be compiled.

    Raises:
        ConfigError: this machine's torch_npu has no such mode, or the cache's folder is no good.
    """
    options = options or CaptureOptions()
    try:
        torch_npu: Any = importlib.import_module("torch_npu")
        inference: Any = importlib.import_module("torch_npu.npu.npugraph_ex.inference")
    except ImportError as error:
        text = "engine.exe_mode=npugraph_ex: needs a torch_npu that has it on this machine"
        raise ConfigError(text, param="engine.exe_mode") from error

    def cache_compile(method: MethodType, folder: Path) -> Form:
        form: Form = inference.cache_compile(method, dynamic=False, cache_dir=str(folder), options=asdict(options))
        return form

    facts = {"options": repr(options), "torch_npu": str(torch_npu.__version__), "cann": cann_version(torch_npu)}
    return compiled_by(cache_compile, part, num_seqs, entry=entry, facts=facts)
