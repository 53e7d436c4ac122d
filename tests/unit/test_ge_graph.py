"""engine/ge_graph.py, npugraph_ex.py and device_graph.py with a compiler of a few lines: what is asked of it, under which
names and in which folder, what a graph depends on, and which folders are refused."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from longcat_pd.engine import ge_graph, npugraph_ex
from longcat_pd.engine.compile_cache import CacheEntry
from longcat_pd.engine.ge_graph import GeOptions
from longcat_pd.engine.step_parts import Plain
from longcat_pd.errors import ConfigError


class Step(nn.Module):
    """A step of one weight, which says whether it was run as the engine runs it."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width), requires_grad=False)
        self.state = SimpleNamespace(padding=9, recent=torch.zeros((2, 1), dtype=torch.int64))
        self.calls: list[tuple[list[int], bool]] = []

    def plain(self, slots: Tensor, lengths: tuple[int, ...], num_candidates: int) -> tuple[Tensor, Tensor, Tensor]:
        assert lengths == ()
        self.calls.append((slots.tolist(), torch.is_inference_mode_enabled()))
        return slots, slots + 1, slots + 2


class Compiler:
    """Stands for ``cache_compile``: keeps a file for each method, and finds it again by class and name alone."""

    def __init__(self) -> None:
        self.asked: list[tuple[MethodType, dict[str, Any]]] = []
        self.compiled: list[str] = []

    def __call__(self, method: MethodType, **options: Any) -> Callable[..., Any]:
        self.asked.append((method, options))

        def form(*arguments: Tensor) -> Any:
            file = Path(options["cache_dir"], type(method.__self__).__name__, method.__name__, "compiled_module")
            if not file.exists():
                self.compiled.append(method.__name__)
                file.parent.mkdir(parents=True)
                file.write_text("")
            return method(*arguments)

        return form


