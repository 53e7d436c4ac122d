"""What of the decode step is one graph: functions of tensors of fixed shape, each a module that a compiler can take.

Where a graph can call the host there is one part, else several. Knows no compiler.
"""

from __future__ import annotations

from torch import Tensor, nn

from longcat_pd.engine.decode_step import DecodeStep, Found


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


def parts_of(step: DecodeStep, *, is_cut: bool) -> tuple[StepPart, ...]:
    """The parts that make the step, of which each is compiled. ``is_cut``: a graph cannot call the host in its middle."""
    best = (Best(step, 1),) if step.has_split_head else ()
    if not is_cut:
        return (Whole(step), *best)
    return (Plain(step), *best, Line(step), Verify(step))
