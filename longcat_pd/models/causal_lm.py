"""CausalLM: one pipeline stage of the language model, embedding to head, for every member of the family."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.models.batch import ForwardInputs, Rows
from longcat_pd.models.context import ModelContext
from longcat_pd.models.decoder import Stack
from longcat_pd.models.embedding import LmHead, VocabEmbedding
from longcat_pd.models.footprint import Footprint, footprint
from longcat_pd.models.mtp import Chosen, DraftLayer
from longcat_pd.models.ngram import NgramEmbedding
from longcat_pd.models.preparing import prepare_all
from longcat_pd.models.weight_spec import WeightSpec


class CausalLM(nn.Module):
    """A stage's layers, with the embedding on the first stage and final norm, head and draft layer on the last."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        config = context.config
        has_ngrams = config.over_embedding is not None
        self.word = VocabEmbedding(context) if context.is_first and not has_ngrams else None
        self.ngram = NgramEmbedding(context) if context.is_first and has_ngrams else None
        self.stack = Stack(context)
        self.head = LmHead(context) if context.is_last else None
        self._draft_number = context.config.num_layers
        self.draft = DraftLayer(context) if context.is_last and context.has_draft else None

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Every checkpoint tensor (or part of one) that this rank holds."""
        for module in (self.word, self.ngram, self.stack, self.head, self.draft):
            if module is not None:
                yield from module.weight_specs()

    def prepare(self) -> None:
        """Weights take the form that the operators want. Once, when they are loaded."""
        for part in self.children():
            prepare_all(part)

    def memory(self, cache: KVCache) -> Footprint:
        """Bytes that this rank allocated, by part (see ``footprint``); ``cache`` is the context's."""
        ngram = self.ngram
        word = None if ngram is None else ngram.word
        host_rows = ngram.rows if ngram is not None and ngram.has_host_rows else None
        return footprint(self, cache, ngram=ngram, word=word, draft=self.draft, host_rows=host_rows)

    def forward(self, inputs: ForwardInputs, hidden: Tensor | None, on_layer: Callable[[int], None] | None) -> Tensor:
        """The stream [T, hidden] behind this stage's layers.

        ``hidden`` is what the stage before sent; the first stage takes None and embeds token ids. ``on_layer(l)`` is called
        after each layer, when its cache entries are written; the draft layer, number ``num_layers``, is the last.
        """
        x = self._embed(inputs) if hidden is None else hidden
        out: Tensor = self.stack(x, inputs, on_layer)
        if self.draft is not None and inputs.next_token_ids is not None:
            assert self.head is not None
            self.write_drafts(self.head.norm(out), inputs)
            if on_layer is not None:
                on_layer(self._draft_number)
        return out

    def final(self, hidden: Tensor, inputs: ForwardInputs) -> Tensor:
        """[R, hidden]: output rows of ``forward``'s result behind the final norm. Last stage only.

        All ranks of the stage call it, also without rows; those of ``cp``, and those of a group, get the same.
        """
        assert self.head is not None, "only the last stage has a head"
        return self.head.final(hidden, inputs)

    def logits(self, final: Tensor, rows: Rows) -> Tensor:
        """[R, V] fp32 of final hidden states, the target's or a draft's; equal on all ranks that have the rows."""
        assert self.head is not None, "only the last stage has a head"
        logits: Tensor = self.head(final, rows)
        return logits

    def candidates(self, final: Tensor, rows: Rows, count: int) -> tuple[Tensor, Tensor]:
        """Logits and ids [R, n] among which are the ``count`` best of each row (see ``LmHead.candidates``)."""
        assert self.head is not None, "only the last stage has a head"
        return self.head.candidates(final, rows, count)

    def best(self, final: Tensor, rows: Rows) -> Tensor:
        """The id [R] with the best logit of each row."""
        assert self.head is not None, "only the last stage has a head"
        return self.head.best(final, rows)

    @property
    def has_split_head(self) -> bool:
        """Whether logits of all ids have to be brought together."""
        return self.head is not None and self.head.is_split

    def write_drafts(self, final: Tensor, inputs: ForwardInputs) -> None:
        """Cache entries of the draft layer for this rank's rows, from their final hidden states [T, hidden]."""
        assert self.draft is not None
        self.draft.write(final, inputs)

    def draft_step(self, final: Tensor, inputs: ForwardInputs, chosen: Chosen | None) -> tuple[Tensor, Chosen]:
        """One draft step of this rank's rows: the next final hidden states [R, hidden] of the output rows.

        ``chosen``: what the first step of this round attended to; None in the first step.
        """
        assert self.draft is not None and self.head is not None
        out, chosen = self.draft(final, inputs, chosen)
        return self.head.rows(out, inputs), chosen

    def _embed(self, inputs: ForwardInputs) -> Tensor:
        if self.ngram is not None:
            assert inputs.ngram_windows is not None, "an n-gram embedding needs windows"
            embedded: Tensor = self.ngram(inputs.token_ids, inputs.ngram_windows, inputs.rows)
            return embedded
        assert self.word is not None, "only the first stage embeds"
        vectors: Tensor = self.word(inputs.token_ids, inputs.rows)
        return vectors
