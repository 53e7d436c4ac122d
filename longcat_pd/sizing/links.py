"""Bytes on each kind of link: of a full decode step, of a full chunk of a prompt, and of the hand-over between pools.

Knows which ranks share a machine, and from ``exchanges.py`` what they exchange; no rates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from longcat_pd.config.checks import chunk_rows
from longcat_pd.config.model import ModelConfig, attentions_of
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.parallel.layout import AxisName, ParallelLayout
from longcat_pd.sizing.exchanges import INT64, Chunk, Exchange, Part, RowCount, StepExchanges
from longcat_pd.sizing.weights import DTYPE_BYTES

NATIVE_DEVICES = ("npu",)  # whose collectives are the backend's; see parallel/platform.py


@dataclass(frozen=True, kw_only=True)
class LinkBytes:
    """What one rank sends in a step, in bytes.

    ``inside``: to ranks of its node; ``between``: to those of other nodes; ``to_host``, ``from_host``: between its device
    and the memory of the node. ``by_part``: of the first two, by part of the model.
    """

    inside: int
    between: int
    to_host: int
    from_host: int
    by_part: Mapping[str, int]


def link_bytes(
    exchanges: Iterable[Exchange], spec: InstanceSpec, rank: int, *, to_host: int = 0, from_host: int = 0
) -> LinkBytes:
    """What ``rank`` sends in these exchanges. ``to_host``, ``from_host``: see ``looked_up``."""
    layout, per_node = ParallelLayout.of(spec.parallel), spec.ranks_per_node
    inside = between = 0
    parts: Counter[str] = Counter()
    for (axis, part, is_message), each in _by_axis(exchanges, spec).items():
        others = _receivers(layout, rank, axis, is_message=is_message)
        near = sum(other // per_node == rank // per_node for other in others)
        inside += near * each
        between += (len(others) - near) * each
        parts[part] += len(others) * each
    by_part = {part: count for part, count in parts.items() if count}
    return LinkBytes(inside=inside, between=between, to_host=to_host, from_host=from_host, by_part=by_part)


def between_nodes(exchanges: Sequence[Exchange], spec: InstanceSpec, ranks: Iterable[int]) -> dict[tuple[int, int], int]:
    """What these ranks send from node to node in these exchanges; nodes by their place, of two different ones."""
    layout, per_node = ParallelLayout.of(spec.parallel), spec.ranks_per_node
    found: Counter[tuple[int, int]] = Counter()
    totals: Counter[tuple[AxisName, bool]] = Counter()
    for (axis, _, is_message), each in _by_axis(exchanges, spec).items():
        totals[axis, is_message] += each
    for rank in ranks:
        for (axis, is_message), each in totals.items():
            for other in _receivers(layout, rank, axis, is_message=is_message):
                if other // per_node != rank // per_node:
                    found[rank // per_node, other // per_node] += each
    return dict(found)


def _by_axis(exchanges: Iterable[Exchange], spec: InstanceSpec) -> dict[tuple[AxisName, Part, bool], int]:
    """Bytes to each receiver by axis, part of the model, and whether they are messages to the next rank."""
    layout, is_native = ParallelLayout.of(spec.parallel), spec.device in NATIVE_DEVICES
    found: Counter[tuple[AxisName, Part, bool]] = Counter()
    for item in exchanges:
        each = item.bytes_each(layout.axis(item.axis).size, is_native=is_native)
        found[item.axis, item.part, item.kind == "send"] += each
    return dict(found)


def _receivers(layout: ParallelLayout, rank: int, axis: AxisName, *, is_message: bool) -> list[int]:
    group, place = layout.group_of(rank, axis), layout.coordinate(rank, axis)
    if is_message:
        return list(group[place + 1 : place + 2])
    return [other for other in group if other != rank]


def full_step(spec: InstanceSpec, model: ModelConfig, *, context: int) -> tuple[Exchange, ...]:
    """A decode step with all slots taken, each of ``context`` tokens, of which every row takes its best id.

    A compiled step has room for the longest sequence and chooses keys whatever the context is.
    """
    engine, num_seqs = spec.engine, spec.engine.max_num_seqs // spec.parallel.dp_size
    seen = engine.max_model_len if engine.exe_mode != "eager" else context
    return StepExchanges(spec, model).decode(num_seqs, context=seen)


def full_chunk(spec: InstanceSpec, model: ModelConfig, stage: int, *, context: int) -> tuple[Exchange, ...]:
    """A chunk of ``max_num_batched_tokens`` of one prompt of ``context`` tokens, which it ends; level over cp."""
    parallel, block = spec.parallel, spec.engine.block_size
    if parallel.cp_size > 1:
        num = chunk_rows(spec.engine, parallel)
        rows = RowCount(num, num)
        blocks = -(-context // block)
        gathered = -(-blocks // parallel.cp_size) * block
    else:
        num, gathered = spec.engine.max_num_batched_tokens, 0
        is_split = parallel.attn_tp_size > 1 and parallel.dp_size > 1
        rows = RowCount(num, -(-num // parallel.attn_tp_size), is_split)
    chunk = Chunk(rows=rows, outputs=1, context=context, gathered=gathered)
    return StepExchanges(spec, model).prefill(stage, chunk)


def looked_up(spec: InstanceSpec, model: ModelConfig, rank: int, *, num_rows: int) -> tuple[int, int]:
    """Bytes to the host and from it for n-gram vectors of ``num_rows`` rows of a rank, where tables are in host memory.

    Every rank of ``ngram_embed_tp`` looks up what all of them ask for in its own rows.
    """
    parallel, tables = spec.parallel, model.over_embedding
    is_first = rank < parallel.stage_size
    if spec.device == "cpu" or tables is None or parallel.ngram_tables != "host" or not is_first:
        return 0, 0
    asked = -(-num_rows // parallel.attn_tp_size) * parallel.ngram_embed_tp_size
    return asked * tables.num_tables * INT64, asked * model.hidden_size * DTYPE_BYTES[spec.model.dtype]


def token_bytes(spec: InstanceSpec, model: ModelConfig) -> int:
    """What one token leaves in all caches, which is what the hand-over moves of it; drafts included where there are any."""
    layers = model.num_layers + (spec.engine.num_draft_tokens > 0)
    attentions = [attention for layer in range(layers) for attention in attentions_of(model, layer)]
    values = sum(sum(model.cached_widths(attention).values()) for attention in attentions)
    return values * DTYPE_BYTES[spec.model.dtype]
