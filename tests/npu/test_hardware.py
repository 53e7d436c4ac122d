"""For who has a card: each operator against its CPU kernel, and the product's steps, streams, graphs and groups.

    make test-hardware

Without a card every test is skipped and says what was not shown. Two cards are needed where it says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longcat_pd import kernels
from longcat_pd.config.schema import ParallelConfig
from longcat_pd.quantize import quantize
from tests.compiled import Said, with_engine
from tests.npu.cards import (
    SLOTS,
    answers,
    answers_of_cpu_kernels,
    cards,
    check_answers,
    check_exchange,
    exchanged,
    fused_on_cards,
    in_processes,
    specs_on,
)
from tests.npu.case import Case, compare, run
from tests.npu.cases import CASES, FUSED, FUSED_RULES, FusedCase
from tests.npu.device import install
from tests.npu.kernels.refusals import FRACTAL_NZ
from tests.npu.on_threads import fused_on_threads
from tests.npu.widths import WIDTHS
from tests.parity.conftest import MakeCheckpoint

pytestmark = [pytest.mark.npu, pytest.mark.filterwarnings("ignore")]  # warnings of torch_npu are its own
CARD = "npu:0"
MakeModel = Callable[..., Path]


def needed(count: int, what: str) -> None:
    """Skips the test where there are fewer cards; ``what`` would have been shown."""
    there, why = cards()
    if there < count:
        reason = why if not there else f"there is {there} card, this takes {count} and HCCL"
        pytest.skip(f"NOT SHOWN: {what} ({reason})")
    api: Any = torch
    api.npu.config.allow_internal_format = True
    api.npu.set_device(CARD)
    install()


@pytest.fixture
def model(tiny: MakeCheckpoint, tmp_path: Path) -> MakeModel:
    def make(variant: str, *, is_int8: bool = False) -> Path:
        plain = tiny(variant, *WIDTHS[variant])
        if is_int8:
            quantize(plain, tmp_path / "int8")
        return tmp_path / "int8" if is_int8 else plain

    return make


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operator(case: Case) -> None:
    needed(1, f"that a card computes {case.operator} ({case.name}) as the CPU kernel does")
    if case.operator not in install().computed:
        pytest.skip(f"NOT SHOWN: {case.operator} (this release of torch_npu does not have it)")
    arguments = case.arguments()
    compare(case, run(case, arguments, CARD), run(case, arguments), arguments)


@pytest.mark.parametrize("case", FUSED, ids=str)
def test_fused_dispatch_and_combine(case: FusedCase, model: MakeModel) -> None:
    needed(2, f"that two cards exchange rows by fused dispatch and combine ({case.name}) as the CPU kernels do")
    pair = ParallelConfig(kvp_size=2, attn_tp_size=2, ep_size=2, moe_dispatch="fused")
    found, wanted = in_processes(specs_on("npu", model("chat"), pair), fused_on_cards, case), fused_on_threads(case)
    for rank in range(case.world):
        for name, rule in FUSED_RULES[case.quant_mode].items():
            rule.check(found[rank][name], wanted[rank][name], {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=["bf16", "int8"])
def test_weights_are_in_the_matrix_units_format(dtype: torch.dtype) -> None:
    needed(1, "that npu_format_cast really makes FRACTAL_NZ, which is off unless allow_internal_format is set")
    weight = torch.ones(64, 128, dtype=dtype)
    cast = torch.ops.npu.npu_format_cast(weight.to(CARD), FRACTAL_NZ)
    assert torch.ops.npu.get_npu_format(cast) == FRACTAL_NZ
    assert torch.equal(cast.cpu(), weight)


@pytest.mark.parametrize("is_int8", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize(("variant", "num_drafts"), [("2.0", 0), ("2.0", 3), ("lite-sparse", 3), ("lite", 0), ("chat", 3)])
def test_whole_steps(model: MakeModel, variant: str, is_int8: bool, num_drafts: int) -> None:
    needed(1, f"that layers of {variant}, prompts and decode steps, say on a card what the same table says on CPU")
    path = model(variant, is_int8=is_int8)
    check_answers(on_card(path, num_drafts=num_drafts), on_cpu(path, num_drafts))


def test_experts_beside_attention(model: MakeModel) -> None:
    needed(1, "that experts on a stream of their own change nothing, and that the streams wait for each other")
    ops = kernels.load("npu", npu=kernels.NpuSettings(is_overlapped=True, is_prefetched=True))
    draw = torch.Generator().manual_seed(1)
    left, right = (torch.randn(1024, 1024, generator=draw).to(CARD) for _ in range(2))
    for _ in range(50):  # each round reads what both streams wrote in the one before
        side, main = ops.overlap(lambda x=left: squared(x), lambda x=right: -squared(x))
        torch.testing.assert_close(side, squared(left), rtol=0.02, atol=0.02)  # fewer cores may add in another order
        torch.testing.assert_close(main, -squared(right), rtol=0.02, atol=0.02)
        left, right = main, side
    path = model("2.0")
    check_answers(on_card(path, num_drafts=3, is_moe_overlapped=True, is_prefetched=True), on_card(path, num_drafts=3))


@pytest.mark.parametrize("variant", ["2.0", "chat"])
def test_the_graph_of_a_step(model: MakeModel, tmp_path: Path, variant: str) -> None:
    needed(1, f"that the graph engine compiles the decode step of {variant}, and that its graph says what eager steps say")
    path, folder = model(variant), tmp_path / "graphs"
    graphs = {"exe_mode": "ge_graph", "buckets": (SLOTS,), "compile_cache": str(folder)}
    check_answers(on_card(path, num_drafts=3, engine=graphs), on_card(path, num_drafts=3))
    assert any(file.is_file() for file in folder.rglob("*")), "nothing was compiled"
    check_answers(on_card(path, num_drafts=3, engine=graphs), on_card(path, num_drafts=3))  # from the cache


def test_collectives_and_messages(model: MakeModel) -> None:
    needed(2, "that the collectives and messages of the product run over HCCL")
    pair = ParallelConfig(kvp_size=2, attn_tp_size=2)
    check_exchange(in_processes(specs_on("npu", model("chat"), pair), exchanged))


@pytest.mark.parametrize("dispatch", ["gather", "all_to_all", "fused"])
def test_two_cards(model: MakeModel, dispatch: str) -> None:
    needed(2, f"that two cards which share keys and experts ({dispatch}) say what one card says")
    pair = ParallelConfig(kvp_size=2, attn_tp_size=2, ep_size=2, moe_dispatch=dispatch)  # type: ignore[arg-type]
    path = model("2.0")
    found = in_processes(specs_on("npu", path, pair, 3), answers)[0]
    check_answers(found, on_card(path, num_drafts=3))


def squared(x: Tensor) -> Tensor:
    """As large as ``x``, round after round."""
    return torch.tanh(x @ x / x.square().mean() / 32)


def on_cpu(path: Path, num_drafts: int = 0) -> list[Said]:
    return in_processes(specs_on("cpu", path, num_drafts=num_drafts), answers_of_cpu_kernels)[0]


def on_card(path: Path, *, num_drafts: int = 0, engine: dict[str, Any] | None = None, **npu: bool) -> list[Said]:
    spec = with_engine(specs_on("npu", path, num_drafts=num_drafts)[0], **(engine or {}))
    if npu:
        instance = spec.instance
        spec = replace(spec, instance=replace(instance, npu=replace(instance.npu, **npu)))
    return in_processes([spec], answers)[0]
