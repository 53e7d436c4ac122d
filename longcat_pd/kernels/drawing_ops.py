"""The part of the table of operators that makes tokens of logits. Letters as in ``ops.py``; V ids of the vocabulary."""

# ruff: noqa: D102  (each operator is a class with one call, and the class says what it means)
from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class KeyedUniform(Protocol):
    """One number in [0, 1) for each key, [T] fp64: a counter-based hash (splitmix64's finaliser) of three int64 [T].

    A seeded text is made of these numbers, so every device gives the same ones, to the bit.
    """

    def __call__(self, seeds: Tensor, choices: Tensor, positions: Tensor) -> Tensor: ...


class Draw(Protocol):
    """One token for each row of ``logits`` [T, V] fp32 -> ids [T] int64. Everything else is [T]; fp64, ``top_k`` int64.

    ``temperature`` 0 takes the arg-max, the lowest id of equal ones. Else the softmax at that temperature, in fp64, is cut:
    to the ``top_k`` best, equal ones by lower id (0: all); then to the shortest run of the best whose sum reaches ``top_p``
    of what is left (1: all); and then to those of at least ``exp(floor)`` times the best (-inf: all). Of the rest, in the
    order of ids, the first whose sum exceeds ``uniform`` times all.
    """

    def __call__(
        self, logits: Tensor, *, temperature: Tensor, top_k: Tensor, top_p: Tensor, floor: Tensor, uniform: Tensor
    ) -> Tensor: ...


IN_PROMPT, ENDS = 1, 2  # bits of ``Edits.flags``


class Edits(NamedTuple):
    """What changes the logits of T rows before they are drawn from. Tables have a row for each of S sequences.

    Tables: ``counts`` [S, V] fp32, how often each id was generated; ``flags`` [S, V] uint8, IN_PROMPT for ids that the
    prompt has and ENDS for those that end an answer; ``bias_ids`` [S, N] int64 and ``bias`` [S, N] fp32, what is added to
    which id, 0 where there is nothing.

    Rows: ``seqs`` [T], the sequence; ``drafts`` [T, D], ids that stand between what is counted and the row, -1 for none;
    ``is_early`` [T] bool, whether the answer may not end yet; ``frequency``, ``presence`` and ``repetition`` [T] fp64;
    ``masks`` [T, words] int32, a bit for each id that may be drawn, the lowest first, and ``is_bound`` [T] bool, whether
    the row's mask counts.
    """

    counts: Tensor
    flags: Tensor
    bias_ids: Tensor
    bias: Tensor
    seqs: Tensor
    drafts: Tensor
    is_early: Tensor
    frequency: Tensor
    presence: Tensor
    repetition: Tensor
    masks: Tensor
    is_bound: Tensor


class DrawEdited(Protocol):
    """Draw from logits that were changed, in fp64 and rounded once: bias, then penalties, then masks.

    ``repetition`` divides positive and multiplies other logits of ids that the prompt or the answer has, up to the row and
    with its drafts. Then ``frequency`` for each time that the answer has the id, and ``presence`` if it does, are
    subtracted. An id that ENDS is not drawn while ``is_early``, and none that the mask of a bound row lacks; where both
    leave nothing, the mask alone counts. ``logits`` stay as they are; rows without any of this cost what Draw costs.
    """

    def __call__(
        self,
        logits: Tensor,
        edits: Edits,
        *,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        floor: Tensor,
        uniform: Tensor,
    ) -> Tensor: ...
