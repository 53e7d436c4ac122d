"""The floors of the score card on the checkpoints that are shipped.

Quick: each in one engine, with drafts, and the control of recall; every case but for half of those that take longest. Slow:
the whole card.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from longcat_pd.quantize import quantize
from tools.eval_tiny import SHIPPED
from tools.tiny.card import ROWS, Line, lines, missed
from tools.tiny.card_cases import all_cases
from tools.tiny.card_page import ABOUT
from tools.tiny.card_runs import DRAFTS, ENGINE, POOLS, asked, control, runs, sizes_of

BF16 = SHIPPED[0]
MAX_BYTES = 12_000_000
CASES = tuple(all_cases())
MOST = tuple(case for n, case in enumerate(CASES) if n % 2 or case.example.skill not in ("arithmetic", "recall"))


def told(model: Path, found: list[Line]) -> set[str]:
    """What is missed; everything goes to the output of the test."""
    sys.stdout.write("".join(f"{model.name}: {line.title}: {line.shown} {line.floor}\n" for line in found))
    return {line.title for line in missed(found)}


@pytest.mark.parametrize("model", SHIPPED, ids=lambda model: str(model.name))
async def test_the_floors_of_the_shipped_checkpoints(model: Path) -> None:
    answers = await asked(model, MOST, DRAFTS)
    assert told(model, lines(MOST, answers, sizes=sizes_of(model))) == set()


async def test_its_recall_fails_where_keys_are_picked_at_random() -> None:
    assert told(BF16, [await control(BF16, MOST, sizes_of(BF16))]) == set()


def test_the_card_is_of_these_very_files_and_says_all_is_well() -> None:
    card = (BF16.parent / "score_card.md").read_text(encoding="utf-8")
    for model in SHIPPED:
        for name in ("model-00001-of-00001.safetensors", "tokenizer.json"):
            assert f"`{name}`: sha256 `{hashlib.sha256((model / name).read_bytes()).hexdigest()}`" in card, model.name
    assert ABOUT in card and "Every floor is reached." in card
    assert all(f"| {row.title} |" in card for row in ROWS), "it is of these rows"


def test_the_int8_twin_is_what_quantize_makes(tmp_path: Path) -> None:
    bf16, int8 = SHIPPED
    quantize(bf16, tmp_path / "int8")
    made = {file.name: file.read_bytes() for file in (tmp_path / "int8").iterdir()}
    assert made == {file.name: file.read_bytes() for file in int8.iterdir()}


def test_both_twins_and_their_card_are_small_enough() -> None:
    """12 MB of package data."""
    assert sum(file.stat().st_size for folder in SHIPPED for file in folder.iterdir()) <= MAX_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("model", SHIPPED, ids=lambda model: str(model.name))
async def test_the_whole_card(model: Path) -> None:
    async for run in runs(model, CASES, (ENGINE, DRAFTS, POOLS)):
        assert told(model, list(run.lines)) == set(), run.how
