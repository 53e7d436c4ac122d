"""How long a decode step and a prefill take, estimated from counts and a card's rates.

Owns what a step consists of: rows, chunks, the stages of a pipeline and their order in time. An estimate of averages on the
busiest rank: no contention, no uneven experts, nothing that a driver does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import EngineConfig, InstanceSpec
from longcat_pd.sizing.exchanges import Chunk as ChunkRows
from longcat_pd.sizing.exchanges import RowCount, StepExchanges
from longcat_pd.sizing.pieces import Piece, Pieces, Step
from longcat_pd.sizing.pricing import Clock, Estimate, Spent
from longcat_pd.sizing.rates import Rates
from longcat_pd.sizing.work import LayerKind, Load, capped_mean

LAYER_PARTS = ("attention", "indexer", "dense", "experts")  # of ``sizing/exchanges.py``, that every layer has
MOST_LOOKS = 256  # chunks; a million tokens in chunks of 16384 are 62


class Prefill(NamedTuple):
    """``estimate``: along the longest way through stages and chunks. ``busiest_s``: of the stage that works longest, which
    is what the same again takes in a pipeline that is never empty."""

    estimate: Estimate
    busiest_s: float


class Chunk(NamedTuple):
    """Tokens of so many sequences, ``tokens`` of each, behind ``start`` that are there."""

    sequences: int
    start: int
    tokens: int


def decode_step(spec: InstanceSpec, model: ModelConfig, *, rates: Rates, sequences: int, context: int) -> Estimate:
    """One decode step with ``sequences`` in the whole instance, each of ``context`` tokens.

    ``spec`` is resolved. A compiled step has the rows of the smallest bucket that they fit in.
    """
    parallel, engine = spec.parallel, spec.engine
    mine = max(-(-sequences // parallel.dp_size), 1)
    slots = min((bucket for bucket in _buckets(engine) if bucket >= mine), default=mine)
    window = 1 + engine.num_draft_tokens
    rows = slots * window
    selected = min(context, model.indexer.index_topk) if model.indexer else context
    load = Load(rows=rows, visible=context, selected=selected, keys=mine * context)
    level = mine * window / parallel.attn_tp_size
    step = Step(load=load, share=-(-rows // parallel.attn_tp_size), level=level, sampled=rows)
    pieces = Pieces(spec, model)
    clock = Clock(spec, rates=rates, is_compiled=engine.exe_mode != "eager")
    ends = [*pieces.embedding(step), *pieces.head(step), *pieces.drafts(step)]
    links = clock.exchanged(_of_one_layer(spec, model).decode(slots, context=context))
    layers = _layers(clock, pieces, step, links)
    found = _stage(clock, layers, pieces.layers_of(0), ends=ends, links=links)
    return found + Estimate(fixed_s=rates.attained.graph_step_s)


def prefill(
    spec: InstanceSpec, model: ModelConfig, *, rates: Rates, prompts: int, length: int, most_looks: int = MOST_LOOKS
) -> Prefill:
    """``prompts`` prompts of ``length`` tokens through an idle instance, to the first token of the last.

    ``spec`` is resolved. Its prompts are computed eagerly, chunk after chunk, and different chunks by different stages.
    Where there are more chunks than ``most_looks``, one is looked at for several neighbours.
    """
    line = _Line(spec, model, rates=rates)
    rows: list[list[Estimate]] = []
    sends: list[float] = []
    chunks = list(chunks_of(-(-prompts // spec.parallel.dp_size), length, size=spec.engine.max_num_batched_tokens))
    for alike in _runs(chunks, most_looks):
        row, sending = line.chunk(alike[len(alike) // 2], length=length)
        rows.append([cell.times(len(alike)) for cell in row] if len(alike) > 1 else row)
        sends.append(sending * len(alike))
    seconds = [[cell.seconds for cell in row] for row in rows]
    way = longest_way(seconds, sends)
    spent = sum((rows[chunk][stage] for chunk, stage in way), Estimate())
    sent = sum(sends[chunk] for (chunk, _), (before, _) in zip(way[1:], way, strict=False) if chunk == before)
    return Prefill(spent + Estimate(sends_s=sent), max(map(sum, zip(*seconds, strict=True))))


def _runs(chunks: Sequence[Chunk], most: int) -> Iterator[Sequence[Chunk]]:
    """Neighbours, in so many runs at most."""
    size = -(-len(chunks) // most)
    yield from (chunks[first : first + size] for first in range(0, len(chunks), size))


def longest_way(seconds: Sequence[Sequence[float]], sends: Sequence[float]) -> list[tuple[int, int]]:
    """What has to wait for what, from the first chunk in the first stage to the last chunk in the last: (chunk, stage).

    ``seconds[chunk][stage]``; a stage takes one chunk after the other, and each when it has come from the stage
    before, which takes ``sends[chunk]`` more.
    """
    ends: dict[tuple[int, int], float] = {}
    before: dict[tuple[int, int], tuple[int, int]] = {}
    for chunk, row in enumerate(seconds):
        for stage, took in enumerate(row):
            ready = {(chunk - 1, stage): ends[chunk - 1, stage]} if chunk else {}
            if stage:
                ready[chunk, stage - 1] = ends[chunk, stage - 1] + sends[chunk]
            if ready:
                before[chunk, stage] = max(ready, key=lambda place: ready[place])
            ends[chunk, stage] = max(ready.values(), default=0.0) + took
    way = [(len(seconds) - 1, len(seconds[0]) - 1)]
    while way[-1] in before:
        way.append(before[way[-1]])
    return way[::-1]


def chunks_of(prompts: int, length: int, *, size: int) -> Iterator[Chunk]:
    """Plans of one group's prompts: long ones cut, short ones together."""
    if length >= size:
        for _ in range(prompts):
            yield from (Chunk(1, start, min(size, length - start)) for start in range(0, length, size))
        return
    together = size // length
    for first in range(0, prompts, together):
        yield Chunk(min(together, prompts - first), 0, length)


