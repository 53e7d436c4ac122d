"""Every kind of process is killed in every phase of a request, streamed and not: one end for each, and all goes on.

Failures of the kinds 2, 5, 11, 12, 13 and 15. Real processes; phases are held, so each is met for certain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.kill_rig import BEFORE_HANDOVER, KINDS, PHASES, Kind, Phase, Rig, Row, rig
from tests.parity.conftest import MakeCheckpoint

QUICK: tuple[tuple[Kind, Phase, bool], ...] = (
    ("decode", "decoding", True),
    ("decode first rank", "queued", True),
    ("prefill", "committed", False),
    ("balancer", "transferring", True),
)


@pytest.fixture(scope="module")
def table() -> Iterator[list[Row]]:
    """What became of all combinations; shown at the end."""
    rows: list[Row] = []
    yield rows
    print("", *rows, sep="\n")


async def all_of(cluster: Rig, kind: Kind, phases: Sequence[Phase], table: list[Row], *, is_streamed: bool) -> None:
    """One phase after the other, every second one streamed."""
    for phase in phases:
        table.append(await cluster.meet(kind, phase, is_streamed=is_streamed))
        print(f"\n{table[-1]}", end=" ")
        is_streamed = not is_streamed


async def test_a_few_combinations(tiny: MakeCheckpoint, tmp_path: Path, table: list[Row]) -> None:
    async with rig(tmp_path, tiny("2.0", with_tokenizer=True), num_prefill=1, num_decode=2) as cluster:
        for kind, phase, is_streamed in QUICK:
            await all_of(cluster, kind, [phase], table, is_streamed=is_streamed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_nobody_can_take_over(tiny: MakeCheckpoint, tmp_path: Path, table: list[Row], kind: Kind) -> None:
    async with rig(tmp_path, tiny("2.0", with_tokenizer=True), num_prefill=1, num_decode=1) as cluster:
        await all_of(cluster, kind, PHASES, table, is_streamed=bool(KINDS.index(kind) % 2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "balancer"])
async def test_another_takes_over(tiny: MakeCheckpoint, tmp_path: Path, table: list[Row], kind: Kind) -> None:
    """What was streamed above is not here, and the other way round."""
    is_prefill = kind.startswith("prefill")
    phases = BEFORE_HANDOVER if is_prefill else PHASES
    pools = {"num_prefill": 1 + is_prefill, "num_decode": 2 - is_prefill}
    async with rig(tmp_path, tiny("2.0", with_tokenizer=True), **pools) as cluster:
        await all_of(cluster, kind, phases, table, is_streamed=not KINDS.index(kind) % 2)