def config() -> SimpleNamespace:
    parts = ("experimental_config", "ge_config", "fusion_config")
    return SimpleNamespace(**{part: SimpleNamespace() for part in parts})


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    made = Compiler()
    versions = SimpleNamespace(get_cann_version=lambda: "8.5.0")
    inference = SimpleNamespace(cache_compile=made)
    torchair: Any = ModuleType("torchair")
    torchair.CompilerConfig, torchair.inference = config, inference
    torch_npu: Any = ModuleType("torch_npu")
    torch_npu.__version__, torch_npu.npu = "2.13.0", SimpleNamespace(utils=versions)
    captured: Any = ModuleType("torch_npu.npu.npugraph_ex.inference")
    captured.cache_compile = made
    names = ("torchair", "torch_npu", "torch_npu.npu", "torch_npu.npu.npugraph_ex", captured.__name__)
    for name, module in zip(names, (torchair, torch_npu, torch_npu, torch_npu, captured), strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    with torch._dynamo.config.patch(error_on_recompile=False):
        yield made


BOTH = pytest.mark.parametrize("mode", [ge_graph, npugraph_ex])


def part(step: Step | None = None) -> Plain:
    return Plain(cast(Any, step or Step()))


def entry(folder: Path, num_seqs: int = 4, **facts: str) -> CacheEntry:
    return CacheEntry(folder, f"m-seqs{num_seqs}", {"code": "0", **facts})


@BOTH
def test_a_part_is_run_once_as_it_will_be(mode: Any, compiler: Compiler, tmp_path: Path) -> None:
    step = Step()
    form, is_new = mode.compiled(part(step), 4, entry(tmp_path))
    assert is_new and step.calls == [([9] * 4, True)] and compiler.compiled == ["decode_4_plain"]
    with torch.inference_mode():
        assert [found.tolist() for found in form(torch.tensor([1, 2, 3, 9]))] == [
            [1, 2, 3, 9],
            [2, 3, 4, 10],
            [3, 4, 5, 11],
        ]
    assert compiler.compiled == ["decode_4_plain"]


@BOTH
def test_a_method_has_a_name_and_code_of_its_own(mode: Any, compiler: Compiler, tmp_path: Path) -> None:
    plain = part()
    for num_seqs in (4, 8):
        mode.compiled(plain, num_seqs, entry(tmp_path, num_seqs))
    (four, _), (eight, _) = compiler.asked
    assert (four.__name__, eight.__name__) == ("decode_4_plain", "decode_8_plain")
    assert four.__func__.__code__.co_name == "decode_4_plain" and four.__func__.__code__ != eight.__func__.__code__
    assert four.__self__ is plain and four.__func__.__code__.co_code == Plain.forward.__code__.co_code


@BOTH
def test_what_is_kept_is_found_again_and_anything_else_is_made_anew(mode: Any, compiler: Compiler, tmp_path: Path) -> None:
    """The compiler would find a graph of other shapes or other code under the same name."""
    assert mode.compiled(part(), 4, entry(tmp_path))[1]
    (first,) = tmp_path.iterdir()
    assert not mode.compiled(part(), 4, entry(tmp_path))[1]
    for other, facts in ((part(Step(5)), {}), (part(), {"code": "1"}), (part(), {"model": "n"})):
        assert mode.compiled(other, 4, entry(tmp_path, **facts))[1]
        (folder,) = tmp_path.iterdir()
        assert folder != first, "and what was there before is gone"
    assert compiler.compiled == ["decode_4_plain"] * 4
    assert mode.compiled(part(), 8, entry(tmp_path, 8))[1] and len([*tmp_path.iterdir()]) == 2


@BOTH
@pytest.mark.parametrize("version", ["torch_npu", "cann", "torch"])
def test_versions_are_facts(
    mode: Any, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    mode.compiled(part(), 4, entry(tmp_path))
    torch_npu = sys.modules["torch_npu"]
    places: dict[str, tuple[Any, str, Any]] = {
        "torch_npu": (torch_npu, "__version__", "2.13.1"),
        "cann": (torch_npu.npu.utils, "get_cann_version", lambda: "8.6.0"),
        "torch": (torch, "__version__", "2.13.9"),
    }
    monkeypatch.setattr(*places[version])
    assert mode.compiled(part(), 4, entry(tmp_path))[1]


def test_options_reach_the_engine(compiler: Compiler, tmp_path: Path) -> None:
    ge_graph.compiled(part(), 4, entry(tmp_path))
    (_, asked), (folder,) = compiler.asked[0], tmp_path.iterdir()
    assert (asked["dynamic"], asked["fullgraph"], asked["ge_cache"]) == (False, True, True)
    assert asked["cache_dir"] == str(folder)
    made = asked["config"]
    assert vars(made.experimental_config) == {
        "frozen_parameter": True,
        "tiling_schedule_optimize": True,
        "topology_sorting_strategy": "StableRDFS",
        "keep_inference_input_mutations": True,
    }
    assert vars(made.ge_config) == {"enable_single_stream": False, "oo_level": "O3"}
    switches = json.loads(Path(made.fusion_config.fusion_switch_file).read_text())
    assert switches == {"Switch": {"GraphFusion": {"InplaceAddRmsNormFusionPass": "off"}, "UBFusion": {}}}
    assert torch._dynamo.config.error_on_recompile
    assert ge_graph.compiled(part(), 4, entry(tmp_path), GeOptions(oo_level="O1"))[1], "options are facts"


def test_options_reach_the_capture(compiler: Compiler, tmp_path: Path) -> None:
    npugraph_ex.compiled(part(), 4, entry(tmp_path))
    (_, asked) = compiler.asked[0]
    assert asked.pop("cache_dir").startswith(str(tmp_path))
    options = {"frozen_parameter": True, "static_kernel_compile": False, "super_kernel_optimize": False}
    assert asked == {"dynamic": False, "options": options}


@BOTH
@pytest.mark.parametrize("mode_of_folder", [0o777, 0o770, 0o702])
@pytest.mark.parametrize("is_inner", [False, True])
def test_a_folder_that_others_can_write_to_is_refused(
    mode: Any, compiler: Compiler, tmp_path: Path, mode_of_folder: int, is_inner: bool
) -> None:
    """What lies there would be executed."""
    cache = tmp_path / "c"
    mode.compiled(part(), 4, entry(cache))
    (folder,) = cache.iterdir()
    assert [path.stat().st_mode & 0o777 for path in (cache, folder)] == [0o700, 0o700]
    (folder if is_inner else cache).chmod(mode_of_folder)
    with pytest.raises(ConfigError, match="writable by nobody else") as caught:
        mode.compiled(part(), 4, entry(cache))
    assert caught.value.param == "engine.compile_cache"


@BOTH
def test_a_folder_of_somebody_else_is_refused(
    mode: Any, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode.compiled(part(), 4, entry(tmp_path))
    uid = os.getuid() or 1
    os.chown(tmp_path, uid, -1) if not os.getuid() else None
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(ConfigError, match="must be this user's"):
        mode.compiled(part(), 4, entry(tmp_path))


@BOTH
def test_a_machine_without_the_compiler(mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchair", "torch_npu"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"engine\.exe_mode=\w+: needs (torchair|a torch_npu)") as caught:
        mode.compiled(part(), 4, entry(tmp_path / "c"))
    assert caught.value.param == "engine.exe_mode" and not (tmp_path / "c").exists()
