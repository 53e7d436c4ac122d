"""Released models at full width and depth, in the layouts that they are served with, on the release's own shape functions.

What they give has the shapes and types of the reference table; what they launch, exchange and ask the host for is what is
written down here and in `launches.txt`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from longcat_pd.engine.sampler import SamplingRows, drawn
from longcat_pd.kernels import Ops
from longcat_pd.parallel.mesh import Mesh
from tests.npu.offline.full_size import (
    GREEDY,
    POOLS,
    Pool,
    Seen,
    build,
    chunk,
    decode_step,
    lists,
    on,
    rank_of,
    reference_ops,
    static,
)
from tests.npu.offline.kept import check_kept, wrapped
from tests.npu.offline.shapes import fake

LAUNCHES = Path(__file__).with_name("launches.txt")
Run = Callable[[Ops, str, str], tuple[Seen, tuple[Tensor, ...]]]
Spans = tuple[tuple[int, int, bool], ...]

# rows of a plan: a chunk of a long prompt; a whole chunk of several, of which some end; one that ends within a block
LONG: Spans = ((131072 - 16384, 131072, True),)
LONGER: Spans = ((262144 - 16384, 262144, True),)
FIRST: Spans = ((0, 16384, False),)
MIXED: Spans = ((0, 1000, True), (65536, 65536 + 8192, False), (0, 130, True), (3840, 3840 + 6500, True))
SHORT: Spans = ((0, 700, True),)
ONE_BLOCK: Spans = ((0, 5, True),)


def shapes(tensors: tuple[Tensor, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(x.shape), x.dtype) for x in tensors]


def compared(pool: Pool, mesh: Mesh, run: Run) -> tuple[Seen, Counter[str]]:
    """Runs with the product's table and with the reference; what both give and exchange is the same."""
    with fake(pool.soc), torch.no_grad():
        with lists() as asked, mesh.traffic.noted() as note:
            seen, found = run(static(pool.ops("eager")), "npu", "")
        assert {x.device.type for x in found} == {"npu"}
        is_fused = pool.parallel.moe_dispatch == "fused"
        with mesh.traffic.noted() as wanted_note:
            wanted_seen, wanted = run(static(reference_ops()), "cpu", "gather" if is_fused else "")
    assert shapes(found) == shapes(wanted)
    for (name, one), (other, expected) in zip(seen.returned, wanted_seen.returned, strict=True):
        assert name == other
        if name.endswith("router"):  # ids are int32 where the operator makes them
            one, expected = tuple(s for s, _ in one), tuple(s for s, _ in expected)  # type: ignore[misc]
        assert one == expected, name
    if not is_fused:
        assert note.kinds == wanted_note.kinds and note.sent_bytes == wanted_note.sent_bytes
    return seen, asked


def prompt(pool: Pool, mesh: Mesh, spans: Spans) -> Run:
    """The rank's part of a plan of prompts, first tokens included."""
    inputs = chunk(pool, mesh, *spans)
    num_outputs = inputs.outputs.num

    def run(ops: Ops, device: str, moe_dispatch: str) -> tuple[Seen, tuple[Tensor, ...]]:
        model = build(pool, mesh, ops, device=device, moe_dispatch=moe_dispatch)
        x = on(device, inputs)
        rows = SamplingRows.of([GREEDY] * num_outputs, torch.device(device))
        positions = torch.empty(num_outputs, dtype=torch.int64, device=device)
        rows_here = len(x.token_ids) if not x.rows.is_split else x.rows.share
        hidden = torch.empty(rows_here, pool.config.hidden_size, dtype=torch.bfloat16, device=device)
        is_first = mesh.axis("pp").rank == 0
        with Seen(model) as seen:
            out = model.forward(x, None if is_first else hidden, None)
            if model.head is None or not x.outputs.share:
                return seen, (out,)
            with seen.part("final norm"):
                final = model.final(out, x)
            with seen.part("first tokens"):
                more = {"rows": rows, "positions": positions, "ops": ops}
                tokens = drawn(model, final, x.outputs, num_candidates=int(model.has_split_head), **more)
        return seen, (out, final, *tokens)

    return run


def window(pool: Pool, mesh: Mesh, num_candidates: int, *, has_edits: bool = False) -> Run:
    """A decode step as it stands, of all slots of a group at their full length."""

    def run(ops: Ops, device: str, moe_dispatch: str) -> tuple[Seen, tuple[Tensor, ...]]:
        model = build(pool, mesh, ops, device=device, moe_dispatch=moe_dispatch)
        step = decode_step(pool, mesh, model, ops, device=device)
        slots = torch.arange(step.state.shape.num_slots, device=device)
        lengths = (pool.max_model_len,) * len(slots)
        with Seen(model) as seen:
            with seen.part("drafts"):
                line = step.line(slots, lengths)
            masks = step.masks(slots, line, is_any_bound=False) if has_edits else None
            with seen.part("verification"):
                found = step.verify(slots, line, masks, lengths=lengths, num_candidates=num_candidates)
        return seen, (line, *found)

    return run


