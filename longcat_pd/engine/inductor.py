"""exe_mode ``inductor``: parts of the decode step, each as one graph of torch's own compiler, made ahead or from the cache.

A part is traced once as a function of all its tensors (weights, cache, state) and compiled for one number of sequences;
nothing is guarded or compiled again afterwards. A graph from the cache is neither traced nor compiled. Imported when the
mode is chosen, because the compiler takes seconds and a hundred megabytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import standalone_compile
from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir
from torch._inductor.standalone_compile import CompiledArtifact
from torch.fx.experimental.proxy_tensor import make_fx

from longcat_pd.engine.compile_cache import CacheEntry
from longcat_pd.engine.step_parts import StepPart
from longcat_pd.errors import ConfigError

# a pool of workers would outlive the compilation
_OPTIONS: dict[str, Any] = {"compile_threads": 1, "cpp.cxx": ("g++",)}
_GRAPH = "graph"
_WORKSHOP = "longcat_pd-"

Place = tuple[dict[str, Any], str]
Form = Callable[..., tuple[Tensor, ...]]


def compiled(part: StepPart, num_seqs: int, entry: CacheEntry) -> tuple[Form, bool]:
    """A part of the step for ``num_seqs`` slots as one graph, and whether it had to be compiled.

    Raises:
        ConfigError: there is no C++ compiler, or the cache's folder cannot be written.
    """
    places = list(_places(part))
    tensors: list[Tensor] = [store[name] for store, name in places]
    entry = replace(entry, facts={**entry.facts, **_versions(), "tensors": _described(tensors)})
    entry.open_folder()
    with _workshop() as folder:
        is_new = not entry.unpack(folder)
        if is_new:
            entry.probe()
            shutil.rmtree(folder)  # parts of a graph that is no good
            folder.mkdir()
            graph = _compile(part, places, [*tensors, *part.examples(num_seqs)])
            graph.save(path=str(folder / _GRAPH), format="binary")
            entry.pack(folder)
        else:
            graph = CompiledArtifact.load(path=str(folder / _GRAPH), format="binary")

    def run(*arguments: Tensor) -> tuple[Tensor, ...]:
        return tuple(graph(*tensors, *arguments))

    return run, is_new


def _compile(part: nn.Module, places: list[Place], example: list[Any]) -> CompiledArtifact:
    num_kept = len(places)

    def flat(*tensors: Tensor) -> object:
        with _placed(places, tensors[:num_kept]):
            return part(*tensors[num_kept:])

    with torch.no_grad():
        graph = make_fx(flat, tracing_mode="fake")(*example)
        constants = [node.target for node in graph.graph.nodes if node.op == "get_attr"]
        assert not constants, f"tensors that are in no module: {constants}"
        return standalone_compile(graph, example, aot=True, donate_graph_module=True, options={"config_patches": _OPTIONS})


@contextlib.contextmanager
def _workshop() -> Iterator[Path]:
    """A folder for everything that the compiler writes and reads. What was loaded from it stays when it is gone.

    Folders of processes that were killed before they could remove theirs go first.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_WORKSHOP}[0-9]*-*"):
        if not Path("/proc", left.name.removeprefix(_WORKSHOP).partition("-")[0]).exists():
            shutil.rmtree(left, ignore_errors=True)  # of another user, perhaps
    with tempfile.TemporaryDirectory(prefix=f"{_WORKSHOP}{os.getpid()}-") as name, temporary_cache_dir(name):
        yield Path(name)


def _places(step: nn.Module) -> Iterator[Place]:
    """Where the tensors of a module and its parts are kept, in a fixed order; a shared part once."""
    for module in step.modules():
        for store in (module._parameters, module._buffers):
            yield from ((store, name) for name, tensor in store.items() if tensor is not None)


@contextlib.contextmanager
def _placed(places: list[Place], tensors: tuple[Tensor, ...]) -> Iterator[None]:
    """These tensors in their places for a while."""
    before = [store[name] for store, name in places]
    try:
        for (store, name), tensor in zip(places, tensors, strict=True):
            store[name] = tensor
        yield
    finally:
        for (store, name), old in zip(places, before, strict=True):
            store[name] = old


def _described(tensors: list[Tensor]) -> str:
    return " ".join(f"{str(t.dtype).removeprefix('torch.')}{tuple(t.shape)}{t.stride()}" for t in tensors)


def _versions() -> dict[str, str]:
    """What a graph depends on beside the product."""
    try:
        answer = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, check=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError("engine.exe_mode=inductor: needs g++ on this machine", param="engine.exe_mode") from error
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "compiler": answer.stdout.strip(),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_processor_flags()}",
        "options": f"{_OPTIONS}, {torch.get_num_threads()} threads",
    }


def _processor_flags() -> str:
    """Digest of what the processor can do: kernels are made for this very one."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return hashlib.sha256(
        next((line for line in lines if line.startswith(("flags", "Features"))), "").encode()
    ).hexdigest()[:8]
