"""Over-embedding: the word's vector averaged with vectors of the n-grams that end at it.

Owns the n-gram tables, all of them one behind the other, and their projections. Knows windows of token ids, no requests:
where the look-back comes from is the business of ``engine/inputs.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional

from longcat_pd.models.context import ModelContext
from longcat_pd.models.embedding import VocabEmbedding
from longcat_pd.models.linear import copy_into, empty_parameter
from longcat_pd.models.weight_spec import WeightSpec


class NgramEmbedding(nn.Module):
    """``(word + sum over tables of projection(row)) / (tables + 1)``.

    The projections stand side by side, so that all of them are one product with the looked-up vectors side by side.
    """

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        config, tables = context.config, context.config.over_embedding
        assert tables is not None
        self._ops = context.ops
        self._tables = tables
        self._width = config.oe_width
        self._starts = (0, *accumulate(tables.table_sizes))
        self.word = VocabEmbedding(context)
        self.rows = empty_parameter(context, self._starts[-1], self._width)
        self.projection = empty_parameter(context, tables.num_tables * self._width, config.hidden_size)

        def constant(values: object) -> nn.Buffer:
            return nn.Buffer(torch.tensor(values, dtype=torch.int64, device=context.device), persistent=False)

        self._powers = constant([tables.powers_of(b) for b in range(tables.num_tables)])
        self._moduli = constant(tables.table_sizes)
        self._offsets = constant(self._starts[:-1])
        self._eos = constant(config.eos_token_id)
        self._ignored = nn.Buffer(constant(tables.ignored_ranges).view(-1, 2), persistent=False)

    def forward(self, token_ids: Tensor, windows: Tensor) -> Tensor:
        """[T] and [T, N] (see ``ForwardInputs.ngram_windows``) -> [T, hidden]."""
        ids = self._ops.ngram_ids(windows, powers=self._powers, moduli=self._moduli, eos=self._eos, ignored=self._ignored)
        vectors = functional.embedding(ids + self._offsets, self.rows).flatten(1)
        total: Tensor = self._ops.linear(vectors, self.projection).float() + self.word(token_ids).float()
        return (total / (self._tables.num_tables + 1)).to(self.rows.dtype)

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Word table, n-gram tables and projections, spelled as the checkpoint's family does."""
        yield from self.word.weight_specs()
        hidden, width = self.projection.shape[1], self._width
        for b, rows in enumerate(self._tables.table_sizes):
            if self._tables.tensor_family == "oe_embed":
                table, projection = f"model.oe_embed_tokens{b}", f"model.oe_embed_proj{b}"
            else:
                table, projection = f"model.ngram_embeddings.embedders.{b}", f"model.ngram_embeddings.post_projs.{b}"
            own_rows = self.rows[self._starts[b] : self._starts[b + 1]]
            own_columns = self.projection[b * width : (b + 1) * width].t()
            yield WeightSpec(f"{table}.weight", (rows, width), copy_into(own_rows))
            yield WeightSpec(f"{projection}.weight", (hidden, width), copy_into(own_columns))
