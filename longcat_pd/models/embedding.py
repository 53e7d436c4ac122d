"""Vocabulary embedding and language-model head, whole on the ranks of their stage."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional

from longcat_pd.models.context import ModelContext
from longcat_pd.models.linear import Linear, Piece, RmsNorm, copy_into, empty_parameter
from longcat_pd.models.weight_spec import WeightSpec

EMBEDDING_NAME = "model.embed_tokens"


class VocabEmbedding(nn.Module):
    """One vector for each token id."""

    def __init__(self, context: ModelContext, name: str = EMBEDDING_NAME) -> None:
        super().__init__()
        self._name = name
        self.weight = empty_parameter(context, context.config.vocab_size, context.config.hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden]."""
        return functional.embedding(token_ids, self.weight)

    def weight_specs(self) -> Iterator[WeightSpec]:
        """The table."""
        yield WeightSpec(f"{self._name}.weight", tuple(self.weight.shape), copy_into(self.weight))


class LmHead(nn.Module):
    """Final norm, and logits of the rows that want them, equal on all ranks of the stage."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        config = context.config
        self._group = context.mesh.axis("cp")
        name = EMBEDDING_NAME if config.tie_word_embeddings else "lm_head"
        self.norm = RmsNorm(context, "model.norm", width=config.hidden_size, eps=config.rms_norm_eps)
        self.head = Linear(context, config.hidden_size, Piece(name, config.vocab_size))

    def final(self, hidden: Tensor, output_rows: Tensor | None) -> Tensor:
        """Rows of [T, hidden] (see ``rows``) behind the final norm: [R, hidden]."""
        normed: Tensor = self.norm(self.rows(hidden, output_rows))
        return normed

    def forward(self, final: Tensor) -> Tensor:
        """[R, hidden] behind a norm -> logits [R, V] fp32."""
        logits: Tensor = self.head(final)
        return logits.float()

    def rows(self, hidden: Tensor, output_rows: Tensor | None) -> Tensor:
        """[T, hidden] and [R] row numbers, -1 for rows of another rank -> [R, hidden] on all ranks. None: all rows.

        Each row is one rank's and zero on the others, so the sum is an exact exchange.
        """
        if output_rows is None:
            return hidden
        if self._group.size == 1:
            return hidden[output_rows]
        own = hidden.new_zeros((len(output_rows), hidden.shape[1]))
        is_here = output_rows >= 0
        own[is_here] = hidden[output_rows[is_here]]
        return self._group.all_reduce(own)

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Norm and head."""
        yield from self.norm.weight_specs()
        yield from self.head.weight_specs()
