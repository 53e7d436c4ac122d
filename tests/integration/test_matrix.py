"""The promise of the decode step, through HTTP and rank processes: one text, whatever drafts, compiles, decodes or waits.

{0, 1, 2, 3 drafts} x {eager, inductor} x {standalone, P(2, 2) -> D(kvp 2)} x {fp32, int8 against int8}, each asked one by
one, three at a time, and eight at a time that join and leave; against one eager engine without drafts that answers one
after the other. The default suite takes what needs no compiler and has no other test; the rest is slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from longcat_pd.config import resolve
from longcat_pd.quantize import quantize
from tests.parity.conftest import MakeCheckpoint
from tests.topology import BLOCK, Topology, cluster_file, pools, standalone

SLOTS = 8  # the only size that is compiled
TOPK = 48
LENGTHS = (1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 1, TOPK - 4, TOPK, TOPK + 1, 70)
CROWDS = (1, 3, SLOTS)

Answers = list[dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """One place of the matrix."""

    drafts: int
    mode: Literal["eager", "inductor"]
    where: Literal["alone", "pair"]
    weights: Literal["fp32", "int8"]

    def __str__(self) -> str:
        return f"{self.drafts}-{self.mode}-{self.where}-{self.weights}"


OFTEN = {Cell(0, "eager", "alone", "fp32"), Cell(3, "eager", "alone", "fp32"), Cell(3, "eager", "pair", "int8")}
CELLS = [
    Cell(drafts, mode, where, weights)
    for mode in ("eager", "inductor")
    for weights in ("fp32", "int8")
    for where in ("alone", "pair")
    for drafts in (0, 1, 2, 3)
]


def cases() -> list[dict[str, Any]]:
    """Greedy and drawn; of lengths that make sequences leave at different times."""
    draw, found = random.Random(23), []
    for number, length in enumerate(LENGTHS):
        prompt = [draw.randrange(32, 1000) for _ in range(length)]
        found.append({"prompt": prompt, "max_tokens": 4 + number % 7, "logprobs": 1})
        sampled = {"temperature": 0.8, "top_p": 0.9, "seed": number}
        found.append({"prompt": prompt, "max_tokens": 10 - number % 7, "logprobs": 1, **sampled})
    return found


async def ask(topology: Topology, at_once: int) -> Answers:
    """The next one begins as soon as one has ended."""
    free = asyncio.Semaphore(at_once)

    async def one(case: dict[str, Any]) -> dict[str, Any]:
        async with free:
            return await topology.complete(**case)

    return list(await asyncio.gather(*map(one, cases())))


def assert_same(found: Answers, expected: Answers) -> None:
    for case, one, other in zip(cases(), found, expected, strict=True):
        which = f"prompt of {len(case['prompt'])}, {case.get('temperature', 0)}"
        assert one["token_ids"] == other["token_ids"], which
        assert one["finish_reason"] == other["finish_reason"], which
        for name in ("prompt_tokens", "completion_tokens"):  # how many were cached depends on who asked before
            assert one["usage"][name] == other["usage"][name], which
        wanted = pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-4)
        assert one["logprobs"]["token_logprobs"] == wanted, which


@contextlib.asynccontextmanager
async def topology_of(cell: Cell, model: Path, folder: Path, graphs: Path) -> AsyncIterator[Topology]:
    engine: dict[str, Any] = {"num_draft_tokens": cell.drafts}
    decode = {**engine, "max_num_seqs": SLOTS}
    if cell.mode == "inductor":
        decode |= {"exe_mode": "inductor", "buckets": [SLOTS], "compile_cache": str(graphs)}
    if cell.where == "alone":
        settings = [f"engine.{name}={value}" for name, value in decode.items()]
        async with standalone(model, "model.dtype=float32", *settings) as topology:
            yield topology
        return
    path = cluster_file(
        folder,
        model,
        prefill={"pp_size": 2, "cp_size": 2},
        decode={"kvp_size": 2, "attn_tp_size": 2},
        prefill_engine=engine,
        decode_engine=decode,
        transfer={"digest": "all"},
    )
    async with pools(resolve.load(path, ["model.dtype=float32"])) as topology:
        yield topology


@pytest.fixture(scope="module")
def models(tiny: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    plain = tiny("2.0+predictable")
    int8 = tmp_path_factory.mktemp("int8") / "m"
    quantize(plain, int8)
    return {"fp32": plain, "int8": int8}


_expected: dict[Path, Answers] = {}


async def expected_of(model: Path) -> Answers:
    if model not in _expected:
        async with standalone(model, "model.dtype=float32") as topology:
            _expected[model] = await ask(topology, 1)
    return _expected[model]


@pytest.mark.parametrize("cell", [pytest.param(c, id=str(c), marks=() if c in OFTEN else pytest.mark.slow) for c in CELLS])
async def test_one_text(cell: Cell, models: dict[str, Path], tmp_path: Path, graphs: Path) -> None:
    model = models[cell.weights]
    expected = await expected_of(model)
    async with topology_of(cell, model, tmp_path, graphs) as topology:
        for at_once in CROWDS:
            assert_same(await ask(topology, at_once), expected)
        await topology.idle_within()


async def test_the_matrix_tells_texts_apart(models: dict[str, Path]) -> None:
    """A control: the two checkpoints do not say the same, and a seed matters."""
    plain, int8 = [await expected_of(models[name]) for name in ("fp32", "int8")]
    assert [answer["token_ids"] for answer in plain] != [answer["token_ids"] for answer in int8]
    assert plain[0]["token_ids"][:4] != plain[1]["token_ids"][:4] or plain[2]["token_ids"][:4] != plain[3]["token_ids"][:4]
