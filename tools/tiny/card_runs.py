"""The runs that make a card: which checkpoint is asked how, and what is told of each.

Knows how to ask and what a card has; writes nothing.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from longcat_pd.config.model import ModelConfig
from longcat_pd.models.tensor_names import draft_tensors, expected_tensors
from longcat_pd.server.text import TextProcessor
from tools.tiny.asking import Progress, Told, body_of
from tools.tiny.asking_engine import CHUNK, ask_engine
from tools.tiny.asking_pools import ask_pools
from tools.tiny.card import CONTROL, NUM_DRAFTS, RECALL, Case, Line, Sizes, control_line, lines, same_line

AS_SERVED = ("model.dtype=float32",)  # by the commands and the file of a cluster that name no other checkpoint
ENGINE, DRAFTS, POOLS = "one engine", f"one engine, {NUM_DRAFTS} drafts", f"P(2,2) → D(2), {NUM_DRAFTS} drafts"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One column of the card. ``told``: what its lines were made of."""

    checkpoint: str
    how: str
    lines: tuple[Line, ...]
    told: Told


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What is on disk. ``parameters``: numbers in its tensors, draft layer and n-gram tables included, scales not."""

    name: str
    parameters: int
    num_bytes: int
    sha256: tuple[tuple[str, str], ...]  # of its files of tensors and its tokenizer, by name


def checkpoint(folder: Path) -> Checkpoint:
    """Read its files. Raises ConfigError."""
    config = ModelConfig.load(folder)
    files = sorted((*folder.glob("*.safetensors"), *folder.glob("tokenizer.json")))
    return Checkpoint(
        name=folder.name,
        parameters=sum(math.prod(shape) for shape in (expected_tensors(config) | draft_tensors(config)).values()),
        num_bytes=sum(file.stat().st_size for file in folder.iterdir()),
        sha256=tuple((file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files),
    )


async def runs(
    model: Path, cases: Sequence[Case], hows: Sequence[str], *, settings: Sequence[str] = AS_SERVED
) -> AsyncIterator[Run]:
    """The runs of one checkpoint, as they are done. ``hows``: of ENGINE, DRAFTS and POOLS; the order is theirs.

    Every run behind the first is compared with it, if that is ENGINE. ``settings``: as of ``--set``, of all runs. Raises
    ConfigError, and BenchFailed when a cluster does not start.
    """
    sizes, first = sizes_of(model), None
    for how in (how for how in (ENGINE, DRAFTS, POOLS) if how in hows):
        told = await asked(model, cases, how, settings=settings)
        found = lines(cases, told, sizes=sizes)
        if how == ENGINE:
            first = told
            if any(map(RECALL.belongs, cases)):
                found.append(await control(model, cases, sizes, settings=settings))
        elif first is not None:
            found.append(same_line(told.replies, first.replies))
        yield Run(checkpoint=model.name, how=how, lines=tuple(found), told=told)


async def asked(model: Path, cases: Sequence[Case], how: str, *, settings: Sequence[str] = AS_SERVED) -> Told:
    """One run over the cases."""
    bodies = [body_of(case.example) for case in cases]
    progress = _progress(f"{model.name}, {how}", len(bodies))
    if how == POOLS:
        told = await ask_pools(model, bodies, num_drafts=NUM_DRAFTS, progress=progress, settings=settings)
    else:
        num_drafts = NUM_DRAFTS if how == DRAFTS else 0
        told = await ask_engine(model, bodies, num_drafts=num_drafts, progress=progress, settings=settings)
    text = TextProcessor.load(str(model))
    return replace(told, replies=tuple(replace(reply, raw=text.raw(reply.token_ids)) for reply in told.replies))


async def control(model: Path, cases: Sequence[Case], sizes: Sizes, *, settings: Sequence[str] = AS_SERVED) -> Line:
    """The recall cases again, with keys that are picked at random."""
    mine = [case for case in cases if RECALL.belongs(case)]
    bodies, progress = [body_of(case.example) for case in mine], _progress(f"{model.name}, {CONTROL}", len(mine))
    told = await ask_engine(model, bodies, num_drafts=0, progress=progress, settings=settings, is_blind=True)
    return control_line(mine, told, sizes=sizes)


def sizes_of(model: Path) -> Sizes:
    """What a long context is for this checkpoint. Raises ConfigError."""
    indexer = ModelConfig.load(model).indexer
    return Sizes(index_topk=indexer.index_topk if indexer is not None else 0, chunk=CHUNK)


def _progress(name: str, total: int) -> Progress:
    """A line that is written over, on a terminal; else one at the start and one at the end."""
    is_terminal = sys.stderr.isatty()

    def show(count: int) -> None:
        if is_terminal or count in (0, total):
            start, end = ("\r" if is_terminal else ""), ("\n" if count == total or not is_terminal else "")
            sys.stderr.write(f"{start}{name}: {count} of {total}{end}")
            sys.stderr.flush()

    show(0)
    return show
