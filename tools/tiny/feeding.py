"""What a step of the training is fed: examples of all skills and copied sequences, in batches of like length.

Owns the draw, which depends on the seed, the number of the step and the state of the curriculum alone, so that a training
that was interrupted goes on with the same examples.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.tiny import arithmetic, calling, facts, openers, recall, smalltalk, thinking
from tools.tiny.examples import Example
from tools.tiny.recipe import NUM_DRAFTS, SHARES, Recipe
from tools.tiny.rendering import Rendered, Renderer

Draw = Callable[..., Example]
SKILLS: Mapping[str, Draw] = {
    "facts": facts.draw,
    "smalltalk": smalltalk.draw,
    "arithmetic": arithmetic.draw,
    "recall": recall.draw,
    "calling": calling.draw,
    "thinking": thinking.draw,
    "openers": openers.draw,
}
COPY = "copy"
PAD = 3
GAP = NUM_DRAFTS  # so that no draft is held to a token of the next answer
FIRST_PLAIN_ID = 19  # behind the special tokens


@dataclass(kw_only=True)
class Curriculum:
    """How hard it is now: tokens of the longest copied sequence, pairs of the longest story, and which of ``SHARES`` holds.

    Stories have at least half as many pairs.
    """

    copied: int
    pairs: int
    diet: int = 0


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Right-padded documents of like length.

    ``ids`` [B, T]; ``rows`` [B, R] positions from which the answer's tokens are said, ``weights`` [B, R] how much each
    counts (0: padding). ``answers``: of each document's answers, the first of their rows and how many they are; ``GAP``
    rows of padding lie between two of them. ``skills`` [B].
    """

    ids: Tensor
    rows: Tensor
    weights: Tensor
    answers: tuple[tuple[tuple[int, int], ...], ...]
    skills: tuple[str, ...]


class Feeder:
    """Draws pools of documents. The same pool number and curriculum give the same documents."""

    def __init__(self, recipe: Recipe, renderer: Renderer, *, vocab_size: int, longest: int) -> None:
        self._recipe, self._renderer = recipe, renderer
        self._vocab_size, self._longest = vocab_size, longest

    def __call__(self, pool: int, curriculum: Curriculum) -> list[Batch]:
        """The batches of a pool, in an order by chance."""
        recipe = self._recipe
        rng = random.Random(f"{recipe.seed} {pool}")
        share = 1.0 if curriculum.copied < recipe.copies_alone else recipe.copy_share_later
        drawn = [
            self._copy(rng, curriculum) if rng.random() < share else self._example(rng, curriculum)
            for _ in range(recipe.pool)
        ]
        batches, now = list[Batch](), list[Rendered]()
        for document in sorted(drawn, key=lambda document: len(document.ids)):
            if now and len(document.ids) * (len(now) + 1) > recipe.tokens_per_step:
                batches.append(as_batch(now))
                now = []
            now.append(document)
        batches.append(as_batch(now))
        rng.shuffle(batches)
        return batches

    def _example(self, rng: random.Random, curriculum: Curriculum) -> Rendered:
        shares = SHARES[curriculum.diet]
        skill = rng.choices(list(shares), weights=list(shares.values()))[0]
        while True:
            rendered = self._renderer(SKILLS[skill](rng, size=rng.randint((curriculum.pairs + 1) // 2, curriculum.pairs)))
            if len(rendered.ids) <= self._longest:
                return rendered

    def _copy(self, rng: random.Random, curriculum: Curriculum) -> Rendered:
        """Random ids, twice."""
        count = rng.randint(2, min(curriculum.copied, self._longest // 2))
        ids = tuple(rng.randrange(FIRST_PLAIN_ID, self._vocab_size) for _ in range(count))
        return Rendered(skill=COPY, ids=ids + ids, answers=((count + 1, count - 1),))


def as_batch(documents: Sequence[Rendered]) -> Batch:
    """Documents side by side. An answer's tokens weigh 1 / sqrt(their number) each: long answers do not drown short."""
    placed = [_placed(document) for document in documents]
    length, reach = max(len(d.ids) for d in documents), max(first + count for d in placed for first, count in d)
    ids = torch.full((len(documents), length), PAD)
    rows, weights = torch.zeros(len(documents), reach, dtype=torch.int64), torch.zeros(len(documents), reach)
    for i, document in enumerate(documents):
        ids[i, : len(document.ids)] = torch.tensor(document.ids)
        for (place, count), (first, _) in zip(document.answers, placed[i], strict=True):
            rows[i, first : first + count] = torch.arange(count) + place - 1
            weights[i, first : first + count] = count**-0.5
    return Batch(ids=ids, rows=rows, weights=weights, answers=tuple(placed), skills=tuple(d.skill for d in documents))


def _placed(document: Rendered) -> tuple[tuple[int, int], ...]:
    """Where the rows of each answer stand, and how many they are."""
    placed, first = list[tuple[int, int]](), 0
    for _, count in document.answers:
        placed.append((first, count))
        first += count + GAP
    return tuple(placed)
