"""torchair's cache of compiled methods: what its key leaves out, which the product's folder name therefore has to say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.npu.offline.capture import graph_of
from tests.npu.offline.real import torchair
from tests.npu.offline.shapes import empty, fake


def silu_step() -> torch.nn.Module:
    class Step(torch.nn.Module):
        def decode(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.silu(x)

    return Step()


def sigmoid_step() -> torch.nn.Module:
    class Step(torch.nn.Module):
        def decode(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(x)

    return Step()


def nodes(make: Callable[[], torch.nn.Module], folder: Path, rows: int = 4, config: Any = None) -> set[str]:
    """The node types that a new process would run from this folder, compiling what is not there."""
    return nodes_of(make, folder, torch.zeros(rows, 8), config)


def nodes_of(make: Callable[[], torch.nn.Module], folder: Path, x: torch.Tensor, config: Any = None) -> set[str]:
    torch._dynamo.reset()
    cached = torchair.inference.cache_compile(
        make().decode,
        config=config or torchair.CompilerConfig(),
        dynamic=False,
        cache_dir=str(folder),
        fullgraph=True,
        ge_cache=False,
    )
    return set(graph_of(cached, x).histogram()) - {"Data", "NetOutput"}


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_file_is_written_before_the_engine_compiles(tmp_path: Path) -> None:
    assert nodes(silu_step, tmp_path) == {"Swish"}
    (file,) = files(tmp_path)
    assert (file.name, file.parent.name) == ("compiled_module", "decode")
    assert file.parents[1].name.startswith("Step_static_")
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_method_on_tensors_of_the_npu_is_compiled_and_loaded(tmp_path: Path) -> None:
    with fake():
        assert nodes_of(silu_step, tmp_path, empty(4, 8)) == {"Swish"}
        assert nodes_of(silu_step, tmp_path, empty(4, 8)) == {"Swish"}
    assert len(files(tmp_path)) == 1


def test_the_key_does_not_hold_the_code_of_the_method(tmp_path: Path) -> None:
    assert nodes(silu_step, tmp_path) == {"Swish"}
    assert nodes(sigmoid_step, tmp_path) == {"Swish"}  # another body, and the first one's graph
    assert nodes(sigmoid_step, tmp_path / "another") == {"Sigmoid"}


def test_the_key_does_not_hold_the_shapes(tmp_path: Path) -> None:
    nodes(silu_step, tmp_path)
    before = files(tmp_path)
    with pytest.raises(AssertionError, match="expected size 8==4"):
        nodes(silu_step, tmp_path, rows=8)
    assert files(tmp_path) == before


def test_the_key_holds_the_options(tmp_path: Path) -> None:
    config = torchair.CompilerConfig()
    config.experimental_config.topology_sorting_strategy = "StableRDFS"
    nodes(silu_step, tmp_path)
    nodes(silu_step, tmp_path, config=config)
    assert len(files(tmp_path)) == 2
