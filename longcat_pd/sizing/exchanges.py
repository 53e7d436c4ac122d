"""Every exchange of a step between the ranks of an instance: which axis, which kind, how large, how often.

Follows the modules of ``models`` one by one, from shapes alone. What a row's experts decide (``all_to_all``, ``two_level``)
and what a device's own operators move inside (``fused``) is told as the level case and marked as an estimate; everything
else is what ``parallel/traffic.py`` counts, to the byte. Knows no machines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.parallel.layout import AxisName, ParallelLayout
from longcat_pd.sizing.weights import DTYPE_BYTES, FP32

Kind = Literal["all_gather", "all_to_all", "all_to_all_rows", "reduce_scatter", "all_reduce", "send"]
Part = Literal["embedding", "n-grams", "attention", "indexer", "dense", "experts", "head", "drafts", "stages"]

INT64, INT32, FP64 = 8, 4, 8
_WHOLE_SUM_BYTES = 65536  # up to so much every rank sends all it has (parallel/pairwise.py)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One collective that all ranks of a group take part in, or a message to the next one; ``times`` of them in a step.

    ``elements`` of ``width`` bytes are what each rank brings.
    """

    part: Part
    axis: AxisName
    kind: Kind
    elements: int
    width: int
    times: int = 1
    is_estimate: bool = False

    def bytes_each(self, size: int, *, is_native: bool) -> int:
        """What a rank sends to every other rank of its group of ``size`` (a message: to the next), all times together.

        ``is_native``: by collectives of the backend, of which the definition counts, as for HCCL.
        """
        whole = self.elements * self.width
        part = -(-self.elements // size) * self.width
        if self.kind in ("all_gather", "send"):
            each = whole
        elif self.kind == "all_reduce":
            each = whole if not is_native and whole <= _WHOLE_SUM_BYTES else 2 * part
        else:
            each = part
        return each * self.times


@dataclass(frozen=True, slots=True)
class RowCount:
    """As ``models.batch.Rows``."""

    num: int
    share: int
    is_split: bool = False


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One step of prompts on a rank: its ``rows``, how many ``outputs`` end a prompt, tokens that sequences have behind it.

    ``gathered``: tokens of the blocks that each rank of cp brings, all sequences together.
    """

    rows: RowCount
    outputs: int
    context: int
    gathered: int = 0


class StepExchanges:
    """The exchanges of one instance's steps. ``spec`` is resolved."""

    def __init__(self, spec: InstanceSpec, model: ModelConfig) -> None:
        self._model = model
        self._parallel = spec.parallel
        self._layout = ParallelLayout.of(spec.parallel)
        self._num_drafts = spec.engine.num_draft_tokens
        self._width = DTYPE_BYTES[spec.model.dtype]
        is_steady = model.quantization is not None and spec.device == "cpu"
        self._sums = FP64 if is_steady else FP32

    def decode(self, num_seqs: int, *, context: int, num_candidates: int = 1) -> tuple[Exchange, ...]:
        """One decode step of ``num_seqs`` rows of each group, padding included, which see ``context`` tokens at most.

        ``num_candidates``: as ``engine.slots.candidates_wanted`` has it: 1: every row takes its best id; 0: whole logits.
        """
        return tuple(item for item in self._decode(num_seqs, context, num_candidates) if item.elements and item.times)

    def prefill(self, stage: int, chunk: Chunk, *, num_candidates: int = 1) -> tuple[Exchange, ...]:
        """One step of prompts on a pipeline stage."""
        return tuple(item for item in self._prefill(stage, chunk, num_candidates) if item.elements and item.times)

    def _decode(self, num_seqs: int, context: int, num_candidates: int) -> Iterator[Exchange]:
        window = 1 + self._num_drafts
        one, rows = self._even(num_seqs), self._even(num_seqs * window)
        chunk = Chunk(rows=rows, outputs=rows.num, context=context + self._num_drafts)
        for number in range(self._num_drafts):
            yield from _as_drafts(self._round(number, replace(chunk, rows=one, outputs=one.num)))
        yield from self._embed(rows)
        yield from self._layers(self._model.num_layers, chunk)
        yield from self._head(rows, num_candidates)
        if self._num_drafts:
            yield from _as_drafts(self._words(self._even(num_seqs * self._num_drafts)))

    def _round(self, number: int, chunk: Chunk) -> Iterator[Exchange]:
        draft = self._model.draft
        shares_keys = draft is None or draft.dsa_mtp_cli
        yield from self._words(chunk.rows)
        yield from self._attention(2 * self._model.num_layers, chunk, selects=not number or not shares_keys)
        yield from self._dense(f"{_DRAFT}.mlp", chunk.rows)
        if self._size("lmhead_tp") > 1:
            yield from self._head(chunk.rows, 1)

    def _prefill(self, stage: int, chunk: Chunk, num_candidates: int) -> Iterator[Exchange]:
        parallel, rows = self._parallel, chunk.rows
        if stage == 0:
            yield from self._embed(rows)
        yield from self._layers(parallel.layers_per_stage[stage], chunk, first=sum(parallel.layers_per_stage[:stage]))
        if stage < parallel.pp_size - 1:
            yield self._item("stages", "pp", "send", rows.num * self._model.hidden_size)
            return
        if self._num_drafts:
            yield from _as_drafts(self._words(rows))
            yield from _as_drafts(self._whole(rows))
        if not chunk.outputs:
            return
        hidden = self._model.hidden_size
        if rows.is_split:
            yield self._item("head", "attn_tp", "all_gather", rows.share * hidden)
        if self._size("cp") > 1:
            yield self._item("head", "cp", "all_reduce", chunk.outputs * hidden)
        yield from self._head(RowCount(chunk.outputs, self._even(chunk.outputs).share), num_candidates)

    def _even(self, num: int) -> RowCount:
        return RowCount(num, -(-num // self._size("attn_tp")))

    def _size(self, axis: AxisName) -> int:
        return self._layout.axis(axis).size

    def _item(
        self, part: Part, axis: AxisName, kind: Kind, elements: int, *, width: int = 0, is_estimate: bool = False
    ) -> Exchange:
        """Nothing moves where an axis has one rank."""
        moved = elements if self._size(axis) > 1 else 0
        width = width or self._width
        return Exchange(part=part, axis=axis, kind=kind, elements=moved, width=width, is_estimate=is_estimate)

    def _embed(self, rows: RowCount) -> Iterator[Exchange]:
        yield from self._words(rows)
        tables = self._model.over_embedding
        size, hidden = self._size("ngram_embed_tp"), self._model.hidden_size
        if tables is None or size == 1:
            return
        yield self._item("n-grams", "ngram_embed_tp", "all_gather", rows.share * tables.num_tables, width=INT64)
        yield self._item("n-grams", "ngram_embed_tp", "reduce_scatter", size * rows.share * hidden)
        if not rows.is_split:
            yield self._item("n-grams", "attn_tp", "all_gather", rows.share * hidden)

    def _words(self, rows: RowCount) -> Iterator[Exchange]:
        meeting = self._meeting("embedding", "embed_tp", rows)
        yield from meeting.spread(1, INT64)
        yield from meeting.total(self._model.hidden_size, self._width)

    def _layers(self, count: int, chunk: Chunk, *, first: int = 0) -> Iterator[Exchange]:
        """All layers of a stage; they are alike but for what is stored in int8."""
        for layer in range(first, first + count):
            for place in (0, 1):
                attention = 2 * layer + place
                yield from self._attention(attention, chunk, selects=self._model.owns_index(attention))
                yield from self._dense(f"model.layers.{layer}.mlps.{place}", chunk.rows)
            yield from self._experts(chunk.rows)

    def _whole(self, rows: RowCount) -> Iterator[Exchange]:
        yield from self._meeting("attention", "attn_tp", rows).spread(self._model.hidden_size, self._width)

    def _attention(self, attention: int, chunk: Chunk, *, selects: bool) -> Iterator[Exchange]:
        model, rows = self._model, chunk.rows
        yield from self._whole(rows)
        if selects and model.owns_index(attention):
            yield from self._selection(chunk)
        latent, rope, heads = model.kv_lora_rank, model.qk_rope_head_dim, model.num_attention_heads
        if self._size("cp") > 1:
            yield self._item("attention", "cp", "all_gather", chunk.gathered * (latent + rope))
        yield self._item("attention", "kvp", "all_gather", rows.num * heads // self._size("kvp") * (latent + rope))
        yield self._item("attention", "kvp", "all_to_all", rows.num * heads * (latent + 1), width=self._sums)
        yield from self._summed("attention", "attn_tp", rows, heads * model.v_head_dim)

    def _selection(self, chunk: Chunk) -> Iterator[Exchange]:
        indexer = self._model.indexer
        if indexer is None or chunk.context <= indexer.index_topk:
            return
        budget = indexer.index_topk - indexer.index_init_tokens - indexer.index_local_tokens
        if self._size("cp") > 1:
            yield self._item("indexer", "cp", "all_gather", chunk.gathered * indexer.index_head_dim)
        yield self._item("indexer", "kvp", "all_gather", 2 * chunk.rows.num * budget, width=INT32)

    def _dense(self, name: str, rows: RowCount) -> Iterator[Exchange]:
        yield from self._meeting("dense", "dense_tp", rows).spread(self._model.hidden_size, self._width)
        yield from self._summed("dense", "dense_tp", rows, self._model.ffn_hidden_size)

    def _summed(self, part: Part, axis: AxisName, rows: RowCount, inner: int) -> Iterator[Exchange]:
        """A map whose input is spread over the axis; where anything is int8 inputs are gathered instead of sums made."""
        meeting, hidden = self._meeting(part, axis, rows), self._model.hidden_size
        if self._model.quantization is None:
            yield from meeting.total(hidden, self._width)
            return
        computed = self._size(axis) * rows.share if meeting.meets and part != "attention" else rows.num
        yield self._item(part, axis, "all_gather", computed * (inner // self._size(axis)))
        yield from meeting.joined(hidden, self._width)

    def _experts(self, rows: RowCount) -> Iterator[Exchange]:
        model, size = self._model, self._size("ep")
        hidden, routing = model.hidden_size, 2 * model.moe_topk
        if size == 1:
            meeting = self._meeting("experts", "moe_tp", rows)
            yield from meeting.spread(routing, INT32)
            yield from meeting.spread(hidden, self._width)
            yield from meeting.total(hidden, self._sums)
            return
        dispatch = self._parallel.moe_dispatch
        if dispatch == "gather":
            yield self._item("experts", "ep", "all_gather", rows.share * routing, width=INT32)
            yield self._item("experts", "ep", "all_gather", rows.share * hidden)
            yield self._item("experts", "ep", "reduce_scatter", size * rows.share * hidden, width=self._sums)
        elif dispatch == "two_level":
            nodes = self._size("node")
            yield self._item("experts", "node", "all_gather", 1 if rows.share else 0, width=INT32)
            yield self._item("experts", "node", "all_gather", rows.share * hidden)
            yield from self._couriers("local", nodes * rows.share, model.n_routed_experts // nodes)
            yield self._item("experts", "node", "reduce_scatter", nodes * rows.share * hidden, width=self._sums)
        else:
            yield from self._couriers("ep", rows.share, model.n_routed_experts)
        if not rows.is_split:
            yield self._item("experts", "attn_tp", "all_gather", rows.share * hidden)

    def _couriers(self, axis: AxisName, num_rows: int, num_experts: int) -> Iterator[Exchange]:
        """Of ``num_rows`` those that choose among ``num_experts``, level over the ranks; the fused pair sends int8."""
        model = self._model
        chosen = num_rows * model.moe_topk * num_experts // model.num_router_outputs
        is_fused = self._parallel.moe_dispatch == "fused"
        out = 1 if is_fused and model.quantization is not None else self._width
        if not is_fused:
            yield self._item("experts", axis, "all_to_all", num_experts, width=INT32)
        for width in (out, self._width):
            yield self._item("experts", axis, "all_to_all_rows", chosen * model.hidden_size, width=width, is_estimate=True)

    def _head(self, rows: RowCount, num_candidates: int) -> Iterator[Exchange]:
        """Output rows to logits, or to candidates of each part of the vocabulary."""
        same: AxisName = "attn_tp" if self._size("cp") == 1 else "cp"
        size, vocabulary = self._size("lmhead_tp"), self._model.vocab_size
        meeting = replace(self._meeting("head", "lmhead_tp", rows), same=same, same_size=self._size(same))
        yield from meeting.spread(self._model.hidden_size, self._width)
        if num_candidates and size > 1:
            yield from meeting.joined(size * 2 * min(num_candidates, vocabulary // size), INT32)
        else:
            yield from meeting.joined(vocabulary, self._width)

    def _meeting(self, part: Part, axis: AxisName, rows: RowCount) -> _Meeting:
        same: AxisName = "attn_tp"
        return _Meeting(part=part, axis=axis, size=self._size(axis), same=same, same_size=self._size(same), rows=rows)


@dataclass(frozen=True, kw_only=True)
class _Meeting:
    """The exchanges of ``models.rows.RowExchange``; columns are numbers of one row, ``width`` bytes each."""

    part: Part
    axis: AxisName
    size: int
    same: AxisName
    same_size: int
    rows: RowCount

    @property
    def meets(self) -> bool:
        """Whether ranks hand in shares."""
        return self.size > 1 and (self.size > self.same_size or self.rows.is_split)

    def spread(self, columns: int, width: int) -> Iterator[Exchange]:
        if self.meets:
            yield self._on(self.axis, "all_gather", self.rows.share * columns, width)

    def total(self, columns: int, width: int) -> Iterator[Exchange]:
        if self.meets:
            yield self._on(self.axis, "reduce_scatter", self.size * self.rows.share * columns, width)
            yield from self._given(columns, width)
        elif self.size > 1:
            yield self._on(self.axis, "all_reduce", self.rows.num * columns, width)

    def joined(self, columns: int, width: int) -> Iterator[Exchange]:
        """``columns`` of all ranks of the axis together."""
        if self.meets:
            yield self._on(self.axis, "all_to_all", self.rows.share * columns, width)
            yield from self._given(columns, width)
        elif self.size > 1:
            yield self._on(self.axis, "all_gather", self.rows.num * (columns // self.size), width)

    def _given(self, columns: int, width: int) -> Iterator[Exchange]:
        if not self.rows.is_split and self.same_size > 1:
            yield self._on(self.same, "all_gather", self.rows.share * columns, width)

    def _on(self, axis: AxisName, kind: Kind, elements: int, width: int) -> Exchange:
        return Exchange(part=self.part, axis=axis, kind=kind, elements=elements, width=width)


def _as_drafts(items: Iterator[Exchange]) -> Iterator[Exchange]:
    yield from (replace(item, part="drafts") for item in items)


_DRAFT = "model.mtp.layers.0.transformer_layer"
