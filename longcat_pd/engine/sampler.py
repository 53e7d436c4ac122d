"""From logits to tokens and log-probs, a batch at a time. Knows no slots, plans or ranks.

Every rank that samples a row does so for itself from logits that are equal byte for byte, and gets the same token: a draw
is keyed by (seed, choice, position) alone, the order of everything is by token id, and no state is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from longcat_pd.engine.plan import SlotSampling
from longcat_pd.kernels.drawing_ops import Edits
from longcat_pd.kernels.ops import Ops
from longcat_pd.models.batch import Rows
from longcat_pd.models.causal_lm import CausalLM


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token; ``logprob`` and ``top`` (best first) only where they were asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """How each row of a batch is sampled, as tensors [R] on one device: the first three fp64, the others int64.

    ``temperature`` 0 is arg-max, ``top_k`` 0 and ``top_p`` 1 are off; ``floor``: see ``floor_of``; ``seed`` and ``choice``
    key the draws. ``edits``: what is done to logits first; None: nothing.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    floor: torch.Tensor
    top_k: torch.Tensor
    seed: torch.Tensor
    choice: torch.Tensor
    edits: Edits | None = None

    @classmethod
    def of(cls, rules: Sequence[SlotSampling], device: torch.device) -> SamplingRows:
        """One row for each rule; none of them edits logits."""
        assert not any(rule.has_edits for rule in rules)

        def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            temperature=column([rule.temperature for rule in rules], torch.float64),
            top_p=column([rule.top_p for rule in rules], torch.float64),
            floor=column([floor_of(rule) for rule in rules], torch.float64),
            top_k=column([rule.top_k for rule in rules], torch.int64),
            seed=column([rule.seed for rule in rules], torch.int64),
            choice=column([rule.choice for rule in rules], torch.int64),
        )


def floor_of(rule: SlotSampling) -> float:
    """The log of ``min_p``: an id that is fainter than the best by more is not drawn."""
    return math.log(rule.min_p) if rule.min_p > 0.0 else -math.inf


def sample(logits: torch.Tensor, rows: SamplingRows, positions: torch.Tensor, ops: Ops) -> torch.Tensor:
    """Ids [R] of a token for each row of ``logits`` [R, V] fp32; ``positions`` [R] are their places in their sequences."""
    uniform = ops.keyed_uniform(rows.seed, rows.choice, positions)
    filters = {"top_k": rows.top_k, "top_p": rows.top_p, "floor": rows.floor, "uniform": uniform}
    if rows.edits is None:
        return ops.draw(logits, temperature=rows.temperature, **filters)
    return ops.draw_edited(logits, rows.edits, temperature=rows.temperature, **filters)


def drawn(
    model: CausalLM,
    final: torch.Tensor,
    at: Rows,
    *,
    rows: SamplingRows,
    positions: torch.Tensor,
    num_candidates: int,
    ops: Ops,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [R] behind final hidden states [R, hidden], and their logits [R, V]; [R, 0] where only candidates are looked at.

    ``num_candidates``: see ``slots.candidates_wanted``. Where the head is split, only these travel, and no row edits them.
    """
    if not num_candidates:
        logits = model.logits(final, at)
        return sample(logits, rows, positions, ops), logits
    values, ids = model.candidates(final, at, num_candidates)
    picked = sample(values, replace(rows, edits=None), positions, ops)
    return ids.gather(1, picked.unsqueeze(1)).squeeze(1), values[:, :0]


def logprobs(logits: torch.Tensor, token_ids: Sequence[int], num: int) -> list[Sampled]:
    """The tokens behind the rows of ``logits`` [R, V], with their log-probs and those of the ``num`` best ids of the row.

    Log-probs are those of the softmax of the raw logits in fp32, before temperature and filters.
    """
    return [_with_logprobs(row, token, num) for row, token in zip(logits.float(), token_ids, strict=True)]


def _with_logprobs(row: torch.Tensor, token: int, num: int) -> Sampled:
    values = row.log_softmax(-1)
    ids = _best(row, min(num, len(row))).tolist() if num else []
    return Sampled(token, float(values[token]), tuple((i, float(values[i])) for i in ids))


def _best(row: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the ``count`` largest, best first, equal ones by lower id."""
    ids = (row >= row.topk(count).values[-1]).nonzero().squeeze(1)
    return ids[row[ids].sort(descending=True, stable=True).indices[:count]]
