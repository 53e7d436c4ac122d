"""From logits to tokens and log-probs, a batch at a time. Knows no slots, plans or ranks.

Every rank that samples a row does so for itself from logits that are equal byte for byte, and gets the same token: a draw
is keyed by (seed, choice, position) alone, the order of everything is by token id, and no state is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from longcat_pd.engine.plan import SlotSampling

_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token; ``logprob`` and ``top`` (best first) only where they were asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample(logits: torch.Tensor, rules: Sequence[SlotSampling], positions: Sequence[int]) -> list[Sampled]:
    """Chooses a token for each row of ``logits`` [R, V] fp32.

    Args:
        logits: raw; log-probs are those of its softmax, before temperature and filters.
        rules: how each row is sampled.
        positions: place of the new token in its sequence, by row.
    """
    chosen = logits.argmax(-1)  # the lowest id of equal ones
    drawn = [row for row, rule in enumerate(rules) if rule.temperature > 0.0]
    if drawn:
        scaled = torch.stack([_filtered(logits[row], rules[row]) for row in drawn])
        uniform = torch.from_numpy(keyed_uniform([rules[r] for r in drawn], [positions[r] for r in drawn]))
        chosen[drawn] = _inverse_cdf(scaled.softmax(-1), uniform.to(logits.device))
    tokens = chosen.tolist()
    return [_with_logprobs(logits[row], token, rules[row]) for row, token in enumerate(tokens)]


def keyed_uniform(rules: Sequence[SlotSampling], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each row: a counter-based hash (splitmix64's finaliser) of seed, choice and position."""
    seeds = np.array([rule.seed for rule in rules], dtype=np.int64).view(np.uint64)
    state = _mixed(seeds)
    for part in (np.array([rule.choice for rule in rules], dtype=np.uint64), np.array(positions, dtype=np.uint64)):
        state = _mixed(state ^ part)
    return np.asarray((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + _ODD  # wraps around: arrays of unsigned integers do so silently
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    return x ^ (x >> np.uint64(31))


def _filtered(row: torch.Tensor, rule: SlotSampling) -> torch.Tensor:
    """Temperature, then top_k, then top_p; what falls out is -inf. Double, so that a row's draw has room."""
    wide = row.double()
    scaled = (wide - wide.max()) / rule.temperature  # the best is 0, so the tiniest temperature does not overflow
    is_off = rule.top_p >= 1.0
    if is_off and not 0 < rule.top_k < len(row):
        return scaled
    ids = _best(scaled, min(rule.top_k or len(row), len(row)))
    if not is_off:
        weights = scaled[ids].softmax(0)
        before = weights.cumsum(0) - weights
        ids = ids[(before < rule.top_p).nonzero().squeeze(1)]
    kept = torch.full_like(scaled, -torch.inf)
    kept[ids] = scaled[ids]
    return kept


def _best(row: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the ``count`` largest, best first, equal ones by lower id."""
    if count < len(row):
        ids = (row >= row.topk(count).values[-1]).nonzero().squeeze(1)
    else:
        ids = torch.arange(len(row), device=row.device)
    order = row[ids].sort(descending=True, stable=True).indices
    return ids[order[:count]]


def _inverse_cdf(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first id whose cumulated probability exceeds ``uniform``; never an id of probability 0."""
    cumulated = probs.cumsum(-1)
    total = cumulated[:, -1:].contiguous()
    found = torch.searchsorted(cumulated, uniform[:, None] * total, right=True)
    last = torch.searchsorted(cumulated, total)  # where the sum is reached: nothing of weight lies behind
    return torch.minimum(found, last).squeeze(1)


def _with_logprobs(row: torch.Tensor, token: int, rule: SlotSampling) -> Sampled:
    if rule.num_logprobs is None:
        return Sampled(token)
    logprobs = row.float().log_softmax(-1)
    ids = _best(row, min(rule.num_logprobs, len(row))).tolist() if rule.num_logprobs else []
    return Sampled(token, float(logprobs[token]), tuple((i, float(logprobs[i])) for i in ids))