class _Line:
    """The stages of a prefill instance. Those that have the same to do are looked at once."""

    def __init__(self, spec: InstanceSpec, model: ModelConfig, *, rates: Rates) -> None:
        self._spec = spec
        self._model = model
        self._pieces = Pieces(spec, model)
        self._exchanges = _of_one_layer(spec, model)
        self._clock = Clock(spec, rates=rates, is_compiled=False)
        last = spec.parallel.pp_size - 1
        alike: dict[object, int] = {}
        self._counts = [self._pieces.layers_of(stage) for stage in range(last + 1)]
        self._alike = [
            alike.setdefault((stage == 0, stage == last, tuple(counts.items())), stage)
            for stage, counts in enumerate(self._counts)
        ]

    def chunk(self, chunk: Chunk, *, length: int) -> tuple[list[Estimate], float]:
        """Every stage for one chunk of prompts of ``length``, and what it takes from one stage to the next."""
        is_last = chunk.start + chunk.tokens == length
        step, rows = self._step(chunk, is_last=is_last), self._rows(chunk, is_last=is_last)
        found: dict[int, Estimate] = {}
        layers: dict[LayerKind, Estimate] = {}
        sending = 0.0
        for stage in dict.fromkeys(self._alike):
            exchanges = self._exchanges.prefill(stage, rows)
            sending = max(sending, sum(self._clock.exchange_s(item) for item in exchanges if item.kind == "send"))
            links = self._clock.exchanged(item for item in exchanges if item.kind != "send")
            layers = layers or _layers(self._clock, self._pieces, step, links)
            ends, counts = self._ends(step, stage), self._counts[stage]
            found[stage] = _stage(self._clock, layers, counts, ends=ends, links=links)
        return [found[stage] for stage in self._alike], sending

    def _ends(self, step: Step, stage: int) -> Iterator[Piece]:
        """What a stage has beside its layers."""
        if stage == 0:
            yield from self._pieces.embedding(step)
        if stage == self._spec.parallel.pp_size - 1:
            yield from self._pieces.head(step)
            yield from self._pieces.draft_cache(step.load.rows)

    def _step(self, chunk: Chunk, *, is_last: bool) -> Step:
        parallel, indexer = self._spec.parallel, self._model.indexer
        rows = self._busiest(chunk)
        cap = indexer.index_topk if indexer else chunk.start + chunk.tokens
        load = Load(
            rows=rows,
            visible=chunk.start + (chunk.tokens + 1) / 2,
            selected=capped_mean(chunk.start + 1, chunk.tokens, cap),
            keys=chunk.sequences * (chunk.start + chunk.tokens),
        )
        return Step(
            load=load,
            share=-(-rows // parallel.attn_tp_size),
            level=chunk.sequences * chunk.tokens / (parallel.cp_size * parallel.attn_tp_size),
            sampled=chunk.sequences * is_last,
            is_split=self._is_split,
        )

    def _rows(self, chunk: Chunk, *, is_last: bool) -> ChunkRows:
        parallel, block = self._spec.parallel, self._spec.engine.block_size
        rows, seen = self._busiest(chunk), chunk.start + chunk.tokens
        blocks = chunk.sequences * -(-seen // block)
        return ChunkRows(
            rows=RowCount(rows, -(-rows // parallel.attn_tp_size), self._is_split),
            outputs=chunk.sequences * is_last,
            context=seen,
            gathered=-(-blocks // parallel.cp_size) * block,
        )

    def _busiest(self, chunk: Chunk) -> int:
        """Rows of the rank of cp that has most: whole blocks, if the chunk has as many."""
        tokens, block = chunk.sequences * chunk.tokens, self._spec.engine.block_size
        size = self._spec.parallel.cp_size
        return tokens if size == 1 else min(tokens, -(-tokens // (size * block)) * block)

    @property
    def _is_split(self) -> bool:
        return self._spec.parallel.attn_tp_size > 1 and self._spec.parallel.dp_size > 1


def _layers(clock: Clock, pieces: Pieces, step: Step, links: Iterable[Spent]) -> dict[LayerKind, Estimate]:
    """One layer of every kind. ``links``: of one layer, and of what is beside layers."""
    each = {spent.part: spent for spent in links if spent.part in LAYER_PARTS}
    return {kind: clock.layer(pieces.layer(step, kind), each) for kind in dict.fromkeys(pieces.kinds)}


def _stage(
    clock: Clock,
    layers: Mapping[LayerKind, Estimate],
    counts: Mapping[LayerKind, int],
    *,
    ends: Iterable[Piece],
    links: Iterable[Spent],
) -> Estimate:
    """Layers, so many of each kind, and what is beside them."""
    others = [spent for spent in links if spent.part not in LAYER_PARTS]
    return clock.whole([(layers[kind], count) for kind, count in counts.items()], [*map(clock.price, ends), *others])


def _of_one_layer(spec: InstanceSpec, model: ModelConfig) -> StepExchanges:
    """The exchanges if every stage had one layer: all layers have the same."""
    ones = replace(spec.parallel, layers_per_stage=(1,) * spec.parallel.pp_size)
    return StepExchanges(replace(spec, parallel=ones), replace(model, num_layers=spec.parallel.pp_size))


def _buckets(engine: EngineConfig) -> Sequence[int]:
    return () if engine.exe_mode == "eager" else engine.buckets
