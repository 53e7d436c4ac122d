"""A step as pieces: what each part of the model computes on the busiest rank, in the order of the model.

Puts counts (``work.py``) together for so many rows. Knows no times, and no exchange between ranks.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.sizing.weights import DTYPE_BYTES
from longcat_pd.sizing.work import Counter, LayerKind, Load, Work, is_int8, kind_of

DRAFT_MLP = "model.mtp.layers.0.transformer_layer.mlp.gate_proj"


class Piece(NamedTuple):
    """One part of a step."""

    part: str
    work: Work


class Layer(NamedTuple):
    """A decoder layer: its first attention, and the two ways that may go beside each other behind it."""

    first: tuple[Piece, ...]
    dense: tuple[Piece, ...]
    experts: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Step:
    """Rows of one step of one instance, on its busiest rank.

    Attributes:
        load: of every attention.
        share: rows that a rank hands in where rows are divided.
        level: the same on average over the ranks of a stage.
        sampled: rows of a group that want logits.
        is_split: between attentions a rank keeps its share of the rows only.
    """

    load: Load
    share: float
    level: float
    sampled: float
    is_split: bool = False


@dataclass(frozen=True)
class Pieces:
    """Of one instance, whose ``spec`` is resolved."""

    spec: InstanceSpec
    model: ModelConfig

    @cached_property
    def counter(self) -> Counter:
        """What counts its operations."""
        return Counter(model=self.model, parallel=self.spec.parallel, width=DTYPE_BYTES[self.spec.model.dtype])

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Of every decoder layer."""
        return tuple(kind_of(self.model, layer) for layer in range(self.model.num_layers))

    def layers_of(self, stage: int) -> Mapping[LayerKind, int]:
        """How many layers of each kind a pipeline stage has."""
        sizes = self.spec.parallel.layers_per_stage
        first = sum(sizes[:stage])
        return Tally(self.kinds[first : first + sizes[stage]])

    def layer(self, step: Step, kind: LayerKind) -> Layer:
        """A decoder layer of a step."""
        mlp = self._mlp(step, has_int8=kind.has_int8_mlps)
        return Layer(
            first=self._attention(step.load, owns_index=self.model.owns_index(0)),
            dense=(mlp, *self._attention(step.load, owns_index=self.model.owns_index(1)), mlp),
            experts=self._experts(step, kind),
        )

    def embedding(self, step: Step) -> Iterator[Piece]:
        """In front of the first layer."""
        rows = step.share if step.is_split else step.load.rows
        yield Piece("embedding", self.counter.words(rows))
        if self.model.over_embedding is not None:
            own = step.share if self.spec.parallel.ngram_embed_tp_size > 1 else rows
            yield Piece("n-grams", self.counter.ngrams(own))

    def head(self, step: Step) -> Iterator[Piece]:
        """Behind the last layer."""
        if step.sampled:
            yield Piece("head", self._head(step.sampled))

    def drafts(self, step: Step) -> Iterator[Piece]:
        """One round for each draft, a row a sequence, and what was certain written behind them. Of decode steps."""
        rounds = self.spec.engine.num_draft_tokens
        if not rounds:
            return
        rows = step.sampled / (1 + rounds)
        alone = replace(step, load=replace(step.load, rows=rows), share=-(-rows // self.spec.parallel.attn_tp_size))
        shares_keys = self.model.draft is None or self.model.draft.dsa_mtp_cli
        for number in range(rounds):
            owns = self.model.owns_index(2 * self.model.num_layers) and not (number and shares_keys)
            yield Piece("drafts", self.counter.joined(rows))
            yield from (piece._replace(part="drafts") for piece in self._attention(alone.load, owns_index=owns))
            yield self._mlp(alone, has_int8=is_int8(self.model, DRAFT_MLP))._replace(part="drafts")
            yield Piece("drafts", self._head(rows))
        yield from self.draft_cache(rows * rounds)

    def draft_cache(self, rows: float) -> Iterator[Piece]:
        """Entries of the draft layer for rows whose tokens are known."""
        if self.spec.engine.num_draft_tokens:
            yield Piece("drafts", self.counter.joined(rows) + self.counter.written(rows))

    def _attention(self, load: Load, *, owns_index: bool) -> tuple[Piece, ...]:
        return tuple(Piece(part, work) for part, work in self.counter.attention(load, owns_index=owns_index).items())

    def _mlp(self, step: Step, *, has_int8: bool) -> Piece:
        return Piece("dense", self.counter.mlp(self._rows_of(step, self.spec.parallel.dense_tp_size), has_int8=has_int8))

    def _experts(self, step: Step, kind: LayerKind) -> tuple[Piece, ...]:
        parallel = self.spec.parallel
        is_shared = parallel.ep_size > 1
        own = step.share if is_shared or step.is_split else step.load.rows
        met = step.level * parallel.ep_size if is_shared else self._rows_of(step, parallel.moe_tp_size)
        moving = Work(operators=12 if is_shared and parallel.moe_dispatch in ("all_to_all", "two_level") else 4)
        experts = self.counter.experts(met, has_int8=kind.has_int8_experts) + moving
        return Piece("router", self.counter.router(own)), Piece("experts", experts)

    def _head(self, rows: float) -> Work:
        parallel = self.spec.parallel
        same = parallel.cp_size if parallel.cp_size > 1 else parallel.attn_tp_size
        is_met = parallel.lmhead_tp_size > same
        return self.counter.head(-(-rows // same) * parallel.lmhead_tp_size if is_met else rows)

    def _rows_of(self, step: Step, size: int) -> float:
        """Rows that the ranks of a part's axis compute together."""
        is_met = step.is_split or size > self.spec.parallel.attn_tp_size
        return step.share * size if is_met else step.load.rows
