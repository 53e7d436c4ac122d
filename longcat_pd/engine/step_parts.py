"""What of the decode step is one graph: functions of tensors of fixed shape, each a module that a compiler can take.

Where a graph can call the host in its middle, and write to a cache more than once, there is one part, else several. Knows
no compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from longcat_pd.engine.decode_step import DecodeStep, Found
from longcat_pd.engine.speculative import Guess, ModelDrafts

Run = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLimits:
    """What graphs of a compiler cannot do.

    Attributes:
        is_cut: they cannot call the host in their middle, neither for masks nor to count what collectives send.
        writes_once: of a tensor that they write to twice they make a copy; and the draft layer's cache is written to by
            every draft.
    """

    is_cut: bool = False
    writes_once: bool = False


class StepPart(nn.Module):
    """A part of the step for any number of sequences.

    ``name`` tells it from other parts; ``num_candidates``: see ``sampler.drawn``.
    """

    name: str

    def __init__(self, step: DecodeStep, num_candidates: int = 0) -> None:
        super().__init__()
        self.step = step
        self._num_candidates = num_candidates

    def examples(self, num_seqs: int) -> tuple[Tensor, ...]:
        """Arguments for so many rows of padding, which leave nothing behind."""
        state = self.step.state
        return (state.recent.new_full((num_seqs,), state.padding),)


class Whole(StepPart):
    """All of it, with the host in the middle: slots -> found."""

    name = "whole"

    def forward(self, slots: Tensor) -> Found:
        """See ``DecodeStep.forward``."""
        found: Found = self.step(slots, (), self._num_candidates)
        return found


class Plain(StepPart):
    """All of it for slots that ask for nothing: slots -> found."""

    name = "plain"

    def forward(self, slots: Tensor) -> Found:
        """See ``DecodeStep.plain``."""
        return self.step.plain(slots, (), self._num_candidates)


class Best(Plain):
    """The same for rows that take the best id, where the head is split."""

    name = "best"


class Line(StepPart):
    """The first part: slots -> (line,)."""

    name = "line"

    def forward(self, slots: Tensor) -> tuple[Tensor]:
        """See ``DecodeStep.line``."""
        return (self.step.line(slots, ()),)


class Verify(StepPart):
    """The second part: slots, line, masks -> found."""

    name = "verify"

    def forward(self, slots: Tensor, line: Tensor, masks: Tensor, is_bound: Tensor) -> Found:
        """See ``DecodeStep.verify``."""
        return self.step.verify(slots, line, (masks, is_bound), lengths=())

    def examples(self, num_seqs: int) -> tuple[Tensor, ...]:
        """See StepPart."""
        (slots,), state = super().examples(num_seqs), self.step.state
        line = slots.new_zeros((num_seqs, state.shape.history + state.shape.num_drafts))
        return (slots, line, *self.step.masks(slots, line, is_any_bound=False))


class Round(StepPart):
    """One draft by itself: slots, and what the round before it gave -> line, hidden, and keys if there are such.

    Args:
        number: of drafts that are there before.
    """

    def __init__(self, step: DecodeStep, drafts: ModelDrafts, number: int) -> None:
        super().__init__(step)
        self.name = f"draft_{number}"
        self._drafts = drafts
        self._number = number

    def forward(self, slots: Tensor, *guess: Tensor) -> tuple[Tensor, ...]:
        """See ``ModelDrafts.round``."""
        seen = self.step.seen(slots, ())
        before = Guess(*guess) if self._number else self._drafts.begun(seen)
        return tuple(part for part in self._drafts.round(seen, before, self._number) if part is not None)

    def examples(self, num_seqs: int) -> tuple[Tensor, ...]:
        """See StepPart. The round before is asked for its shapes alone."""
        slots = super().examples(num_seqs)
        if not self._number:
            return slots
        before = Round(self.step, self._drafts, self._number - 1)
        given = before.examples(num_seqs)
        made = shapes_of(before, given)
        return (*slots, *(torch.zeros(one.shape, dtype=one.dtype, device=one.device) for one in made))


class Check(StepPart):
    """Verification alone, for slots that ask for nothing: slots, line -> found."""

    name = "check"

    def forward(self, slots: Tensor, line: Tensor) -> Found:
        """See ``DecodeStep.verify``."""
        return self.step.verify(slots, line, None, lengths=(), num_candidates=self._num_candidates)

    def examples(self, num_seqs: int) -> tuple[Tensor, ...]:
        """See StepPart."""
        (slots,), shape = super().examples(num_seqs), self.step.state.shape
        return slots, slots.new_zeros((num_seqs, shape.history + shape.num_drafts))


class CheckBest(Check):
    """The same for rows that take the best id, where the head is split."""

    name = "check_best"


def parts_of(step: DecodeStep, limits: GraphLimits) -> tuple[StepPart, ...]:
    """The parts that make the step, of which each is compiled."""
    if not limits.is_cut:
        return (Whole(step), *((Best(step, 1),) if step.has_split_head else ()))
    drafts, num_drafts = step.rounds, step.state.shape.num_drafts
    if limits.writes_once and drafts is not None and num_drafts:
        rounds = (Round(step, drafts, number) for number in range(num_drafts))
        return (*rounds, Check(step), *((CheckBest(step, 1),) if step.has_split_head else ()), Verify(step))
    return (Plain(step), *((Best(step, 1),) if step.has_split_head else ()), Line(step), Verify(step))


def run_parts(
    step: DecodeStep, parts: Mapping[str, Run], padded: Tensor, *, slots: Sequence[int], takes_best: bool
) -> tuple[Tensor, ...]:
    """One step by its parts, by name: found. ``slots``: those of ``padded`` that are somebody's; ``takes_best``: every row
    takes the best id and no log-probs are asked for.
    """
    if takes_best and "best" in parts:
        return parts["best"](padded)
    if "whole" in parts:
        return parts["whole"](padded)
    state = step.state
    is_plain = not state.asks(slots)
    if is_plain and "plain" in parts:
        return parts["plain"](padded)
    if "line" in parts:
        (line,) = parts["line"](padded)
    else:
        guess: tuple[Tensor, ...] = ()
        for number in range(state.shape.num_drafts):
            guess = parts[f"draft_{number}"](padded, *guess)
        line = guess[0]
    if is_plain:
        return parts["check_best" if takes_best and "check_best" in parts else "check"](padded, line)
    masks = step.masks(padded, line, is_any_bound=state.sampling.grammars.binds(slots))
    return parts["verify"](padded, line, *masks)


def shapes_in(part: StepPart, num_seqs: int) -> tuple[Tensor, ...]:
    """Its examples, without memory."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return part.examples(num_seqs)


def shapes_of(part: Run, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What the part gives, without memory: it is not computed."""
    with detect_fake_mode(arguments) or FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        return part(*arguments)
