"""How an attention sees keys that other ranks hold: all local, gathered before use, or partitioned with merged results.

Owns the exchange of keys, candidates and partial results. Knows no projections and no layer. All three objects take
queries of this rank's heads and return results of this rank's heads. The keys that ``select`` returns mean something to
``attend`` of the same object only: they are numbers of visible keys (see ``kernels/ops.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from longcat_pd.models.batch import ForwardInputs
from longcat_pd.models.context import ModelContext
from longcat_pd.models.tiles import Cost, tiles

_EVERYWHERE = 1 << 31  # above every position


class KVAccess(Protocol):
    """The keys of all attentions of a stage, as one rank sees them. All ranks of a group call alike, also without rows."""

    def select(self, attention: int, index_q: Tensor, *, weights: Tensor, inputs: ForwardInputs) -> Tensor | None:
        """The keys that the rows attend to, by the index keys of ``attention``: [T, n], -1 for none.

        None: every row of the step attends to all that it can see. ``index_q`` [T, I, D], ``weights`` [T, I] fp32.
        """
        ...

    def with_own(self, keys: Tensor, inputs: ForwardInputs) -> Tensor:
        """``keys`` [T, n] of earlier rows and the position of each row itself: [T, n + 1]."""
        ...

    def attend(self, attention: int, q: Tensor, *, keys: Tensor | None, inputs: ForwardInputs) -> Tensor:
        """Weighted sums of latents, [T, own heads, C] fp32, for ``q`` [T, own heads, C + R] without its lora factor."""
        ...


def make_kv_access(context: ModelContext) -> KVAccess:
    """The access that the context names."""
    kinds: dict[str, Callable[[ModelContext], KVAccess]] = {
        "local": LocalKV,
        "gathered": GatheredKV,
        "partitioned": PartitionedKV,
    }
    return kinds[context.kv_access](context)


class LocalKV:
    """This rank's cache holds every key."""

    def __init__(self, context: ModelContext) -> None:
        self._cache = context.cache
        self._visible = _VisibleKeys(context)

    def select(self, attention: int, index_q: Tensor, *, weights: Tensor, inputs: ForwardInputs) -> Tensor | None:
        """See KVAccess."""
        if not self._visible.needs_selection(inputs):
            return None
        index = self._cache.tensor(f"index.{attention}")
        return self._visible.select(index_q, weights, index=index, inputs=inputs)

    def with_own(self, keys: Tensor, inputs: ForwardInputs) -> Tensor:
        """See KVAccess."""
        return torch.cat((keys, inputs.positions.unsqueeze(-1)), -1)

    def attend(self, attention: int, q: Tensor, *, keys: Tensor | None, inputs: ForwardInputs) -> Tensor:
        """See KVAccess."""
        latent, rope = self._cache.tensor(f"latent.{attention}"), self._cache.tensor(f"rope.{attention}")
        return self._visible.attend(q, keys, latent=latent, rope=rope, inputs=inputs)[0]


class GatheredKV:
    """Context parallel: each rank has its own rows and gets the blocks of all ranks for one use.

    The blocks that came are read through the batch's tables, in the order of ranks; nothing is copied into order.
    """

    def __init__(self, context: ModelContext) -> None:
        self._cache = context.cache
        self._group = context.mesh.axis("cp")
        self._visible = _VisibleKeys(context)
        self._latent_width = context.config.kv_lora_rank

    def select(self, attention: int, index_q: Tensor, *, weights: Tensor, inputs: ForwardInputs) -> Tensor | None:
        """See KVAccess."""
        if not self._visible.needs_selection(inputs):
            return None
        index = self._group.all_gather(self._contribution(f"index.{attention}", inputs))
        return self._visible.select(index_q, weights, index=index, inputs=inputs)

    def with_own(self, keys: Tensor, inputs: ForwardInputs) -> Tensor:
        """See KVAccess."""
        return torch.cat((keys, inputs.positions.unsqueeze(-1)), -1)

    def attend(self, attention: int, q: Tensor, *, keys: Tensor | None, inputs: ForwardInputs) -> Tensor:
        """See KVAccess. Latents and rope parts travel together."""
        own = [self._contribution(f"{part}.{attention}", inputs) for part in ("latent", "rope")]
        both = self._group.all_gather(torch.cat(own, -1))
        latent, rope = both[..., : self._latent_width], both[..., self._latent_width :]
        return self._visible.attend(q, keys, latent=latent, rope=rope, inputs=inputs)[0]

    def _contribution(self, name: str, inputs: ForwardInputs) -> Tensor:
        assert inputs.gather_blocks is not None, "a gathered view needs gather_blocks"
        return self._cache.tensor(name)[inputs.gather_blocks]


