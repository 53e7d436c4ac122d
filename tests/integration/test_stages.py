"""The stages of a decode step as they are measured, on a smaller model: every configuration says the same tokens.

The regression test of the path: slow twins and fused operators, tensors split and experts split, eager and compiled.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from longcat_pd.bench import stages
from longcat_pd.bench.stages import STAGES, Load, Stage
from longcat_pd.tiny.make import write_tiny
from tests.ports import free_base

LOAD = Load(rounds=1, length=20, num_tokens=6)
EAGER = [stage for stage in STAGES if not stage.is_compiled]
COMPILED = [stage for stage in STAGES if stage.is_compiled]
FUSED = replace(EAGER[-1], name="all fused, eager", unfused=())


async def replayed(folder: Path, path: list[Stage]) -> None:
    write_tiny(folder / "m", "lite", dtype="float32", overrides=["num_layers=1"], with_tokenizer=False)
    async with AsyncExitStack() as stack:
        port = free_base(stages.PORTS_EACH * len(path))
        engines = await stages.started(stack, folder / "m", path, folder=folder, port=port)
        times = await stages.replay(engines, LOAD)
    assert {name: len(found) for name, found in times.items()} == {stage.name: LOAD.rounds for stage in path}
    assert all(step_s > 0 for found in times.values() for step_s in found)


async def test_stages_without_a_compiler(tmp_path: Path) -> None:
    await replayed(tmp_path, [*EAGER, FUSED])


@pytest.mark.slow
async def test_compiled_stages_say_what_the_first_one_does(tmp_path: Path) -> None:
    await replayed(tmp_path, [EAGER[0], *COMPILED])
