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

from tools.tiny import arithmetic, calling, facts, recall, smalltalk, thinking
from tools.tiny.examples import Example
from tools.tiny.recipe import SHARES, Recipe
from tools.tiny.rendering import Rendered, Renderer

Draw = Callable[..., Example]
SKILLS: Mapping[str, Draw] = {
    "facts": facts.draw,
    "smalltalk": smalltalk.draw,
    "arithmetic": arithmetic.draw,
    "recall": recall.draw,
    "calling": calling.draw,
    "thinking": thinking.draw,
}
COPY = "copy"
PAD = 3
FIRST_PLAIN_ID = 19  # behind the special tokens


@dataclass(kw_only=True)
class Curriculum:
    """How hard it is now. ``copying``: whether copied sequences are still many; ``pairs``: of the longest story."""

    copying: bool = True
    pairs: int = 3


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Right-padded documents of like length.

    ``ids`` [B, T]; ``rows`` [B, R] positions from which the answer's tokens are said, ``weights`` [B, R] how much each
    counts (0: padding); ``skills`` [B].
    """

    ids: Tensor
    rows: Tensor
    weights: Tensor
    skills: tuple[str, ...]


class Feeder:
    """Draws the batches of a step."""

    def __init__(self, recipe: Recipe, renderer: Renderer, *, vocab_size: int, longest: int) -> None:
        self._recipe, self._renderer = recipe, renderer
        self._vocab_size, self._longest = vocab_size, longest

    def __call__(self, step: int, curriculum: Curriculum) -> list[Batch]:
        """The batches of a step: ``examples_per_step`` documents, short ones first."""
        recipe = self._recipe
        rng = random.Random(f"{recipe.seed} {step}")
        share = recipe.copy_share if curriculum.copying else recipe.copy_share_later
        drawn = [
            self._copy(rng, curriculum) if rng.random() < share else self._example(rng, curriculum)
            for _ in range(recipe.examples_per_step)
        ]
        documents = sorted(drawn, key=lambda document: len(document.ids))
        batches, now = list[Batch](), list[Rendered]()
        for document in documents:
            if now and _is_other_length(len(now[0].ids), len(document.ids), count=len(now)):
                batches.append(as_batch(now))
                now = []
            now.append(document)
        return [*batches, as_batch(now)]

    def _example(self, rng: random.Random, curriculum: Curriculum) -> Rendered:
        skill = rng.choices(list(SHARES), weights=list(SHARES.values()))[0]
        while True:
            size = rng.randint(self._recipe.first_pairs, max(curriculum.pairs, self._recipe.first_pairs))
            rendered = self._renderer(SKILLS[skill](rng, size=size))
            if len(rendered.ids) <= self._longest:
                return rendered

    def _copy(self, rng: random.Random, curriculum: Curriculum) -> Rendered:
        """Random ids, twice. Longer ones come with longer stories."""
        count = rng.randint(6, 28 if curriculum.copying else min(28 + 4 * curriculum.pairs, self._longest // 2 - 1))
        ids = tuple(rng.randrange(FIRST_PLAIN_ID, self._vocab_size) for _ in range(count))
        return Rendered(skill=COPY, prompt=(*ids, ids[0]), answer=ids[1:])


def _is_other_length(shortest: int, length: int, *, count: int) -> bool:
    """Whether a document stands better in a batch of its own kind: padding costs more than another pass."""
    return (length - shortest) * count > 1200


def as_batch(documents: Sequence[Rendered]) -> Batch:
    """Documents side by side. A document's tokens weigh 1 / sqrt(their number) each: long answers do not drown short."""
    length, reach = max(len(d.ids) for d in documents), max(len(d.answer) for d in documents)
    ids = torch.full((len(documents), length), PAD)
    rows, weights = torch.zeros(len(documents), reach, dtype=torch.int64), torch.zeros(len(documents), reach)
    for i, document in enumerate(documents):
        ids[i, : len(document.ids)] = torch.tensor(document.ids)
        count = len(document.answer)
        rows[i, :count] = torch.arange(count) + len(document.prompt) - 1
        weights[i, :count] = count**-0.5
    return Batch(ids=ids, rows=rows, weights=weights, skills=tuple(d.skill for d in documents))