class PartitionedKV:
    """KV parallel: each rank has all rows, its own heads of the projections, and its own blocks of every sequence.

    A row's selection is made from the candidates of all ranks; each rank then attends, with all heads, to the winners that
    it holds and to its share of the forced keys. The partial results go to the ranks that own the heads.
    """

    def __init__(self, context: ModelContext) -> None:
        self._cache = context.cache
        self._group = context.mesh.axis("kvp")
        self._visible = _VisibleKeys(context)
        self._ops = context.ops
        self._block_size = context.cache.block_size

    def select(self, attention: int, index_q: Tensor, *, weights: Tensor, inputs: ForwardInputs) -> Tensor | None:
        """See KVAccess."""
        visible = self._visible
        if not visible.needs_selection(inputs):
            return None
        index = self._cache.tensor(f"index.{attention}")
        own_scores, own_positions = visible.candidates(index_q, weights, index=index, inputs=inputs)
        packed = torch.stack((own_scores.view(torch.int32), own_positions.int()))
        all_scores, all_positions = self._group.all_gather(packed, dim=2).unbind(0)
        _, best = self._ops.select_positions(
            all_scores.view(torch.float32),
            all_positions.long(),
            low=0,
            high=torch.full_like(inputs.positions, _EVERYWHERE),
            budget=visible.budget,
        )
        return self._held_here(torch.cat((best, visible.forced(inputs.positions)), -1), inputs)

    def with_own(self, keys: Tensor, inputs: ForwardInputs) -> Tensor:
        """See KVAccess."""
        return torch.cat((keys, self._held_here(inputs.positions.unsqueeze(-1), inputs)), -1)

    def attend(self, attention: int, q: Tensor, *, keys: Tensor | None, inputs: ForwardInputs) -> Tensor:
        """See KVAccess."""
        latent, rope = self._cache.tensor(f"latent.{attention}"), self._cache.tensor(f"rope.{attention}")
        all_heads = self._group.all_gather(q, dim=1)
        out, lse = self._visible.attend(all_heads, keys, latent=latent, rope=rope, inputs=inputs)
        shape = (len(q), self._group.size, q.shape[1], out.shape[-1] + 1)
        by_owner = torch.cat((out, lse.unsqueeze(-1)), -1).view(shape).transpose(0, 1)
        parts = self._group.all_to_all(by_owner)
        return self._ops.merge_partials(parts[..., :-1], parts[..., -1])

    def _held_here(self, positions: Tensor, inputs: ForwardInputs) -> Tensor:
        """From positions [T, n] to this rank's visible keys; -1 for positions that lie elsewhere, and for -1."""
        numbers = positions.clamp_min(0) // self._block_size
        columns = numbers // inputs.table_stride
        starts = inputs.block_starts[inputs.row_seqs]
        known = columns.clamp(max=starts.shape[1] - 1)
        is_here = (positions >= 0) & (starts.gather(1, known) == numbers * self._block_size)
        return torch.where(is_here, columns * self._block_size + positions % self._block_size, -1)


