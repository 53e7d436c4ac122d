"""The NPU's table says the tokens of the reference table: every model, drafts, int8, every layout and dispatch.

In fp32, which no device computes in: CPU kernels take it so that tokens can be compared one by one.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from longcat_pd.config import resolve
from longcat_pd.config.schema import ParallelConfig, RankSpec
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.quantize import quantize
from tests.compiled import Crowd, Said, Work, with_engine
from tests.npu.ranks import live, npu_table
from tests.npu.widths import BLOCK, WIDTHS
from tests.parity.conftest import MakeCheckpoint
from tests.parity.gloo import on_ranks, rank_specs
from tests.slots import GREEDY
from tests.topology import cluster_file, pools

SLOTS, NUM_BLOCKS, TOPK = 4, 80, 48
LENGTHS = (1, 17, TOPK - 2, TOPK + 1, 90, 5)
NEAR = 0.05  # nats, see ``check``
CROWD = Crowd(at_once=3, joining=2)


def work(*, is_int8: bool = False) -> list[Work]:
    """Half of them greedy, half drawn; with int8 all greedy, see ``check``."""
    draw, found = random.Random(7), []
    for n, length in enumerate(LENGTHS):
        prompt = [draw.randrange(32, 1000) for _ in range(length)]
        rule = replace(GREEDY, temperature=0.8 * (n % 2), top_p=0.9, top_k=20 * (n % 4 == 1), seed=n)
        found.append(Work(prompt, replace(GREEDY, num_logprobs=8) if is_int8 else rule, num_new=8 + n % 3))
    return found


def specs(path: Path, parallel: ParallelConfig, num_drafts: int = 0) -> list[RankSpec]:
    made = rank_specs(path, parallel, num_blocks=NUM_BLOCKS, num_drafts=num_drafts)
    return [with_engine(spec, block_size=BLOCK, max_num_seqs=SLOTS, max_model_len=192) for spec in made]


def alone(path: Path, num_drafts: int = 0, *, is_npu: bool, is_int8: bool = False) -> list[Said]:
    spec = specs(path, ParallelConfig(), num_drafts)[0]
    if not is_npu:
        return live(spec, Mesh.single(), work(is_int8=is_int8), CROWD, False)
    with npu_table():
        return live(spec, Mesh.single(), work(is_int8=is_int8), CROWD, False)


def check(got: list[Said], wanted: list[Said], *, is_int8: bool) -> None:
    """The same tokens. Of int8: up to where the reference itself was in two minds.

    A last bit in front of a quantisation can become a whole step of it, which moves log-probs by some hundredths: no two
    ways of adding up agree on that. So a text may part from the reference's where it had a token whose log-prob is as good
    as NEAR, and nowhere else; what comes behind are answers to different questions.
    """
    if not is_int8:
        assert ids(got) == ids(wanted)
        return
    parted = 0
    for ours, theirs in zip(got, wanted, strict=True):
        assert len(ours.ids) == len(theirs.ids)
        places = [n for n, (a, b) in enumerate(zip(ours.ids, theirs.ids, strict=True)) if a != b]
        for place in places[:1]:
            known, parted = dict(theirs.top[place]), parted + 1
            best, ours_there = theirs.logprobs[place], known.get(ours.ids[place], -math.inf)
            assert best - ours_there <= NEAR, (place, ours.ids, theirs.ids, known)
    assert parted <= len(wanted) // 3, (ids(got), ids(wanted))


def ids(said: list[Said]) -> list[list[int]]:
    return [one.ids for one in said]


@pytest.fixture(scope="module")
def checkpoint(tiny: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    made: dict[str, Path] = {}

    def make(variant: str, *, is_int8: bool = False) -> Path:
        plain = tiny(variant, *WIDTHS[variant])
        if not is_int8:
            return plain
        if variant not in made:
            made[variant] = tmp_path_factory.mktemp("int8") / variant
            quantize(plain, made[variant])
        return made[variant]

    return make


def alone_rows() -> Iterator[object]:
    """Every variant, with and without int8 and drafts (lite has no draft layer); some of them in the default suite."""
    usual = {("2.0", False, 3), ("2.0", True, 3), ("lite", True, 0), ("chat", False, 3)}
    for row in itertools.product(WIDTHS, (False, True), (0, 3)):
        if row[0] != "lite" or not row[2]:
            name = f"{row[0]}-{'int8' if row[1] else 'float'}-{row[2]}"
            yield pytest.param(*row, id=name, marks=() if row in usual else pytest.mark.slow)


@pytest.mark.parametrize(("variant", "is_int8", "num_drafts"), [*alone_rows()])
def test_one_rank(checkpoint, variant: str, is_int8: bool, num_drafts: int) -> None:  # type: ignore[no-untyped-def]
    path = checkpoint(variant, is_int8=is_int8)
    wanted = alone(path, is_npu=False, is_int8=is_int8)
    check(alone(path, num_drafts, is_npu=True, is_int8=is_int8), wanted, is_int8=is_int8)


@dataclass(frozen=True)
class Layout:
    """One way to spread a decode instance over ranks."""

    parallel: ParallelConfig
    variant: str = "2.0"
    num_drafts: int = 3
    is_int8: bool = False


def pair(dispatch: str, **sizes: int) -> ParallelConfig:
    return ParallelConfig(kvp_size=2, attn_tp_size=2, ep_size=2, moe_dispatch=dispatch, **sizes)  # type: ignore[arg-type]


LAYOUTS = {
    "kvp": Layout(ParallelConfig(kvp_size=2, attn_tp_size=2)),
    "kvp, dense": Layout(ParallelConfig(kvp_size=2, attn_tp_size=2), variant="chat"),
    "gather": Layout(pair("gather"), is_int8=True),
    "all_to_all": Layout(pair("all_to_all")),
    "two_level": Layout(pair("two_level", node_size=2)),
    "fused": Layout(pair("fused")),
    "fused, int8": Layout(pair("fused"), is_int8=True),
}


USUAL = ("kvp", "fused, int8")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in USUAL else pytest.mark.slow) for n in LAYOUTS])
def test_many_ranks(checkpoint, name: str) -> None:  # type: ignore[no-untyped-def]
    layout = LAYOUTS[name]
    path = checkpoint(layout.variant, is_int8=layout.is_int8)
    asked = work(is_int8=layout.is_int8)
    found = on_ranks(specs(path, layout.parallel, layout.num_drafts), live, asked, CROWD, True, collectives="native")
    check(found[0], alone(path, is_npu=False, is_int8=layout.is_int8), is_int8=layout.is_int8)


async def test_prefill_in_stages_and_contexts_to_a_partitioned_cache(checkpoint, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The whole topology: pp 2 x cp 2 into kvp 2 with drafts, every rank on the NPU's table."""
    path = checkpoint("2.0")
    file = cluster_file(
        tmp_path,
        path,
        prefill={"pp_size": 2, "cp_size": 2},
        decode={"kvp_size": 2, "attn_tp_size": 2},
        prefill_engine={"num_draft_tokens": 3},
        decode_engine={"num_draft_tokens": 3},
    )
    config = resolve.load(file)
    entries = {"prefill": "tests.npu.ranks:prefill_main", "decode": "tests.npu.ranks:decode_main"}
    greedy = [replace(one, sampling=GREEDY) for one in work()]
    wanted = ids(live(specs(path, ParallelConfig())[0], Mesh.single(), greedy, CROWD, False))
    async with pools(config, entries=entries) as topology:
        for one, expected in zip(greedy, wanted, strict=True):
            choice = await topology.complete(one.prompt, max_tokens=one.num_new)
            assert choice["token_ids"] == expected
        await topology.idle_within()
