"""Over-embedding: the word's vector averaged with vectors of the n-grams that end at it.

Owns the rows of the n-gram tables that are here, all tables one behind the other, and their projections. Knows windows of
token ids, no requests: where the look-back comes from is the business of ``engine/inputs.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional

from longcat_pd.models.batch import Rows
from longcat_pd.models.context import ModelContext
from longcat_pd.models.embedding import VocabEmbedding, vectors_of
from longcat_pd.models.linear import copy_into, empty_parameter
from longcat_pd.models.preparing import prepared
from longcat_pd.models.rows import RowExchange
from longcat_pd.models.weight_spec import WeightSpec


class NgramEmbedding(nn.Module):
    """``(word + sum over tables of projection(row)) / (tables + 1)``.

    The projections stand side by side, so that all of them are one product with the looked-up vectors side by side. Each
    rank of ``ngram_embed_tp`` has a run of the rows of all tables: it looks up what the others ask for, and gets back what
    its own share of rows asked for. Rows on the host are looked up there: numbers go to it, vectors come back.
    """

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        config, tables = context.config, context.config.over_embedding
        assert tables is not None
        self._ops = context.ops
        self._tables = tables
        self._width = config.oe_width
        self._starts = (0, *accumulate(tables.table_sizes))
        mesh = context.mesh
        self._exchange = RowExchange(mesh.axis("ngram_embed_tp"), mesh.axis("attn_tp"), by_shares=True)
        self._own = run_of(self._starts[-1], self._exchange.group.size, self._exchange.group.rank)
        self.word = VocabEmbedding(context)
        self.has_host_rows = context.host is not None
        self.rows = empty_parameter(context, len(self._own), self._width, device=context.host)
        self.projection = empty_parameter(context, tables.num_tables * self._width, config.hidden_size)

        def constant(values: object) -> nn.Buffer:
            return nn.Buffer(torch.tensor(values, dtype=torch.int64, device=context.device), persistent=False)

        self._powers = constant([tables.powers_of(b) for b in range(tables.num_tables)])
        self._moduli = constant(tables.table_sizes)
        self._offsets = constant(self._starts[:-1])
        self._eos = constant(config.eos_token_id)
        self._ignored = nn.Buffer(constant(tables.ignored_ranges).view(-1, 2), persistent=False)

    def forward(self, token_ids: Tensor, windows: Tensor, rows: Rows) -> Tensor:
        """[T] and [T, N] (see ``ForwardInputs.ngram_windows``) -> the stream [T, hidden]."""
        group, shares, word = self._exchange.group, self._exchange.shares, self.word(token_ids, rows)
        if group.size == 1:
            return self._mean(self._looked_up(self._numbers(shares.enter(windows, rows))), word)
        ids = group.all_gather(self._numbers(shares.take(windows, rows)))
        vectors = self._exchange.total_share(self._looked_up(ids), rows)
        return shares.give(self._mean(vectors, shares.hand_in(word, rows)), rows)

    def _looked_up(self, ids: Tensor) -> Tensor:
        """[rows, tables] -> [rows, tables, width], zeros where another rank has the row; found where the rows are kept."""
        there = ids.to(self.rows.device)
        if self._exchange.group.size == 1:
            return functional.embedding(there, self.rows).to(ids.device)
        return vectors_of(there, self.rows, self._own.start).to(ids.device)

    def _numbers(self, windows: Tensor) -> Tensor:
        """Row numbers [T, tables], counted over all tables."""
        ids = self._ops.ngram_ids(windows, powers=self._powers, moduli=self._moduli, eos=self._eos, ignored=self._ignored)
        return ids + self._offsets

    def _mean(self, vectors: Tensor, word: Tensor) -> Tensor:
        """Of the word's vector and those of the tables [T, tables, width], projected."""
        total: Tensor = self._ops.linear(vectors.flatten(1), self.projection).float() + word.float()
        return (total / (self._tables.num_tables + 1)).to(self.rows.dtype)

    def prepare(self) -> None:
        """See Preparable."""
        self.projection = prepared(self._ops, self.projection, "linear")

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Word table, n-gram rows that are here and projections, spelled as the checkpoint's family does."""
        yield from self.word.weight_specs()
        hidden, width = self.projection.shape[1], self._width
        for b, rows in enumerate(self._tables.table_sizes):
            if self._tables.tensor_family == "oe_embed":
                table, projection = f"model.oe_embed_tokens{b}", f"model.oe_embed_proj{b}"
            else:
                table, projection = f"model.ngram_embeddings.embedders.{b}", f"model.ngram_embeddings.post_projs.{b}"
            start, own = self._starts[b], self._own
            here = range(max(own.start, start), min(own.stop, start + rows))
            if here:
                region = (slice(here.start - start, here.stop - start), slice(0, width)) if len(here) < rows else ()
                own_rows = self.rows[here.start - own.start : here.stop - own.start]
                yield WeightSpec(f"{table}.weight", (rows, width), copy_into(own_rows), region)
            own_columns = self.projection[b * width : (b + 1) * width].t()
            yield WeightSpec(f"{projection}.weight", (hidden, width), copy_into(own_columns))


def run_of(total: int, size: int, rank: int) -> range:
    """The part of ``total`` rows that a rank has: runs of equal length, as far as they go."""
    each = -(-total // size)
    return range(min(rank * each, total), min((rank + 1) * each, total))
