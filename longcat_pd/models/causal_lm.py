"""CausalLM: one pipeline stage of the language model, embedding to head, for every member of the family."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from longcat_pd.models.batch import ForwardInputs
from longcat_pd.models.context import ModelContext
from longcat_pd.models.decoder import Stack
from longcat_pd.models.embedding import LmHead, VocabEmbedding
from longcat_pd.models.ngram import NgramEmbedding
from longcat_pd.models.weight_spec import WeightSpec


class CausalLM(nn.Module):
    """A stage's layers, with the embedding on the first stage and final norm and head on the last."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        config = context.config
        has_ngrams = config.over_embedding is not None
        self.word = VocabEmbedding(context) if context.is_first and not has_ngrams else None
        self.ngram = NgramEmbedding(context) if context.is_first and has_ngrams else None
        self.stack = Stack(context)
        self.head = LmHead(context) if context.is_last else None

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Every checkpoint tensor (or part of one) that this rank holds."""
        for module in (self.word, self.ngram, self.stack, self.head):
            if module is not None:
                yield from module.weight_specs()

    def forward(self, inputs: ForwardInputs, hidden: Tensor | None, on_layer: Callable[[int], None] | None) -> Tensor:
        """[T, hidden] behind this stage's layers.

        ``hidden`` is what the stage before sent; the first stage takes None and embeds token ids. ``on_layer(l)`` is called
        after each layer, when its cache entries are written.
        """
        x = self._embed(inputs) if hidden is None else hidden
        out: Tensor = self.stack(x, inputs, on_layer)
        return out

    def logits(self, hidden: Tensor, output_rows: Tensor) -> Tensor:
        """[R, V] fp32 of rows of ``forward``'s result, equal on all ranks of the stage. Last stage only.

        A row number -1 belongs to another rank of the ``cp`` axis; all its ranks call with equally many rows.
        """
        assert self.head is not None, "only the last stage has a head"
        logits: Tensor = self.head(hidden, output_rows)
        return logits

    def _embed(self, inputs: ForwardInputs) -> Tensor:
        if self.ngram is not None:
            assert inputs.ngram_windows is not None, "an n-gram embedding needs windows"
            embedded: Tensor = self.ngram(inputs.token_ids, inputs.ngram_windows)
            return embedded
        assert self.word is not None, "only the first stage embeds"
        vectors: Tensor = self.word(inputs.token_ids)
        return vectors