class _VisibleKeys:
    """Scores, candidates and attention over the keys that this rank sees, tile by tile."""

    def __init__(self, context: ModelContext) -> None:
        config = context.config
        self._ops = context.ops
        self._block_size = context.cache.block_size
        self._scale = config.softmax_scale * config.q_lora_scale
        self._indexer = config.indexer

    @property
    def budget(self) -> int:
        """Keys that scores decide about: all but the forced ones."""
        assert self._indexer is not None
        return self._indexer.index_topk - self._indexer.index_init_tokens - self._indexer.index_local_tokens

    def needs_selection(self, inputs: ForwardInputs) -> bool:
        """Whether some row may see more keys than may be picked. The same on all ranks, because lengths are."""
        return self._indexer is not None and max(inputs.kv_lens, default=0) > self._indexer.index_topk

    def select(self, index_q: Tensor, weights: Tensor, *, index: Tensor, inputs: ForwardInputs) -> Tensor:
        """The picked keys [T, topk] where every key is visible; keys and positions are the same numbers then."""
        _, best = self.candidates(index_q, weights, index=index, inputs=inputs)
        return torch.cat((best, self.forced(inputs.positions)), -1)

    def candidates(
        self, index_q: Tensor, weights: Tensor, *, index: Tensor, inputs: ForwardInputs
    ) -> tuple[Tensor, Tensor]:
        """Scores and positions [T, budget] of the best visible keys that are not forced."""
        assert self._indexer is not None
        cost = Cost(key=self._indexer.index_head_dim, pair=self._indexer.index_n_heads)
        scores = [index_q.new_empty((0, self.budget), dtype=torch.float32)]
        positions = [inputs.positions.new_empty((0, self.budget))]
        limits = (self._indexer.index_init_tokens, self.budget)
        high = inputs.positions + 1 - self._indexer.index_local_tokens
        for tile in tiles(inputs, self._block_size, cost, at_most=self._ops.tile_elements):
            where = {"block_tables": tile.block_tables, "block_starts": tile.block_starts}
            best = self._ops.index_candidates(
                tile.cut(index_q), tile.cut(weights), cache=index, high=tile.cut(high), limits=limits, **where
            )
            scores.append(best[0].flatten(0, 1))
            positions.append(best[1].flatten(0, 1))
        return torch.cat(scores), torch.cat(positions)

    def forced(self, positions: Tensor) -> Tensor:
        """The first tokens and the last ones that each row sees, [T, init + local]: a position in both once, else -1."""
        assert self._indexer is not None
        num_init, num_local = self._indexer.index_init_tokens, self._indexer.index_local_tokens
        own = positions.unsqueeze(-1)
        first = torch.arange(num_init, device=positions.device).expand(len(positions), -1)
        last = own - torch.arange(num_local, device=positions.device)
        return torch.cat((first.masked_fill(first > own, -1), last.masked_fill(last < num_init, -1)), -1)

    def attend(
        self, q: Tensor, keys: Tensor | None, *, latent: Tensor, rope: Tensor, inputs: ForwardInputs
    ) -> tuple[Tensor, Tensor]:
        """Result [T, H, C] and log-sum-exp [T, H] over all visible keys, or over the picked ones; fp32."""
        heads, width = q.shape[1:]
        outs = [q.new_empty((0, heads, latent.shape[-1]), dtype=torch.float32)]
        lses = [q.new_empty((0, heads), dtype=torch.float32)]
        dense = Cost(key=width, pair=heads)
        cost = dense if keys is None else Cost(row=dense.of(1, keys.shape[1]))
        for tile in tiles(inputs, self._block_size, cost, at_most=self._ops.tile_elements):
            where = {"latent": latent, "rope": rope, "block_tables": tile.block_tables}
            if keys is None:
                positions = tile.cut(inputs.positions)
                out, lse = self._ops.paged_attention(
                    tile.cut(q), positions, block_starts=tile.block_starts, scale=self._scale, **where
                )
            else:
                out, lse = self._ops.sparse_attention(tile.cut(q), tile.cut(keys), scale=self._scale, **where)
            outs.append(out.flatten(0, 1))
            lses.append(lse.flatten(0, 1))
        return torch.cat(outs), torch.cat(lses)
