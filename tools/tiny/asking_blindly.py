"""The control of the recall cases: an engine whose indexer picks keys at random.

Everything else stays: the forced first and last tokens, the number of keys, which of them can be seen, and how attention
uses what was picked. Only the score of a key, by which the operator ``index_candidates`` finds the best, is drawn: evenly
from [0, 1), independently for each pair of a query and a key. What is drawn is a function of ``SEED``, the bits of the
query and the key's position, so that the same request has the same choice whatever company it is computed in, and other
attentions, other positions and other requests have others. No key's content counts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.engine.executor import rank_specs
from longcat_pd.engine.rank_model import RankModel, load_rank_model
from longcat_pd.engine.stage_model import stage_operators
from longcat_pd.kernels import Ops
from longcat_pd.parallel.mesh import Mesh

SEED = 20
_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, odd, as a signed number: what splitmix64 counts by
_MIX = ((30, -4658895280553007687), (27, -7723592293110705685))  # shift, factor of its two rounds
_BITS = 24  # that fp32 has all of


def with_random_choice(spec: InstanceSpec) -> RankModel:
    """Model and cache of the one rank of ``spec``. Raises ConfigError."""
    operators = stage_operators(spec, ModelConfig.load(spec.model.path))
    blind = replace(operators, ops=choosing_at_random(operators.ops))
    return load_rank_model(rank_specs(spec, "control")[0], Mesh.single(), operators=blind)


def choosing_at_random(ops: Ops) -> Ops:
    """The same operators with another ``index_candidates``."""

    def index_candidates(
        index_q: Tensor,
        weights: Tensor,
        *,
        cache: Tensor,
        block_tables: Tensor,
        block_starts: Tensor,
        high: Tensor,
        limits: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        """See ``ops.IndexCandidates``, but for the scores."""
        rows_each, (low, budget) = index_q.shape[1], limits
        offsets = torch.arange(cache.shape[1], device=cache.device)
        positions = (block_starts.unsqueeze(-1) + offsets).flatten(1).repeat_interleave(rows_each, 0)
        scores = drawn_scores(index_q.flatten(0, 1), positions)
        best = ops.select_positions(scores, positions, low=low, high=high.flatten(), budget=budget)
        return best[0].view(*high.shape, budget), best[1].view(*high.shape, budget)

    return replace(ops, index_candidates=index_candidates)


def drawn_scores(index_q: Tensor, positions: Tensor) -> Tensor:
    """[T, I, D] and [T, S] -> [T, S] fp32, evenly from [0, 1)."""
    bits = index_q.float().flatten(1).contiguous().view(torch.int32).long()
    places = torch.arange(1, bits.shape[1] + 1, device=bits.device) * _GOLDEN
    queries = _mixed(bits + places).sum(-1, keepdim=True)
    drawn = _mixed(_mixed(queries + SEED) + positions.long() * _GOLDEN)
    return (drawn & ((1 << _BITS) - 1)).float() / (1 << _BITS)


def _mixed(x: Tensor) -> Tensor:
    """Splitmix64 of 64-bit numbers, wrapping; its shifts are of unsigned numbers."""
    for shift, factor in _MIX:
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, shift: int) -> Tensor:
    return (x >> shift) & ((1 << (64 - shift)) - 1)
