"""Vocabulary embedding and language-model head, their rows split over axes of their own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from longcat_pd.models.batch import ForwardInputs, Rows
from longcat_pd.models.context import ModelContext
from longcat_pd.models.linear import Linear, Piece, RmsNorm, copy_into, empty_parameter, share_of
from longcat_pd.models.rows import RowExchange, Shares, padded
from longcat_pd.models.weight_spec import WeightSpec

EMBEDDING_NAME = "model.embed_tokens"


class VocabEmbedding(nn.Module):
    """One vector for each token id. Each rank of ``embed_tp`` has the vectors of some ids."""

    def __init__(self, context: ModelContext, name: str = EMBEDDING_NAME) -> None:
        super().__init__()
        mesh, config = context.mesh, context.config
        self._name = name
        self._shape = config.vocab_size, config.hidden_size
        self._exchange = RowExchange(mesh.axis("embed_tp"), mesh.axis("attn_tp"))
        self._own = share_of(config.vocab_size, self._exchange.group)
        self.weight = empty_parameter(context, self._own.stop - self._own.start, config.hidden_size)

    def forward(self, token_ids: Tensor, rows: Rows) -> Tensor:
        """[T] -> the stream [T, hidden]. Each vector is one rank's, so the sum is an exact exchange."""
        ids = self._exchange.shares.enter(token_ids, rows)
        if self._exchange.group.size == 1:
            return functional.embedding(ids, self.weight)
        return self._exchange.total(vectors_of(self._exchange.spread(ids, rows), self.weight, self._own.start), rows)

    def weight_specs(self) -> Iterator[WeightSpec]:
        """The rows of the table that are here."""
        region = (self._own, slice(0, self._shape[1])) if self._exchange.group.size > 1 else ()
        yield WeightSpec(f"{self._name}.weight", self._shape, copy_into(self.weight), region)


class LmHead(nn.Module):
    """Final norm, and logits of the rows that want them, equal on all ranks that have the rows.

    Each rank of ``lmhead_tp`` has the logits of some ids for all rows that are handed in.
    """

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        config, mesh = context.config, context.mesh
        self._ops = context.ops
        self._cp, attn_tp = mesh.axis("cp"), mesh.axis("attn_tp")
        self._shares = Shares(attn_tp)
        self._exchange = RowExchange(mesh.axis("lmhead_tp"), attn_tp if self._cp.size == 1 else self._cp)
        group = self._exchange.group
        self._own = share_of(config.vocab_size, group)
        name = EMBEDDING_NAME if config.tie_word_embeddings else "lm_head"
        self.norm = RmsNorm(context, "model.norm", width=config.hidden_size, eps=config.rms_norm_eps)
        piece = Piece(name, config.vocab_size, self._own if group.size > 1 else None)
        self.head = Linear(context, config.hidden_size, piece)

    @property
    def is_split(self) -> bool:
        """Whether no rank has the logits of all ids."""
        return self._exchange.group.size > 1

    def final(self, hidden: Tensor, inputs: ForwardInputs) -> Tensor:
        """The output rows of the stream [T, hidden] (see ``rows``) behind the final norm: [R, hidden]."""
        self._ops.prefetch((self.head.weight,), hidden)
        normed: Tensor = self.norm(self.rows(hidden, inputs))
        return normed

    def forward(self, final: Tensor, rows: Rows) -> Tensor:
        """[R, hidden] behind a norm -> logits [R, V] fp32."""
        return self._exchange.joined(self.head(self._exchange.spread(final, rows)), rows).float()

    def candidates(self, final: Tensor, rows: Rows, count: int) -> tuple[Tensor, Tensor]:
        """The logits [R, n] fp32 of the ids [R, n] among which are the ``count`` best of each row, ids ascending.

        Of equal logits the lower id is the better one. Every rank finds the best of its own ids and only these travel.
        """
        logits = self.head(self._exchange.spread(final, rows)).float()
        count = min(count, logits.shape[1])
        if count == 1:
            best = logits.argmax(-1, keepdim=True)
        else:
            best = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort(-1).values
        found = torch.cat((logits.gather(1, best).view(torch.int32), (best + self._own.start).int()), 1)
        values, ids = self._exchange.joined(found, rows).view(len(final), self._exchange.group.size, 2, count).unbind(2)
        return values.flatten(1).contiguous().view(torch.float32), ids.flatten(1).long()

    def best(self, final: Tensor, rows: Rows) -> Tensor:
        """The id [R] of the best logit of each row, the lowest of equal ones."""
        if not self.is_split:
            return self.forward(final, rows).argmax(-1)
        values, ids = self.candidates(final, rows, 1)
        return ids.gather(1, values.argmax(-1, keepdim=True)).squeeze(1)

    def rows(self, hidden: Tensor, inputs: ForwardInputs) -> Tensor:
        """The output rows of the stream [T, hidden], [R, hidden], on all ranks of the stage that want them.

        Row numbers are those of all rows of this rank's group, -1 for a row of another rank of ``cp``: each row is one
        rank's and zero on the others, so the sum is an exact exchange. The device finds out which: nobody waits for it.
        """
        hidden, wanted = self._shares.leave(hidden, inputs.rows), inputs.output_rows
        if wanted is None:
            return hidden
        if self._cp.size == 1:
            return hidden[wanted]
        own = padded(hidden, len(hidden) + 1)[torch.where(wanted >= 0, wanted, len(hidden))]
        return self._cp.all_reduce(own)

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Norm, and the rows of the head that are here."""
        yield from self.norm.weight_specs()
        yield from self.head.weight_specs()


def vectors_of(ids: Tensor, table: Tensor, first: int) -> Tensor:
    """Rows of a table whose row 0 belongs to id ``first``; zeros for ids that it has no row for: [..., width]."""
    places = ids - first
    is_here = (places >= 0) & (places < len(table))
    return functional.embedding(torch.where(is_here, places, 0), table).masked_fill(~is_here.unsqueeze(-1), 0.0)