PROMPTS: list[tuple[str, int, str, Spans]] = [
    *(("2.0 prefill", rank, "a chunk up to 128 Ki", LONG) for rank in (0, 29, 63)),
    ("2.0 prefill", 29, "a chunk up to 256 Ki", LONGER),
    ("2.0 prefill", 0, "a first chunk", FIRST),
    *(("2.0 prefill", rank, "four prompts", MIXED) for rank in (0, 63)),
    *(("2.0 prefill", rank, "a short prompt", SHORT) for rank in (0, 63)),
    *(("2.0 prefill", rank, "one block, no rows here", ONE_BLOCK) for rank in (1, 57)),
    *(("2.0 bf16 prefill", rank, "a chunk up to 128 Ki", LONG) for rank in (0, 29, 63)),
    ("chat 32 A2", 13, "two prompts", ((0, 2304, True),) * 2),
    *(("lite 8 A2", rank, "a prompt", ((0, 1024, True),)) for rank in (0, 6)),
    ("lite 8tp A3", 3, "a prompt", ((0, 1024, True),)),
    ("lite 16 int8 A3", 9, "four prompts", ((0, 256, True),) * 4),
]


@pytest.mark.parametrize(("name", "rank", "what", "spans"), PROMPTS, ids=lambda x: x if isinstance(x, str) else None)
def test_prompts(name: str, rank: int, what: str, spans: Spans) -> None:
    """All of it is queued without a look at what was computed, except dense attention's lengths."""
    pool = POOLS[name]
    with rank_of(pool, rank) as mesh:
        seen, asked = compared(pool, mesh, prompt(pool, mesh, spans))
    assert not seen.crossings
    check_kept(LAUNCHES, {f"{name}, rank {rank}: {what}": described(seen, asked)})


WINDOWS: list[tuple[str, int]] = [
    *((f"2.0 decode {soc}", rank) for soc, rank in (("A2", 0), ("A2", 77), ("A3", 77))),
    ("2.0 bf16 decode A3", 77),
    *((f"chat 32 {soc}", 13) for soc in ("A2", "A3")),
    *((f"lite 8 {soc}", 6) for soc in ("A2", "A3")),
    ("lite 8tp A3", 3),
    ("lite 16 int8 A3", 9),
]


@pytest.mark.parametrize(("name", "rank"), WINDOWS)
def test_decode_step(name: str, rank: int) -> None:
    pool = POOLS[name]
    with rank_of(pool, rank) as mesh:
        seen, asked = compared(pool, mesh, window(pool, mesh, 1))
    assert not seen.crossings
    check_kept(LAUNCHES, {f"{name}, rank {rank}: decode, best tokens": described(seen, asked)})


@pytest.mark.parametrize("name", ["2.0 decode A3", "lite 8 A2"])
def test_decode_step_that_samples_and_edits(name: str) -> None:
    pool = POOLS[name]
    with rank_of(pool, 1) as mesh:
        seen, _ = compared(pool, mesh, window(pool, mesh, 0, has_edits=True))
    assert seen.crossings == {"cpu -> npu": 1}, "the bits of a word of a mask"


def described(seen: Seen, asked: Counter[str]) -> list[str]:
    lines = seen.table() + [f"asks the host: {place} {times}" for place, times in asked.items()]
    return [short for line in lines for short in wrapped(line)]


def test_all_to_all_asks_for_its_counts() -> None:
    """Three numbers or lists a layer: how many choices are of experts with weights, what leaves, and what comes."""
    pool = replace(POOLS["lite 8 A2"], layers=1)
    pool = replace(pool, parallel=replace(pool.parallel, moe_dispatch="all_to_all"))
    choices = 1024 // pool.parallel.attn_tp_size * pool.config.moe_topk

    def sizes(place: str, x: Tensor) -> Any:
        if place != "dispatch.dispatch":
            return [1] * len(x)
        return [choices // pool.parallel.ep_size] * pool.parallel.ep_size if x.dim() else choices

    def counts(x: Tensor, minlength: int) -> Tensor:
        return x.new_empty(minlength)

    with rank_of(pool, 6) as mesh, mock.patch.object(torch, "bincount", counts):
        run = prompt(pool, mesh, ((0, 1024, True),))
        with fake(pool.soc), torch.no_grad(), lists(sizes) as asked:
            seen, (out, *_) = run(static(pool.ops("eager")), "npu", "")
    assert tuple(out.shape) == (1024 // pool.parallel.attn_tp_size, pool.config.hidden_size) and not seen.crossings
    assert asked == {"attention._fused": 2, "dispatch.dispatch": 3}
