"""exe_mode ``ge_graph``: parts of the decode step, each as one graph of CANN's graph engine, made by torchair or loaded.

Imported when the mode is chosen; torchair and torch_npu are imported when the first part is compiled, on a machine that has
them. (Collectives need no patching: ``torchair.patch_for_hcom`` is for torch before 2.3.1.)
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, Literal

from longcat_pd.engine.compile_cache import CacheEntry
from longcat_pd.engine.device_graph import Form, cann_version, compiled_by
from longcat_pd.engine.step_parts import StepPart
from longcat_pd.errors import ConfigError

_FUSION_FILE = "fusion.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class GeOptions:
    """What is ours to choose of the compiler.

    Attributes:
        frozen_parameter: weights keep their addresses, so nothing looks them up at each run.
        tiling_schedule_optimize: tilings are computed before a run where shapes allow it.
        topology_sorting_strategy: order of nodes; the stable one is that of the program, on all ranks alike.
        keep_inference_input_mutations: what writes to the cache writes there, and not to a copy.
        enable_single_stream: one stream for all; off, because experts have one of their own.
        oo_level: of the engine's own optimisations.
        no_fusions: passes of the engine that are switched off. The one that adds in place would overwrite a stream that
            experts are reading.
    """

    frozen_parameter: bool = True
    tiling_schedule_optimize: bool = True
    topology_sorting_strategy: Literal["BFS", "DFS", "RDFS", "StableRDFS"] = "StableRDFS"
    keep_inference_input_mutations: bool = True
    enable_single_stream: bool = False
    oo_level: Literal["O1", "O3"] = "O3"
    no_fusions: tuple[str, ...] = ("InplaceAddRmsNormFusionPass",)


def compiled(part: StepPart, num_seqs: int, entry: CacheEntry, options: GeOptions | None = None) -> tuple[Form, bool]:
    """A part of the step for ``num_seqs`` slots as one graph, and whether it had to be compiled.

    Raises:
        ConfigError: there is no torchair on this machine, or the cache's folder is no good.
    """
    options = options or GeOptions()
    torchair, torch_npu = (_imported(name) for name in ("torchair", "torch_npu"))

    def cache_compile(method: MethodType, folder: Path) -> Form:
        form: Form = torchair.inference.cache_compile(
            method,
            config=compiler_config(torchair, options, folder / _FUSION_FILE),
            dynamic=False,
            cache_dir=str(folder),
            fullgraph=True,
            ge_cache=True,
        )
        return form

    facts = {"options": repr(options), "torch_npu": str(torch_npu.__version__), "cann": cann_version(torch_npu)}
    return compiled_by(cache_compile, part, num_seqs, entry=entry, facts=facts)


def compiler_config(torchair: Any, options: GeOptions, fusion_file: Path) -> Any:
    """torchair's record of the options. ``fusion_file`` is written: the engine reads there which passes are off."""
    switches = {"Switch": {"GraphFusion": dict.fromkeys(options.no_fusions, "off"), "UBFusion": {}}}
    fusion_file.write_text(json.dumps(switches, indent=1), encoding="utf-8")
    config = torchair.CompilerConfig()
    experimental, ge = config.experimental_config, config.ge_config
    experimental.frozen_parameter = options.frozen_parameter
    experimental.tiling_schedule_optimize = options.tiling_schedule_optimize
    experimental.topology_sorting_strategy = options.topology_sorting_strategy
    experimental.keep_inference_input_mutations = options.keep_inference_input_mutations
    ge.enable_single_stream = options.enable_single_stream
    ge.oo_level = options.oo_level
    config.fusion_config.fusion_switch_file = str(fusion_file)
    return config


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        text = f"engine.exe_mode=ge_graph: needs {name} on this machine"
        raise ConfigError(text, param="engine.exe_mode") from error
